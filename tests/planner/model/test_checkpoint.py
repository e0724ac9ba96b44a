"""The size of valid and of invalid safetensors files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from llmservice_planner.model.checkpoint import StoredTensor, stored_dtype, weights_bytes
from llmservice_planner.model.config import ShapeError
from llmservice_planner.model.shape import ModelShape
from llmservice_planner.model.source import read_model

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


@pytest.mark.parametrize(
    ("names", "counted"),
    [
        (["model.safetensors", "consolidated.safetensors", "other.safetensors"], 1),
        (["model-1.safetensors", "model-2.safetensors", "consolidated-00001-of-00001.safetensors"], 2),
        (["consolidated.safetensors"], 1),
    ],
)
def test_without_an_index_copies_in_another_layout_are_not_counted(
    tmp_path: Path, names: list[str], counted: int
) -> None:
    for name in names:
        save_file(_TENSORS, tmp_path / name)
    assert weights_bytes(tmp_path) == counted * _STORED


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"F32": 100, "BF16": 300, "I32": 900}, "bfloat16"),
        ({"F32": 300, "F16": 100, "F8_E4M3": 900}, "float32"),
        ({"F16": 2, "I32": 900}, "float16"),
        ({}, "float32"),
    ],
)
def test_without_a_named_dtype_it_is_that_of_most_floats(sizes: dict[str, int], expected: str) -> None:
    assert stored_dtype(StoredTensor(dtype, (1,), size) for dtype, size in sizes.items()) == expected


def test_a_folder_without_safetensors_has_no_size(tmp_path: Path) -> None:
    assert weights_bytes(tmp_path) is None


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("pytorch_model.bin", r"holds its weights as pickles only \(pytorch_model.bin\)"),
        ("model-Q4_K_M.gguf", r"only model-Q4_K_M.gguf, which is not served"),
        ("onnx/model.onnx", r"only model.onnx, which is not served"),
    ],
)
def test_weights_in_other_formats_alone_are_refused(tmp_path: Path, file: str, message: str) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "dtype": "float16"}')
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    with pytest.raises(ShapeError, match=message):
        ModelShape.from_folder(tmp_path)
    save_file(_TENSORS, tmp_path / "model.safetensors")
    assert ModelShape.from_folder(tmp_path).layers == 32


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_quantised_matrices_of_which_no_file_says_anything_are_refused(tmp_path: Path, model_type: str) -> None:
    sizes = {"vocab_size": 8, "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1, "n_positions": 8}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "dtype": "float16", **sizes}))
    name = "model.layers.0.mlp.down_proj.qweight"
    save_file({name: np.zeros((2, 4), np.int32)}, tmp_path / "model.safetensors")
    with pytest.raises(ShapeError, match=f"{name} is quantised, of which config.json says nothing"):
        read_model(str(tmp_path)).weights_bytes("float16")


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


@pytest.mark.parametrize("links", [True, False])
def test_a_weight_file_that_is_no_file_is_named(tmp_path: Path, links: bool) -> None:
    """A copy of the hub's cache may be links to files that were not copied."""
    path = tmp_path / "model.safetensors"
    if links:
        path.symlink_to(tmp_path / "blobs" / "0")
    else:
        path.mkdir()
    with pytest.raises(ShapeError, match=r"lacks model\.safetensors, which is a folder or a link to no file"):
        weights_bytes(tmp_path)


def test_a_shard_whose_name_no_file_can_have_is_shown_in_part(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "b" * 1000}}))
    with pytest.raises(ShapeError, match=r"lacks b{80}, which its index names"):
        weights_bytes(tmp_path)


@pytest.mark.parametrize("index", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {}}', "[" * 10**5])
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
        (62).to_bytes(8, "little") + b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        (62).to_bytes(8, "little") + b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [-4, 4]}}',
        (61).to_bytes(8, "little") + b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}',
    ],
)
def test_a_broken_header_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ShapeError, match="download it again"):
        weights_bytes(tmp_path)


@pytest.mark.parametrize("begin", [0, 10**30])
def test_a_file_that_ends_before_a_head_that_may_be_the_embedding_is_refused(tmp_path: Path, begin: int) -> None:
    """Of tied models they are compared."""
    (tmp_path / "config.json").write_text('{"model_type": "gemma3_text", "dtype": "float16"}')
    tensor = {"dtype": "F16", "shape": [8, 4], "data_offsets": [begin, begin + 10**9]}
    header = json.dumps(dict.fromkeys(("lm_head.weight", "model.embed_tokens.weight"), tensor)).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ShapeError, match="it ends before its tensors do"):
        ModelShape.from_folder(tmp_path)
