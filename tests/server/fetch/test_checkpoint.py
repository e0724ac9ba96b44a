from __future__ import annotations

import pytest

from llmservice_server.fetch.checkpoint import needed


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["model.safetensors", "model.bin", "weights.pth", "README.md"], ["model.safetensors"]),
        (["consolidated.safetensors", "model-00001-of-00001.safetensors"], ["model-00001-of-00001.safetensors"]),
        (["consolidated.safetensors", "params.json"], ["consolidated.safetensors", "params.json"]),
        (["original/model.safetensors", "../up.json", "..\\up.json", ".hidden.json", "a\n.json", ""], []),
        (["tokenizer.json", "chat_template.jinja"], ["chat_template.jinja", "tokenizer.json"]),
    ],
)
def test_only_plain_files_that_serving_needs_are_taken(names: list[str], expected: list[str]) -> None:
    assert needed(names) == expected
