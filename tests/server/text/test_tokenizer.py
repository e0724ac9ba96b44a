"""A tokenizer as the files of a checkpoint define it."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from llmservice_server.text.chat_formats import FormatNames
from llmservice_server.text.chat_template import ChatTemplateError
from llmservice_server.text.reasoning import HARMONY_MARKERS
from llmservice_server.text.tokenizer import TextTooLongError, Tokenizer, most_bytes_per_token
from llmservice_server.tiny import tokenizer as tiny_tokenizer
from llmservice_server.tiny.tokenizer import train
from llmservice_server.types.errors import ModelLoadError


def _tiny(change: Callable[[tokenizers.Tokenizer], None]) -> tokenizers.Tokenizer:
    library = train(400)
    change(library)
    return library


def _normalized(*parts: normalizers.Normalizer) -> tokenizers.Tokenizer:
    def change(library: tokenizers.Tokenizer) -> None:
        library.normalizer = normalizers.Sequence([*parts])

    return _tiny(change)


def _added(token: AddedToken) -> tokenizers.Tokenizer:
    return _tiny(lambda library: library.add_tokens([token]))


def _byte_fallback(*, complete: bool) -> tokenizers.Tokenizer:
    pieces = ["<unk>", "\u2581", "a", "b", "ab", "\u2581ab", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {piece: index for index, piece in enumerate(pieces if complete else pieces[:-1])}
    merges = [("a", "b"), ("\u2581", "ab")]
    library = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    return library


BOUNDED = {
    "byte level": _tiny(lambda _: None),
    "NFC": _normalized(normalizers.NFC()),
    "NFKC": _normalized(normalizers.NFKC()),
    "an added token": _added(AddedToken("a very long added token")),
    "byte fallback": _byte_fallback(complete=True),
}
TEXTS = st.text(
    st.one_of(st.characters(codec="utf-8"), st.sampled_from("ab \n\u212a\U0001d7d9e\u0301\u1100\u1161\u11a8")),
    max_size=200,
)


@pytest.mark.parametrize("library", BOUNDED.values(), ids=BOUNDED)
@settings(deadline=None, max_examples=60)
@given(text=TEXTS)
def test_a_token_stands_for_no_more_bytes_than_the_bound(library: tokenizers.Tokenizer, text: str) -> None:
    most = most_bytes_per_token(library)
    assert most is not None
    num_tokens = len(library.encode(text, add_special_tokens=False).ids)
    assert len(text.encode()) <= most * num_tokens


def _dropping_spaces(library: tokenizers.Tokenizer) -> None:
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\s+"), "removed"), pre_tokenizers.ByteLevel(use_regex=False)]
    )


@pytest.mark.parametrize(
    "library",
    [
        pytest.param(_tiny(_dropping_spaces), id="spaces are dropped"),
        pytest.param(_normalized(normalizers.Strip()), id="stripped"),
        pytest.param(_normalized(normalizers.Replace(Regex(" +"), " ")), id="replaced by a pattern"),
        pytest.param(_normalized(normalizers.Replace("aa", "")), id="replaced by nothing"),
        pytest.param(_added(AddedToken("<end>", rstrip=True)), id="a token that takes the spaces behind it"),
        pytest.param(_byte_fallback(complete=False), id="a byte without a token"),
        pytest.param(tokenizers.Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>")), id="whole words"),
    ],
)
def test_where_text_may_vanish_there_is_no_bound(library: tokenizers.Tokenizer) -> None:
    assert most_bytes_per_token(library) is None


MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_model, tmp_path / "model")


def _change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps((json.loads(path.read_text()) if path.is_file() else {}) | fields))


def _eos(model: Path) -> int:
    eos: int = Tokenizer.load(model)._library.token_to_id(tiny_tokenizer.EOS)
    return eos


def test_the_generation_config_names_the_ends_beside_the_tokenizers_own(model: Path) -> None:
    _change(model / "generation_config.json", eos_token_id=[7, 9])
    assert Tokenizer.load(model).eos_token_ids == {7, 9, _eos(model)}


def test_without_a_generation_config_the_config_names_the_end(model: Path) -> None:
    (model / "generation_config.json").unlink()
    _change(model / "config.json", eos_token_id=8)
    assert Tokenizer.load(model).eos_token_ids == {8, _eos(model)}


def test_a_folder_with_nothing_but_the_tokenizer_has_no_end_and_no_chat(model: Path) -> None:
    for name in ("generation_config.json", "config.json", "tokenizer_config.json"):
        (model / name).unlink()
    tokenizer = Tokenizer.load(model)
    assert tokenizer.eos_token_ids == frozenset()
    assert tokenizer.decode(tokenizer.encode("any text")) == "any text"
    with pytest.raises(ChatTemplateError, match="use /v1/completions"):
        tokenizer.encode_chat(MESSAGES)


def test_a_template_file_goes_before_the_one_in_the_configuration(model: Path) -> None:
    (model / "chat_template.jinja").write_text("only this{{ eos_token }}")
    tokenizer = Tokenizer.load(model)
    assert tokenizer.decode(tokenizer.encode_chat(MESSAGES)) == "only this"


def test_of_several_named_templates_the_default_one_is_taken(model: Path) -> None:
    templates = [{"name": "rag", "template": "rag"}, {"name": "default", "template": "default"}]
    _change(model / "tokenizer_config.json", chat_template=templates)
    tokenizer = Tokenizer.load(model)
    assert tokenizer.decode(tokenizer.encode_chat(MESSAGES)) == "default"


HERMES = "{% if tools %}<tool_call>{% endif %}"


@pytest.mark.parametrize("place", ["a list", "a folder"])
def test_a_template_for_tools_is_used_and_its_format_found(model: Path, place: str) -> None:
    """As Hermes 3 has them, in a list, and as transformers saves them since."""
    if place == "a list":
        templates = [{"name": "default", "template": "default"}, {"name": "tool_use", "template": HERMES}]
        _change(model / "tokenizer_config.json", chat_template=templates)
    else:
        (model / "chat_template.jinja").write_text("default")
        (model / "additional_chat_templates").mkdir()
        (model / "additional_chat_templates" / "tool_use.jinja").write_text(HERMES)
    tokenizer = Tokenizer.load(model)
    assert tokenizer.decode(tokenizer.encode_chat(MESSAGES)) == "default"
    assert tokenizer.decode(tokenizer.encode_chat(MESSAGES, [{"type": "function"}])) == "<tool_call>"
    assert tokenizer.formats.names.tool_calls == "hermes"


def test_the_template_of_a_processor_is_the_last_to_be_looked_for(model: Path) -> None:
    (model / "chat_template.json").write_text(json.dumps({"chat_template": "of the processor"}))
    tokenizer = Tokenizer.load(model)
    assert tokenizer.decode(tokenizer.encode_chat(MESSAGES)) != "of the processor"
    _change(model / "tokenizer_config.json", chat_template=None)
    tokenizer = Tokenizer.load(model)
    assert tokenizer.decode(tokenizer.encode_chat(MESSAGES)) == "of the processor"


def test_special_tokens_may_be_objects(model: Path) -> None:
    _change(
        model / "tokenizer_config.json",
        bos_token={"content": tiny_tokenizer.BOS, "special": True},
        chat_template="{{ bos_token }}x",
    )
    tokenizer = Tokenizer.load(model)
    assert tokenizer.encode_chat(MESSAGES) == tokenizer.encode("x")


BEGIN, END = 0, 1


@pytest.mark.parametrize(
    ("flags", "template", "around"),
    [
        pytest.param({"add_bos_token": True, "add_eos_token": True}, True, ([BEGIN], [END]), id="e5-mistral"),
        pytest.param({"add_bos_token": True, "add_eos_token": False}, False, ([BEGIN], []), id="DeepSeek-R1-Distill"),
        pytest.param({"add_bos_token": True, "add_eos_token": True}, False, ([BEGIN], [END]), id="both are missing"),
        pytest.param({"add_eos_token": True}, False, ([], [END]), id="only the end"),
        pytest.param({"add_bos_token": False}, True, ([BEGIN], []), id="a flag that is false"),
        pytest.param({}, False, ([], []), id="no flag"),
        pytest.param({"add_eos_token": True, "tokenizer_class": "Qwen2Tokenizer"}, True, ([BEGIN], []), id="Qwen"),
        pytest.param({"add_bos_token": True, "bos_token": None}, False, ([], []), id="a flag without its token"),
    ],
)
def test_flags_of_llamas_tokenizers_add_tokens_that_the_post_processor_lacks(
    model: Path, flags: dict[str, Any], template: bool, around: tuple[list[int], list[int]]
) -> None:
    before, after = around
    if not template:
        settings = {"add_prefix_space": False, "trim_offsets": False, "use_regex": True}
        _change(model / "tokenizer.json", post_processor={"type": "ByteLevel", **settings})
    prompt = Tokenizer.load(model).encode_chat(MESSAGES)
    _change(model / "tokenizer_config.json", **{"tokenizer_class": "LlamaTokenizerFast", **flags})
    tokenizer = Tokenizer.load(model)
    text = tokenizer.encode("some text", add_special_tokens=False)
    assert tokenizer.encode("some text") == [*before, *text, *after]
    (cut,) = tokenizer.encode_truncated(["some text " * 9], 5)
    assert (cut[: len(before)], len(cut), cut[5 - len(after) :]) == (before, 5, after)
    (pair,) = tokenizer.encode_pairs([("some text", "some text")])
    assert pair.token_ids.count(END) == 2 * len(after)
    if flags.get("bos_token", BEGIN) is not None:
        assert tokenizer.encode_chat(MESSAGES) == prompt


@pytest.mark.parametrize(
    ("name", "flags", "as_text"),
    [
        ("BertTokenizer", {"do_lower_case": True}, "cafe \u4e2d \u56fd"),
        ("BertTokenizerFast", {}, "cafe \u4e2d \u56fd"),
        ("DistilBertTokenizer", {"do_lower_case": False}, "Caf\u00e9 \u4e2d \u56fd"),
        ("MPNetTokenizer", {"strip_accents": False, "tokenize_chinese_chars": False}, "caf\u00e9 \u4e2d\u56fd"),
        ("PreTrainedTokenizerFast", {"do_lower_case": True}, "Caf\u00e9 \u4e2d \u56fd"),
    ],
)
def test_tokenizers_of_bert_follow_the_flags_of_their_configuration(
    model: Path, name: str, flags: dict[str, Any], as_text: str
) -> None:
    plain = Tokenizer.load(model)
    normalizer = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": False}
    _change(model / "tokenizer.json", normalizer={"type": "BertNormalizer", **normalizer})
    _change(model / "tokenizer_config.json", tokenizer_class=name, **flags)
    ids = Tokenizer.load(model).encode("Caf\u00e9 \u4e2d\u56fd", add_special_tokens=False)
    assert " ".join(plain.decode(ids).split()) == as_text


@pytest.mark.parametrize("has_normalizer", [True, False])
def test_texts_are_lower_case_where_sentence_transformers_makes_them_so(model: Path, has_normalizer: bool) -> None:
    _change(model / "tokenizer.json", normalizer={"type": "NFC"} if has_normalizer else None)
    plain = Tokenizer.load(model)
    (model / "sentence_bert_config.json").write_text('{"max_seq_length": 64, "do_lower_case": false}')
    assert Tokenizer.load(model).encode("Caf\u00c9") == plain.encode("Caf\u00c9") != plain.encode("caf\u00e9")
    (model / "sentence_bert_config.json").write_text('{"max_seq_length": 64, "do_lower_case": true}')
    lower = Tokenizer.load(model)
    assert lower.encode("Caf\u00c9") == plain.encode("caf\u00e9")
    assert lower.encode_pairs([("A", "B")]) == plain.encode_pairs([("a", "b")])


@given(sizes=st.tuples(st.integers(0, 9), st.integers(0, 9)), num_tokens=st.integers(4, 14))
def test_texts_and_pairs_are_cut_as_the_library_cuts_them(sizes: tuple[int, int], num_tokens: int) -> None:
    library = tokenizers.Tokenizer(models.WordLevel({"[CLS]": 0, "[SEP]": 1, "a": 2, "b": 3}, unk_token="a"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [("[CLS]", 0), ("[SEP]", 1)]
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=special
    )
    tokenizer, (first, second) = Tokenizer(library), ("a " * sizes[0], "b " * sizes[1])
    ids = tokenizer.encode_truncated([first, second], num_tokens)
    [pair] = tokenizer.encode_pairs([(first, second)], num_tokens=num_tokens)
    library.enable_truncation(num_tokens)
    assert ids == [library.encode(text).ids for text in (first, second)]
    expected = library.encode(first, second)
    assert (pair.token_ids, pair.type_ids) == (expected.ids, expected.type_ids)


def test_what_is_cut_off_two_long_texts_is_not_joined_with_each_other(tiny_model: Path) -> None:
    text = "some text " * 100
    (joined,) = Tokenizer.load(tiny_model)._joined([(text, text)], 20)
    assert len(joined.ids) == 20
    assert len(joined.overflowing) <= 3, "in pieces of 10 tokens it would be hundreds, and gigabytes for long texts"


@pytest.mark.parametrize(
    ("config", "has_types"),
    [
        ({}, True),
        ({"tokenizer_class": "BertTokenizer"}, True),
        ({"tokenizer_class": "BertTokenizer", "model_input_names": ["input_ids", "attention_mask"]}, False),
        ({"tokenizer_class": "TokenizersBackend"}, False),
        ({"tokenizer_class": "TokenizersBackend", "model_input_names": ["input_ids", "token_type_ids"]}, True),
        ({"tokenizer_class": "DistilBertTokenizer"}, False),
    ],
)
def test_pairs_have_the_token_types_that_transformers_gives_the_model(
    model: Path, config: dict[str, Any], has_types: bool
) -> None:
    sides = [{"Sequence": {"id": name, "type_id": type_id}} for type_id, name in enumerate("AB")]
    template = {"type": "TemplateProcessing", "single": sides[:1], "pair": sides, "special_tokens": {}}
    _change(model / "tokenizer.json", post_processor=template)
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(model)
    first, second = map(len, tokenizer.encode_all(["one text", "two"]))
    (pair,) = tokenizer.encode_pairs([("one text", "two")])
    assert pair.type_ids == [0] * first + [int(has_types)] * second


def test_truncation_and_padding_that_were_saved_with_the_tokenizer_are_off(model: Path) -> None:
    library = Tokenizer.load(model)._library
    library.enable_truncation(4)
    library.enable_padding(length=64)
    library.save(str(model / "tokenizer.json"))
    assert 10 < len(Tokenizer.load(model).encode("one two three " * 8)) < 64


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", "tokenizer.json cannot be read"),
        ("tokenizer_config.json", "{", "tokenizer_config.json cannot be read as JSON"),
        ("generation_config.json", "[1]", "generation_config.json holds a JSON list"),
        ("chat_template.jinja", "{% for %}", "the chat template in .* cannot be used"),
        ("chat_template.jinja", "{% break %}", "the chat template in .* cannot be used"),
        ("chat_template.jinja", "{{ " + "(" * 3000, "the chat template in .* cannot be used .maximum recursion"),
    ],
)
def test_a_broken_file_is_named(model: Path, name: str, content: str, message: str) -> None:
    (model / name).write_text(content)
    with pytest.raises(ModelLoadError, match=message):
        Tokenizer.load(model)


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<none>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [],
                "special_tokens": {},
            }
        },
    ],
)
def test_a_tokenizer_at_which_the_library_panics_is_refused(model: Path, change: dict[str, Any]) -> None:
    path = model / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ModelLoadError, match=r"tokenizer.json cannot be read .*: delete it and fetch it again"):
        Tokenizer.load(model)


def test_a_tokenizer_class_that_is_no_name_says_nothing(model: Path) -> None:
    (model / "tokenizer_config.json").write_text('{"tokenizer_class": ["LlamaTokenizer"]}')
    assert Tokenizer.load(model).encode("a")


@pytest.mark.parametrize("byte_level", [True, False])
def test_special_tokens_of_the_models_formats_are_part_of_the_text(model: Path, byte_level: bool) -> None:
    library = tiny_tokenizer.train(1024)
    library.add_tokens([tokenizers.AddedToken("<tool_call>", special=True, normalized=False)])
    if not byte_level:
        library.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.ByteLevel(), tokenizers.decoders.Fuse()])
    library.save(str(model / "tokenizer.json"))
    tokenizer = Tokenizer.load(model)
    assert tokenizer.token_bytes.concatenate is byte_level
    assert tokenizer.formats.names.tool_calls == "hermes"
    ids = tokenizer.encode(f"Grüße<tool_call><tool_call>\nx{tiny_tokenizer.EOS}é")
    detokenizer = tokenizer.detokenizer([], kept=tokenizer.formats.kept_tokens(calls=True))
    text = "".join(detokenizer.append([token_id]) for token_id in ids) + detokenizer.flush()
    assert text == "Grüße<tool_call><tool_call>\nxé"
    dropping = tokenizer.detokenizer([], kept={tokenizer.encode("<tool_call>")[0]: "", 300: ""})
    assert dropping.append([*ids, 300]) + dropping.flush() == "Grüße\nxé"
    assert tokenizer.decode(ids) == "Grüße\nxé"


def test_tokens_that_end_a_call_end_answers_although_the_generation_config_omits_them(model: Path) -> None:
    library = tiny_tokenizer.train(1024)
    library.add_special_tokens(["<|eom_id|>"])
    library.save(str(model / "tokenizer.json"))
    assert Tokenizer.load(model).eos_token_ids == {1}
    assert Tokenizer.load(model, formats=FormatNames("llama3_json")).eos_token_ids == {1, 1024}


def test_reasoning_is_counted_where_tokens_mark_it(model: Path) -> None:
    library = tiny_tokenizer.train(1024)
    library.add_special_tokens(list(HARMONY_MARKERS))
    library.save(str(model / "tokenizer.json"))
    tokenizer = Tokenizer.load(model, formats=FormatNames("harmony"))
    counter = tokenizer.reasoning_tokens("open")
    assert counter is not None
    final = "<|end|><|start|>assistant<|channel|>final<|message|>Hello you<|return|>"
    counter.append(tokenizer.encode("<|channel|>analysis<|message|>Hello" + final, add_special_tokens=False))
    assert counter.num_tokens == len(tokenizer.encode("Hello", add_special_tokens=False))
    assert Tokenizer.load(model, formats=FormatNames("hermes", "think")).reasoning_tokens("open") is None


def test_formats_that_do_not_belong_together_are_refused(tiny_model: Path) -> None:
    with pytest.raises(ModelLoadError, match="harmony is one format for both"):
        Tokenizer.load(tiny_model, formats=FormatNames("hermes", "harmony"))


@pytest.mark.parametrize(
    ("template", "effort", "variables"),
    [
        ("{{ reasoning_effort }}{{ enable_thinking }}", "none", {"reasoning_effort": "none"}),
        ("{{ enable_thinking }}", "none", {"enable_thinking": False}),
        ("{{ enable_thinking }}", "high", {"enable_thinking": True}),
        ("{% if not thinking is defined %}{% set thinking = false %}{% endif %}", "low", {"thinking": True}),
        ("{{ messages[0].thinking }} enable_thinking", "none", {}),
        ("{{ reasoning_effort }}", None, {}),
        ("{{ messages }}", "high", {}),
    ],
)
def test_the_effort_reaches_templates_that_read_it(
    model: Path, template: str, effort: str | None, variables: dict[str, object]
) -> None:
    (model / "chat_template.jinja").write_text(template)
    assert Tokenizer.load(model).template_variables(effort) == variables


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(tiny_model: Path) -> None:
    tokenizer = Tokenizer.load(tiny_model)
    with pytest.raises(TextTooLongError, match=r"maximum is 512 tokens.* a text of 8000000 bytes has \d+ or more"):
        tokenizer.encode_all(["short", "a" * 8_000_000], max_tokens=512)


def test_a_long_text_has_the_ids_of_its_parts_and_leaves_the_interpreter_to_others(tiny_model: Path) -> None:
    tokenizer = Tokenizer.load(tiny_model)
    text, ids, turns = "Hello you, hello again. " * 20_000, [], 0
    thread = threading.Thread(target=lambda: ids.extend(tokenizer.encode(text, add_special_tokens=False)))
    thread.start()
    while thread.is_alive():
        turns += 1
        time.sleep(0)
    short = tokenizer.encode(text[: len(text) // 5000], add_special_tokens=False)
    assert ids == short * 5000
    assert turns > 1000


def test_a_template_that_is_asked_for_has_to_exist(tiny_model: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"absent\.jinja does not exist"):
        Tokenizer.load(tiny_model, chat_template=tiny_model / "absent.jinja")
