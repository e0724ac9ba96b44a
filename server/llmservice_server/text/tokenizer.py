"""A checkpoint's tokenizer: text and messages to token ids and back, and the ids that end an answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import msgspec
import tokenizers

from llmservice_planner.model.encoders import SENTENCES
from llmservice_server.text.chat_formats import ChatFormatError, ChatFormats, FormatNames
from llmservice_server.text.chat_template import ChatTemplate, ChatTemplateError, TemplateOptions
from llmservice_server.text.detokenizer import ByteDetokenizer, Detokenizer, TokenBytes, byte_of_letter
from llmservice_server.text.reasoning import Beginning, ReasoningTokens
from llmservice_server.types.checkpoint_config import eos_token_ids, read_json_object
from llmservice_server.types.errors import ModelLoadError

_SHRINKS_BY = {"NFC": 3, "NFKC": 4, "NFD": 3, "NFKD": 4}
"""At most, in bytes: the Kelvin sign (3 bytes) becomes K, a mathematical letter (4 bytes) a letter."""
_KEEPS = {"Sequence", "ByteLevel", "Prepend", "Metaspace", "Digits", "Punctuation", "Split"}
"""Normalizers and pre-tokenizers that drop no text, unless `_drops` finds that their settings do."""


def most_bytes_per_token(library: tokenizers.Tokenizer) -> int | None:
    """None where there is no certain bound: text may be dropped, or many unknown letters may become one token."""
    vocab = library.get_vocab()
    model = library.model
    added = library.get_added_tokens_decoder()
    parts = [*_parts(library.normalizer), *_parts(library.pre_tokenizer)]
    byte_level = any(part["type"] == "ByteLevel" for part in parts)
    letters = byte_of_letter() if byte_level else [f"<0x{byte:02X}>" for byte in range(256)]
    if not isinstance(model, tokenizers.models.BPE) or not (byte_level or model.byte_fallback):
        return None
    if any(letter not in vocab for letter in letters) or any(map(_drops, parts)):
        return None
    if any(token.lstrip or token.rstrip for token in added.values()):  # they include the white space beside them
        return None
    contents = {token.content for token in added.values()}
    pieces = (len(piece) if byte_level else len(piece.encode()) for piece in vocab if piece not in contents)
    longest = max([*pieces, *(len(content.encode()) for content in contents)], default=1)
    for part in parts:
        longest *= _SHRINKS_BY.get(part["type"], 1)
    return longest


def _parts(component: Any) -> Iterator[Mapping[str, Any]]:
    """The settings of a normalizer or a pre-tokenizer, and of its members."""
    if component is None:
        return
    pending = [msgspec.json.decode(component.__getstate__())]
    while pending:
        settings = pending.pop()
        yield settings
        pending += settings.get("normalizers", []) + settings.get("pretokenizers", [])


def _drops(part: Mapping[str, Any]) -> bool:
    kind = part["type"]
    if kind == "Replace":
        pattern = part["pattern"].get("String")
        return pattern is None or len(part["content"].encode()) < len(pattern.encode())
    return (kind not in _KEEPS and kind not in _SHRINKS_BY) or part.get("behavior") == "Removed"


_TOOLS = "additional_chat_templates/tool_use.jinja"
_PROMPT_END = 16  # tokens, enough for a tag in letters and white space
_NONE_KEPT: Mapping[int, str] = {}
_BUILT_OF_FLAGS = {"LlamaTokenizer", "LlamaTokenizerFast"}
_NORMALIZED_BY_FLAGS = {"BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MPNetTokenizer"}
_WITHOUT_TYPES = {"DistilBertTokenizer", "DistilBertTokenizerFast", "TokenizersBackend"}
"""Of transformers, which give a model no token types although tokenizer.json may have them."""
LONG_TEXT_BYTES = 4096
"""Longer texts are tokenized without the interpreter's lock; for shorter ones that costs more than it saves."""


class TextTooLongError(Exception):
    """A text has more tokens than allowed. The message is for the client."""


class EncodedPair(NamedTuple):
    """Two texts as one input."""

    token_ids: list[int]
    type_ids: list[int]  # of each token: 0 in the first text, 1 in the second one, where the model distinguishes them


class Tokenizer:
    """Thread-safe: the library keeps no state between calls."""

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        *,
        eos_token_ids: frozenset[int] = frozenset(),
        chat: ChatTemplate | None = None,
        formats: FormatNames = FormatNames(),  # noqa: B008  # it is frozen
        has_types: bool = True,
    ) -> None:
        """`has_types`: pairs have the token types of the post-processor. Raises ChatFormatError as `ChatFormats`."""
        self._library = library
        self._has_types = has_types
        self._chat = chat
        self.token_bytes = TokenBytes(library)
        added = {token.content: token_id for token_id, token in library.get_added_tokens_decoder().items()}
        self.formats = ChatFormats(formats, "" if chat is None else chat.source, added)
        self.eos_token_ids = eos_token_ids | self.formats.end_token_ids
        self._most_bytes_per_token = most_bytes_per_token(library)
        self.vocab_size: int = max(library.get_vocab().values(), default=-1) + 1

    @classmethod
    def load(
        cls,
        directory: Path,
        *,
        tokenizer_folder: Path | None = None,
        chat_template: Path | None = None,
        formats: FormatNames = FormatNames(),  # noqa: B008  # it is frozen
    ) -> Tokenizer:
        """Read tokenizer.json and, where they exist, template and configurations. Raises ModelLoadError.

        `tokenizer_folder` is read instead of the model's `directory`, which still determines the ids that end an
        answer. `chat_template` is a file that replaces the tokenizer's own template.
        """
        folder = tokenizer_folder or directory
        if chat_template is not None and not chat_template.is_file():
            raise ModelLoadError(f"the chat template {chat_template} does not exist: expected a file in Jinja")
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelLoadError(f"{path} does not exist: a checkpoint needs a fast tokenizer in Hugging Face's format")
        try:
            library = tokenizers.Tokenizer.from_file(str(path))
            library.encode("")  # fails where the post-processor lacks a token that it names
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library raises bare Exception, and its panics are none
            raise ModelLoadError(f"{path} cannot be read ({error}): delete it and fetch it again") from error
        library.no_truncation()
        library.no_padding()
        config = folder / "tokenizer_config.json"
        settings = read_json_object(config) if config.is_file() else {}
        _add_tokens_of_flags(library, settings)
        _normalize_by_flags(library, settings)
        if _is_lowercased(directory):
            parts = [tokenizers.normalizers.Lowercase(), *filter(None, [library.normalizer])]
            library.normalizer = tokenizers.normalizers.Sequence(parts)
        ends, own_end = eos_token_ids(directory), library.token_to_id(_special_tokens(settings).get("eos_token", ""))
        try:
            return cls(
                library,
                eos_token_ids=ends if own_end is None else ends | {own_end},
                chat=_chat_template(chat_template, folder, settings),
                formats=formats,
                has_types=_has_types(settings),
            )
        except ChatFormatError as error:
            raise ModelLoadError(str(error)) from error

    def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Ids of a prompt, with the special tokens that the model expects around it (Llama: the begin token).

        Raises TextTooLongError, without tokenizing it, for a text that is certainly longer than `max_tokens`.
        """
        return self.encode_all([text], add_special_tokens=add_special_tokens, max_tokens=max_tokens)[0]

    def encode_all(
        self, texts: Sequence[str], *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[list[int]]:
        """`encode` for several texts, each of at most `max_tokens`."""
        if max_tokens is not None:
            self._refuse_longer(texts, max_tokens)
        if sum(map(len, texts)) > LONG_TEXT_BYTES:
            return [each.ids for each in self._library.encode_batch_fast(texts, add_special_tokens=add_special_tokens)]
        return [self._library.encode(text, add_special_tokens=add_special_tokens).ids for text in texts]

    def encode_truncated(self, texts: Sequence[str], num_tokens: int) -> list[list[int]]:
        """`encode` for several texts, each cut at its end to `num_tokens`, the special tokens included."""
        room = max(0, num_tokens - self._library.num_special_tokens_to_add(False))  # no pair
        encodings = self._library.encode_batch_fast(texts, add_special_tokens=False)
        for each in encodings:
            each.truncate(room)
        return [self._library.post_process(each).ids for each in encodings]

    def encode_pairs(self, pairs: Sequence[tuple[str, str]], *, num_tokens: int | None = None) -> list[EncodedPair]:
        """As the tokenizer's own post-processor joins them. `num_tokens`: the longer text of a pair is cut to fit."""
        joined = self._joined(pairs, num_tokens)
        return [EncodedPair(each.ids, each.type_ids if self._has_types else [0] * len(each.ids)) for each in joined]

    def _joined(self, pairs: Sequence[tuple[str, str]], num_tokens: int | None) -> list[tokenizers.Encoding]:
        if num_tokens is None:
            return self._library.encode_batch_fast(pairs)
        room = max(0, num_tokens - self._library.num_special_tokens_to_add(True))  # a pair
        sides = (self._library.encode_batch_fast(texts, add_special_tokens=False) for texts in zip(*pairs, strict=True))
        joined = []
        for pair in zip(*sides, strict=True):
            shorter, longer = sorted(pair, key=len)
            _cut(shorter, max(room // 2, room - len(longer)))
            _cut(longer, room - len(shorter))
            joined.append(self._library.post_process(*pair))
        return joined

    def _refuse_longer(self, texts: Sequence[str], max_tokens: int) -> None:
        num_bytes = max((len(text.encode()) for text in texts), default=0)
        fewest = 0 if self._most_bytes_per_token is None else -(-num_bytes // self._most_bytes_per_token)
        if fewest > max_tokens:
            raise TextTooLongError(
                f"This model's maximum is {max_tokens} tokens. However, a text of {num_bytes} bytes has {fewest} or "
                "more: shorten it"
            )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: TemplateOptions = TemplateOptions(),  # noqa: B008  # it is frozen
        max_tokens: int | None = None,
    ) -> list[int]:
        """Ids of the templated messages; the template writes the special tokens itself.

        Raises ChatTemplateError, and TextTooLongError as `encode`.
        """
        if self._chat is None:
            raise ChatTemplateError("this model has no chat template: use /v1/completions with a prompt of your own")
        prompt = self._chat.render(messages, tools, options)
        return self.encode(prompt, add_special_tokens=False, max_tokens=max_tokens)

    def decode(
        self, ids: Sequence[int], *, skip_special_tokens: bool = True, kept: Mapping[int, str] = _NONE_KEPT
    ) -> str:
        """Text, by default without special tokens, except those `kept` as a text of their own.

        Bytes that are no complete character become U+FFFD.
        """
        if not kept.keys().isdisjoint(ids):
            runs = ((marker, list(run)) for marker, run in groupby(ids, kept.get))
            decode = partial(self.decode, skip_special_tokens=skip_special_tokens)
            return "".join(decode(run) if marker is None else marker * len(run) for marker, run in runs)
        text: str = self._library.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(
        self,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        kept: Mapping[int, str] = _NONE_KEPT,
    ) -> Detokenizer | ByteDetokenizer:
        """For one answer to a prompt."""
        if self.token_bytes.concatenate and skip_special_tokens:
            return ByteDetokenizer(self.token_bytes, prompt_token_ids, kept)
        decode = partial(self.decode, skip_special_tokens=skip_special_tokens, kept=kept)
        return Detokenizer(decode, prompt_token_ids)

    def beginning(self, prompt_token_ids: Sequence[int], continued: str | None) -> Beginning:
        """Where the answer to a prompt begins; `continued` is the message that it continues."""
        end = self.decode(prompt_token_ids[-_PROMPT_END:], skip_special_tokens=False)
        return self.formats.beginning(end, continued)

    def reasoning_tokens(self, beginning: Beginning) -> ReasoningTokens | None:
        """A counter for one answer; None where the model's reasoning cannot be told by tokens."""
        marks = self.formats.reasoning_marks
        if marks is None:
            return None
        return ReasoningTokens(self.encode(marks[0], add_special_tokens=False), marks[1], beginning)

    def template_variables(self, reasoning_effort: str | None) -> dict[str, Any]:
        """What tells the chat template how much to reason; nothing where it does not know."""
        known = frozenset() if self._chat is None or reasoning_effort is None else self._chat.variables
        if "reasoning_effort" in known:
            return {"reasoning_effort": reasoning_effort}
        switches = known & {"enable_thinking", "thinking"}  # DeepSeek V3.1 and Granite have the second one
        return dict.fromkeys(switches, reasoning_effort != "none")

    def words(self, ids: Sequence[int]) -> list[str]:
        """The vocabulary's entry for each id, in the tokenizer's own spelling; empty for an id without one."""
        return [self._library.id_to_token(token_id) or "" for token_id in ids]


def _cut(text: tokenizers.Encoding, num_tokens: int) -> None:
    """The library keeps what it cuts off in pieces of this length, and joins each of one text with each of the other.

    Cut twice, a text has one such piece.
    """
    text.truncate(num_tokens + 1)
    text.truncate(num_tokens)


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token` and the like: strings, or objects whose `content` is the string."""
    tokens = {}
    for name, value in settings.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens


def _has_types(settings: dict[str, Any]) -> bool:
    """Whether transformers' tokenizer gives the model token types, by tokenizer_config.json.

    `PreTrainedTokenizerFast` gives them in transformers 4, whose models were trained with them, and not in 5.
    """
    inputs = settings.get("model_input_names")
    if isinstance(inputs, list):
        return "token_type_ids" in inputs
    return str(settings.get("tokenizer_class")) not in _WITHOUT_TYPES


def _normalize_by_flags(library: tokenizers.Tokenizer, settings: dict[str, Any]) -> None:
    """transformers' tokenizers of BERT follow tokenizer_config.json where tokenizer.json says something else."""
    named, given = str(settings.get("tokenizer_class")).removesuffix("Fast"), library.normalizer
    if named in _NORMALIZED_BY_FLAGS and isinstance(given, tokenizers.normalizers.BertNormalizer):
        names = {"do_lower_case": "lowercase", "tokenize_chinese_chars": "handle_chinese_chars"}
        keys = (*names, "strip_accents")
        flags = {names.get(key, key): settings[key] for key in keys if isinstance(settings.get(key), bool)}
        library.normalizer = tokenizers.normalizers.BertNormalizer(clean_text=given.clean_text, **flags)


def _is_lowercased(directory: Path) -> bool:
    """Whether sentence-transformers makes texts lower-case, whatever the tokenizer does itself."""
    files = (directory / name for name in SENTENCES)
    settings = next(filter(None, (read_json_object(file) for file in files if file.is_file())), {})
    return settings.get("do_lower_case") is True


def _add_tokens_of_flags(library: tokenizers.Tokenizer, settings: dict[str, Any]) -> None:
    """Where tokenizer_config.json asks for tokens around a text that the post-processor of tokenizer.json does not add.

    transformers before 5 made it of these flags in Llama's tokenizers, as of e5-mistral and DeepSeek-R1-Distill-Qwen.
    """
    if str(settings.get("tokenizer_class")) not in _BUILT_OF_FLAGS:
        return
    tokens, encoded = _special_tokens(settings), library.encode("a").tokens
    bos, eos = tokens.get("bos_token", ""), tokens.get("eos_token", "")
    has_bos, has_eos = encoded[:1] == [bos], encoded[-1:] == [eos]
    adds_bos = not has_bos and settings.get("add_bos_token") is True and library.token_to_id(bos) is not None
    adds_eos = not has_eos and settings.get("add_eos_token") is True and library.token_to_id(eos) is not None
    if adds_bos or adds_eos:
        before, after = [bos] * (has_bos or adds_bos), [eos] * (has_eos or adds_eos)
        single = [*before, "$A", *after]
        library.post_processor = tokenizers.processors.TemplateProcessing(
            single=single,
            pair=[*single, *(f"{token}:1" for token in before), "$B:1", *(f"{token}:1" for token in after)],
            special_tokens=[(token, library.token_to_id(token)) for token in (*before, *after)],
        )


def _chat_template(given: Path | None, folder: Path, settings: dict[str, Any]) -> ChatTemplate | None:
    """That of the file `given`; else of chat_template.jinja, of tokenizer_config.json, or of chat_template.json."""
    own, of_processor, for_tools = (folder / name for name in ("chat_template.jinja", "chat_template.json", _TOOLS))
    path, tools_source = given or own, None
    try:
        source: Any = path.read_text(encoding="utf-8") if path.is_file() else None
        if source is None:
            path, source = folder / "tokenizer_config.json", settings.get("chat_template")
        if source is None and of_processor.is_file():
            path, source = of_processor, read_json_object(of_processor).get("chat_template")
        if isinstance(source, list):  # several, by name
            named = {entry["name"]: entry["template"] for entry in source}
            source, tools_source = named.get("default"), named.get("tool_use")
        elif given is None and path == own and for_tools.is_file():
            tools_source = for_tools.read_text(encoding="utf-8")
        return None if source is None else ChatTemplate(source, _special_tokens(settings), tools_source)
    except (jinja2.TemplateError, UnicodeDecodeError, KeyError, TypeError, RecursionError, SyntaxError) as error:
        raise ModelLoadError(
            f"the chat template in {path} cannot be used ({error}): correct it, or give another with --chat-template"
        ) from error
