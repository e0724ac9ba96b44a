"""A model's figures come from a folder or from the reader that is registered for the URI's scheme."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmservice_planner.model.shape import ShapeError
from llmservice_planner.model.source import read_model

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_folder_is_read_by_its_path_and_by_its_uri(folder: Path) -> None:
    by_path, by_uri = read_model(str(folder)), read_model(f"file://{folder}")
    assert by_path == by_uri
    assert by_path.uri == f"file://{folder}"
    assert by_path.shape.layers == 2


def test_relative_folder_of_two_parts_is_no_repository(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent.parent)
    assert read_model(f"{folder.parent.name}/{folder.name}").folder is not None


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("nowhere", "nowhere/config.json does not exist"),
        ("./org/name/part", "does not exist"),
        ("file://relative", "is not absolute, expected file:///path"),
        ("pvc://models/llama", "a volume of the cluster, which can't be read from here: give a copy"),
        ("oci://registry/llama:1", "an image, which nodes mount, which can't be read from here"),
        (
            "https://huggingface.co/org/name",
            "is of no kind that can be read here, expected a folder, org/name, or file://",
        ),
    ],
)
def test_what_cannot_be_read_has_a_reason(text: str, complaint: str) -> None:
    with pytest.raises(ShapeError, match=complaint):
        read_model(text)
