"""Mistral's tokenizer files. What prompts should be is written as mistral-common 1.13.1 writes them."""

import base64
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from llmservice_server.text.model_folder import served_folder
from llmservice_server.text.tokenizer import Tokenizer
from llmservice_server.types.errors import ModelLoadError

PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s+"
MORE_SPECIAL = ["[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]"]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
TOOLS = '[AVAILABLE_TOOLS][{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]'
CALL = {"id": "abcdefgh1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abcdefgh1", "content": "20"},
]
BEGIN = "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT]"
LAST = f"[INST]Hi[/INST]Yes?</s>{TOOLS}[/AVAILABLE_TOOLS][INST]Weather?[/INST]"
FIRST = f"{TOOLS}[/AVAILABLE_TOOLS][INST]Hi[/INST]Yes?</s>[INST]Weather?[/INST]"
RESULT = "[TOOL_RESULTS]abcdefgh1[TOOL_CONTENT]20[/TOOL_RESULTS]"
V7_CALL = '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Zürich"}, "id": "abcdefgh1"}]</s>'
V11_CALL = '[TOOL_CALLS]weather[CALL_ID]abcdefgh1[ARGS]{"city": "Zürich"}</s>'
V13_CALL = '[TOOL_CALLS]weather[ARGS]{"city": "Zürich"}</s>'


def folder_of(folder: Path, version: str, special: list[str] | None = None, **changes: Any) -> Path:
    tokens = [bytes([byte]) for byte in range(256)] + [b"He", b"ll", b"Hell", b"Hello", " Zü".encode()]
    content: dict[str, Any] = {
        "config": {"pattern": PATTERN, "default_num_special_tokens": 40, "version": version},
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate(tokens)
        ],
    }
    if special is not None:
        content["special_tokens"] = [
            {"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(special)
        ]
    (folder / "tekken.json").write_text(json.dumps(content | changes))
    (folder / "config.json").write_text("{}")
    return folder


SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)


@pytest.mark.parametrize(
    ("version", "special", "expected", "reasoning"),
    [
        ("v7", None, BEGIN + LAST + V7_CALL + RESULT, "none"),
        ("v11", [*SPECIAL, *MORE_SPECIAL[:2]], BEGIN + LAST + V11_CALL + RESULT, "none"),
        (
            "v13",
            [*SPECIAL, *MORE_SPECIAL],
            BEGIN + FIRST + V13_CALL + "[TOOL_RESULTS]20[/TOOL_RESULTS]",
            "mistral",
        ),
    ],
)
def test_a_checkpoint_with_tekken_json_alone_gets_a_tokenizer_and_a_template(
    tmp_path: Path, version: str, special: list[str] | None, expected: str, reasoning: str
) -> None:
    folder = served_folder(folder_of(tmp_path, version, special), None)
    tokenizer = Tokenizer.load(folder)
    ids = tokenizer.encode_chat(MESSAGES, tools=[TOOL])
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected
    assert (tokenizer.formats.names.tool_calls, tokenizer.formats.names.reasoning) == ("mistral", reasoning)
    hello, bytes_of_text = 40 + 259, [40 + byte for byte in b" wor"]
    assert tokenizer.encode("Hello wor") == [1, hello, *bytes_of_text]


def test_files_of_the_checkpoint_are_kept(tmp_path: Path) -> None:
    folder_of(tmp_path, "v11", [*SPECIAL])
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert (served_folder(tmp_path, None) / "chat_template.jinja").read_text() == "{{ messages }}"
    (tmp_path / "tokenizer.json").write_text("{}")
    assert served_folder(tmp_path, None) == tmp_path


def test_a_folder_of_a_killed_process_is_replaced_and_one_that_cannot_be_written_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = folder_of(tmp_path, "v11", [*SPECIAL])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr("llmservice_server.text.model_folder._NUMBERS", itertools.repeat(0))
    (tmp_path / "tmp").mkdir()
    first = served_folder(model)
    (first / "left.json").touch()
    assert served_folder(model) == first
    assert not (first / "left.json").exists()
    monkeypatch.setattr("llmservice_server.text.model_folder.from_tekken", lambda _: {"tokenizer.json": "{}"})
    (tmp_path / "file").touch()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    with pytest.raises(ModelLoadError, match=r"cannot be written .*: make room there, or set TMPDIR"):
        served_folder(model)


def test_other_versions_get_no_template(tmp_path: Path) -> None:
    assert not (served_folder(folder_of(tmp_path, "v99", [*SPECIAL]), None) / "chat_template.jinja").exists()


def test_a_broken_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tekken.json cannot be converted .*: add the model's tokenizer.json"):
        served_folder(folder_of(tmp_path, "v7", vocab=[{"rank": 0}]), None)
