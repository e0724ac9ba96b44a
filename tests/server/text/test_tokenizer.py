"""What a checkpoint's folder says about its tokenizer."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from llmservice_server.text.chat_template import ChatTemplateError
from llmservice_server.text.tokenizer import TextTooLongError, Tokenizer, TokenizerLoadError
from llmservice_server.text.tool_format import HERMES, ToolFormat
from llmservice_server.tiny import tokenizer as tiny_tokenizer

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


def test_special_tokens_may_be_objects(model: Path) -> None:
    _change(
        model / "tokenizer_config.json",
        bos_token={"content": tiny_tokenizer.BOS, "special": True},
        chat_template="{{ bos_token }}x",
    )
    tokenizer = Tokenizer.load(model)
    assert tokenizer.encode_chat(MESSAGES) == tokenizer.encode("x")


def test_truncation_and_padding_that_were_saved_with_the_tokenizer_are_off(model: Path) -> None:
    library = Tokenizer.load(model)._library
    library.enable_truncation(4)
    library.enable_padding(length=64)
    library.save(str(model / "tokenizer.json"))
    assert 10 < len(Tokenizer.load(model).encode("one two three " * 8)) < 64


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", "{", "tokenizer.json cannot be read"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not valid JSON"),
        ("generation_config.json", "[1]", "generation_config.json holds a list"),
        ("chat_template.jinja", "{% for %}", "the chat template in .* cannot be used"),
    ],
)
def test_a_broken_file_is_named(model: Path, name: str, content: str, words: str) -> None:
    (model / name).write_text(content)
    with pytest.raises(TokenizerLoadError, match=words):
        Tokenizer.load(model)


@pytest.mark.parametrize(
    ("special", "layout", "tag_ids"), [(None, HERMES, {}), (False, HERMES, {"<tool_call>": 1024}), (True, None, {})]
)
def test_tags_of_tool_calls_may_be_tokens_as_long_as_they_can_be_read(
    model: Path, special: bool | None, layout: ToolFormat | None, tag_ids: dict[str, int]
) -> None:
    library = tiny_tokenizer.train(1024)
    if special is not None:
        library.add_tokens([tokenizers.AddedToken("<tool_call>", special=special, normalized=False)])
    library.save(str(model / "tokenizer.json"))
    tokenizer = Tokenizer.load(model)
    assert (tokenizer.tool_format, tokenizer.tag_ids) == (layout, tag_ids)


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
