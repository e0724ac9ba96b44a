"""What sentence-transformers' files of a checkpoint make of the states of a text, and what of them is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from safetensors.torch import save_file

from llmservice_server.runtime.vector_format import VectorFormat
from llmservice_server.types.errors import ModelLoadError

SIZE = 8
_TYPES = "sentence_transformers.models"
STATES = torch.randn(2, 3, SIZE, generator=torch.Generator().manual_seed(3))
LENGTHS = [3, 2]


def _write(folder: Path, *modules: str, pooling: dict[str, Any] | None = None, dense: dict[str, Any]) -> torch.Tensor:
    """`modules` in their folders, of which each dense layer has the same weight; returns it."""
    weight = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(5))
    entries = []
    for index, module in enumerate(modules):
        path = folder / f"{index}_{module}"
        path.mkdir()
        entries.append({"type": f"{_TYPES}.{module}", "path": path.name})
        if module == "Pooling":
            (path / "config.json").write_text(json.dumps(pooling or {"pooling_mode": "mean", "include_prompt": True}))
        if module == "Dense":
            (path / "config.json").write_text(json.dumps({"activation_function": "torch.nn.Identity", **dense}))
            save_file({"linear.weight": weight}, path / "model.safetensors")
    (folder / "modules.json").write_text(json.dumps(entries))
    return weight


def _means() -> torch.Tensor:
    return torch.stack([states[:length].mean(0) for states, length in zip(STATES, LENGTHS, strict=True)])


def test_modules_are_computed_in_their_order(tmp_path: Path) -> None:
    weight = _write(tmp_path, "Transformer", "Pooling", "Normalize", "Dense", dense={})
    vector_format = VectorFormat.of(tmp_path, "auto", SIZE)
    expected = F.normalize(_means(), dim=-1) @ weight.T
    assert torch.allclose(vector_format.vectors(STATES, LENGTHS), expected, atol=1e-6)
    assert vector_format.size == 4


@pytest.mark.parametrize(("kept", "size"), [(3, 3), (None, SIZE), (20, SIZE)])
def test_a_vector_has_the_numbers_that_its_publisher_keeps(tmp_path: Path, kept: int | None, size: int) -> None:
    _write(tmp_path, "Transformer", "Pooling", "Normalize", dense={})
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"truncate_dim": kept}))
    vector_format = VectorFormat.of(tmp_path, "auto", SIZE)
    expected = F.normalize(_means(), dim=-1)[:, :size]
    assert torch.allclose(vector_format.vectors(STATES, LENGTHS), expected, atol=1e-6)
    assert vector_format.size == size


def test_a_model_that_scores_by_a_token_has_the_vectors_of_one_without_modules(tmp_path: Path) -> None:
    """As sentence-transformers saves Qwen3-Reranker: it is served for its answers."""
    _write(tmp_path, "Transformer", dense={})
    entries = [{"type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore", "path": "1_LogitScore"}]
    (tmp_path / "modules.json").write_text(json.dumps(entries))
    assert VectorFormat.of(tmp_path, "auto", SIZE, default="last").pooling == "last"


TO_VECTOR = ("Transformer", "Pooling", "Dense")


@pytest.mark.parametrize(
    ("modules", "settings", "words"),
    [
        (("Transformer", "Dense", "Pooling"), {}, "modules.json names Dense before Pooling"),
        (("Transformer", "Normalize", "Pooling"), {}, "modules.json names Normalize before Pooling"),
        (TO_VECTOR, {"dense": {"use_residual": True}}, "use_residual is True, expected False"),
        (TO_VECTOR, {"dense": {"module_input_name": "token_embeddings"}}, "module_input_name is 'token_embeddings'"),
        (TO_VECTOR, {"dense": {"module_output_name": "scores"}}, "module_output_name is 'scores', expected"),
        (TO_VECTOR, {"pooling": {"pooling_mode": ["cls", "mean"]}}, "the pooling is cls and mean, expected"),
        (TO_VECTOR, {"pooling": {"pooling_mode": "max"}}, "the pooling is max, expected"),
        (TO_VECTOR, {"pooling": {"pooling_mode": "mean", "include_prompt": False}}, "include_prompt is false"),
    ],
)
def test_what_would_give_other_vectors_is_refused(
    tmp_path: Path, modules: tuple[str, ...], settings: dict[str, Any], words: str
) -> None:
    _write(tmp_path, *modules, **{"dense": {}, **settings})
    with pytest.raises(ModelLoadError) as refusal:
        VectorFormat.of(tmp_path, "auto", SIZE)
    assert words in str(refusal.value)


def test_a_wrong_number_of_kept_numbers_is_refused(tmp_path: Path) -> None:
    _write(tmp_path, "Transformer", "Pooling", dense={})
    (tmp_path / "config_sentence_transformers.json").write_text('{"truncate_dim": true}')
    with pytest.raises(ModelLoadError, match="truncate_dim is True, expected a positive whole number"):
        VectorFormat.of(tmp_path, "auto", SIZE)
