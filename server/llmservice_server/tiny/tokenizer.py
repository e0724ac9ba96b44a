"""A really trained byte-level BPE tokenizer with a chat template, small enough for demos and tests."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CORPUS = Path(__file__).with_name("corpus.txt")
BOS, EOS = "<|begin|>", "<|end|>"
SPECIAL_TOKENS = (BOS, EOS, "<|system|>", "<|user|>", "<|assistant|>")
MIN_VOCAB_SIZE = len(SPECIAL_TOKENS) + 256  # every byte has a token, so that any text can be encoded

# Tools are offered, called and answered as Hermes and Qwen do it.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}"
    '{{ \'<|system|>\\nCall a function with <tool_call>{"name": ..., "arguments": ...}</tool_call>:\\n\' }}'
    "{% for tool in tools %}{{ tool.function | tojson + '\\n' }}{% endfor %}"
    "{{ eos_token + '\\n' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('unknown role ' + message['role'] + ': expected system, user, assistant or tool') }}"
    "{% endif %}"
    "{% if message['role'] == 'tool' %}"
    "{{ '<|user|>\\n<tool_response>\\n' + message['content'] | trim + '\\n</tool_response>' + eos_token + '\\n' }}"
    "{% else %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] | trim }}"
    "{% for call in message['tool_calls'] or [] %}"
    '{{ \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson + '}\\n</tool_call>' }}"
    "{% endfor %}"
    "{{ eos_token + '\\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)

# Words with their leading space, numbers, punctuation, white space: a token never spans two of these.
_WORDS = r" ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def train(vocab_size: int) -> Tokenizer:
    """Train on the embedded corpus; the vocabulary is smaller than `vocab_size` where the corpus has no more merges.

    Deterministic: merges of equal frequency are ordered by their ids. Raises ValueError below `MIN_VOCAB_SIZE`.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(
            f"a vocabulary of {vocab_size} is too small: 256 bytes and the special tokens take {MIN_VOCAB_SIZE}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS.read_text(encoding="utf-8").splitlines(keepends=True), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def printable_ids(tokenizer: Tokenizer) -> list[int]:
    """The tokens that are whole printable characters: neither special, nor control, nor half a character."""
    spelling = decoders.ByteLevel()
    printable = []
    for token, token_id in tokenizer.get_vocab().items():
        if token in SPECIAL_TOKENS:
            continue
        text = spelling.decode([token])
        if "\ufffd" not in text and all(letter.isprintable() or letter == "\n" for letter in text):
            printable.append(token_id)
    return sorted(printable)
