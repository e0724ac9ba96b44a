from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from safetensors import safe_open

from llmservice_bench.models import SHAPES, checkpoint, started
from llmservice_planner.model.shape import ModelShape
from llmservice_server.tiny.model import TinyModelSpec


def test_a_checkpoint_is_written_once_and_whole(tmp_path: Path) -> None:
    written = checkpoint("toy", folder=tmp_path)
    config = json.loads((written / "config.json").read_text(encoding="utf-8"))
    with safe_open(written / "model.safetensors", framework="numpy") as tensors:
        assert tensors.get_slice("lm_head.weight").get_shape() == [1024, 256]
    modified = (written / "model.safetensors").stat().st_mtime_ns

    assert checkpoint("toy", folder=tmp_path) == written
    assert (written / "model.safetensors").stat().st_mtime_ns == modified
    assert list(tmp_path.iterdir()) == [written]
    assert (config["num_hidden_layers"], config["hidden_size"], config["torch_dtype"]) == (4, 256, "float32")


def test_each_type_of_weights_has_a_folder_of_its_own(tmp_path: Path) -> None:
    assert checkpoint("toy", "bfloat16", tmp_path) != checkpoint("toy", "float32", tmp_path)


def test_small_has_the_parameters_the_inner_size_and_the_heads_that_it_says() -> None:
    spec = TinyModelSpec(**asdict(SHAPES["small"]))
    inner, head_dim = spec.intermediate_size, spec.head_dim
    shape = ModelShape(**asdict(SHAPES["small"]), intermediate_size=inner, head_dim=head_dim)
    assert (inner, head_dim) == (2048, 64)
    assert shape.num_parameters == pytest.approx(125e6, rel=0.01)


async def test_a_server_that_ends_before_it_listens_is_named_with_its_status() -> None:
    with pytest.raises(SystemExit, match="the server ended with status 3"):
        async with started(sys.executable, "-c", "raise SystemExit(3)"):
            pass


def test_unknown_shape_and_type_are_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="huge"):
        checkpoint("huge", folder=tmp_path)
    with pytest.raises(ValueError, match="int4"):
        checkpoint("toy", "int4", tmp_path)
    assert not list(tmp_path.iterdir())
