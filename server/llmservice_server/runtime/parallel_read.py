"""Reads tensors of safetensors files by several threads, straight into the memory that they are for.

A page of a memory map is read when a thread touches it, which then waits, and is copied from there. Reads of some MiB
by several threads keep a disk or a network volume busy, and nothing is held twice.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from llmservice_planner.model.checkpoint import LENGTH_BYTES
from llmservice_server.types.errors import ModelLoadError

THREADS = 4
_CHUNK_BYTES = 8 << 20
_Chunk = tuple[memoryview, int]
"""Memory, and where in the file its content begins."""

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
"""By safetensors' names."""


def read_into(targets: Mapping[Path, Mapping[str, torch.Tensor]]) -> None:
    """Fill tensors, by file and by the name in it, for which `is_direct` holds.

    safetensors has checked the files' headers. Raises `ModelLoadError` where one cannot be read, or is cut off since.
    """
    with ThreadPoolExecutor(THREADS) as readers:
        for file, tensors in targets.items():
            try:
                with file.open("rb") as opened:
                    descriptor = opened.fileno()
                    list(readers.map(partial(_read, descriptor), _chunks(descriptor, tensors)))
            except OSError as error:
                raise ModelLoadError(f"{file} cannot be read ({error}): delete it and fetch it again") from error


def is_direct(target: torch.Tensor, stored_dtype: str) -> bool:
    """Whether the bytes of the file are those of `target`: on the CPU, in one piece and of the same dtype."""
    return target.device.type == "cpu" and target.is_contiguous() and DTYPES.get(stored_dtype) is target.dtype


def _chunks(descriptor: int, tensors: Mapping[str, torch.Tensor]) -> Iterator[_Chunk]:
    """In the file's order."""
    length = int.from_bytes(os.pread(descriptor, LENGTH_BYTES, 0), "little")
    header = json.loads(os.pread(descriptor, length, LENGTH_BYTES))
    first = LENGTH_BYTES + length
    for name in sorted(tensors, key=lambda name: header[name]["data_offsets"][0]):
        if tensors[name].numel() == 0:
            continue
        memory = tensors[name].flatten().view(torch.uint8).numpy().data
        begin = first + header[name]["data_offsets"][0]
        for start in range(0, len(memory), _CHUNK_BYTES):
            yield memory[start : start + _CHUNK_BYTES], begin + start


def _read(descriptor: int, chunk: _Chunk) -> None:
    memory, offset = chunk
    while memory:
        if (count := os.preadv(descriptor, [memory], offset)) == 0:
            raise OSError(f"it ends at byte {offset}")
        memory, offset = memory[count:], offset + count
