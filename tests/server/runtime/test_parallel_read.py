"""Tensors are read bit for bit, in pieces and by several threads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from llmservice_server.runtime import parallel_read
from llmservice_server.runtime.parallel_read import is_direct, read_into
from llmservice_server.types.errors import ModelLoadError


def _random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    bits = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}[dtype]
    return torch.randint(-(2**15), 2**15, shape, dtype=bits).view(dtype)


@pytest.mark.parametrize("chunk_bytes", [1, 7, 4096, 8 << 20])
def test_every_bit_arrives_whatever_the_pieces(
    tmp_path: Path, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_read, "_CHUNK_BYTES", chunk_bytes)
    stored = {
        "matrix": _random(5, 33, dtype=torch.bfloat16),
        "vector": _random(17, dtype=torch.float32),
        "scalar": _random(dtype=torch.float16),
        "none": torch.empty(0, 4),
        "other": torch.arange(9),
    }
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for file in files:
        save_file(stored, file)
    fused = torch.zeros(7, 33, dtype=torch.bfloat16)  # a part of a fused matrix is filled, and nothing beside it
    targets = {name: torch.zeros_like(stored[name]) for name in ("vector", "scalar", "none")}
    read_into({files[0]: {"matrix": fused[1:6]}, files[1]: targets})
    assert torch.equal(fused[1:6].view(torch.int16), stored["matrix"].view(torch.int16))
    assert not fused[0].any()
    assert not fused[6].any()
    for name, target in targets.items():
        assert target.numpy().tobytes() == stored[name].numpy().tobytes()


def test_a_file_that_is_cut_off_while_it_is_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(1000)}, file)
    os.truncate(file, 2000)
    with pytest.raises(
        ModelLoadError, match=r"a\.safetensors cannot be read \(it ends at byte 2000\): delete it and fetch it again"
    ):
        read_into({file: {"a": torch.empty(1000)}})


@pytest.mark.parametrize(
    ("target", "stored", "direct"),
    [
        (torch.empty(2, 3), "F32", True),
        (torch.empty(2, 3, dtype=torch.bfloat16), "BF16", True),
        (torch.empty(2, 3, dtype=torch.bfloat16), "F32", False),
        (torch.empty(2, 3), "F8_E4M3", False),
        (torch.empty(3, 2).T, "F32", False),
        (torch.empty(2, 3, device="meta"), "F32", False),
    ],
)
def test_only_memory_that_equals_the_files_is_filled_directly(target: torch.Tensor, stored: str, direct: bool) -> None:
    assert is_direct(target, stored) is direct
