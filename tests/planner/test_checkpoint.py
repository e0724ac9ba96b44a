"""The size of valid and of invalid safetensors files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from llmservice_planner.checkpoint import weights_bytes
from llmservice_planner.model_config import ShapeError

_TENSORS = {"a": np.zeros((3, 5), np.float32), "b": np.zeros(7, np.float16), "packed": np.zeros(11, np.int8)}
_STORED = 3 * 5 * 4 + 7 * 2 + 11


def _sharded(folder: Path) -> None:
    weight_map = {}
    for number, (name, tensor) in enumerate(_TENSORS.items()):
        shard = f"model-{number}.safetensors"
        save_file({name: tensor}, folder / shard)
        weight_map[name] = shard
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_bytes_are_those_of_the_tensors_and_not_of_the_file(tmp_path: Path) -> None:
    save_file(_TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert weights_bytes(tmp_path) == _STORED


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2)])
def test_floats_count_as_loaded_and_packed_integers_as_stored(tmp_path: Path, dtype: str, width: int) -> None:
    save_file(_TENSORS, tmp_path / "model.safetensors")
    assert weights_bytes(tmp_path, dtype) == (3 * 5 + 7) * width + 11


def test_shards_add_up(tmp_path: Path) -> None:
    _sharded(tmp_path)
    assert weights_bytes(tmp_path) == _STORED


def test_a_file_that_the_index_does_not_name_is_not_counted(tmp_path: Path) -> None:
    _sharded(tmp_path)
    save_file(_TENSORS, tmp_path / "consolidated.safetensors")
    assert weights_bytes(tmp_path) == _STORED


def test_a_folder_without_safetensors_has_no_size(tmp_path: Path) -> None:
    assert weights_bytes(tmp_path) is None


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    _sharded(tmp_path)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(ShapeError, match=r"lacks model-1\.safetensors, which its index names"):
        weights_bytes(tmp_path)


def test_an_index_cannot_point_outside_the_folder(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    save_file(_TENSORS, tmp_path / "other.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../other.safetensors"}}))
    with pytest.raises(ShapeError, match=r"lacks \.\./other\.safetensors"):
        weights_bytes(model)


@pytest.mark.parametrize("index", ["", "[]", "{}", '{"weight_map": 3}'])
def test_a_broken_index_is_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ShapeError, match="no readable weight_map"):
        weights_bytes(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x08",
        (2**62).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (9).to_bytes(8, "little") + b'{"a": 1}',
        (9).to_bytes(8, "little") + b'{"a": {}}',
        (30).to_bytes(8, "little") + b'{"a": {"data_offsets": [0]}}  ',
    ],
)
def test_a_broken_header_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ShapeError, match="download it again"):
        weights_bytes(tmp_path)
