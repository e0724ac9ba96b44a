"""The safetensors files of a checkpoint. No others: unpickling a file can run any code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from llmservice_planner.model import checkpoint
from llmservice_server.types.checkpoint_config import as_load_errors
from llmservice_server.types.errors import ModelLoadError


class Stored(NamedTuple):
    """A tensor of a checkpoint, as the header of its file has it."""

    shard: Path
    name: str  # there
    shape: tuple[int, ...]
    dtype: str  # by safetensors' name, such as BF16

    def check_shape(self, expected: Sequence[int]) -> None:
        """Raises `ModelLoadError`."""
        if self.shape != tuple(expected):
            raise ModelLoadError(
                f"{self.shard.name}: {self.name} has the shape {[*self.shape]}, config.json makes it {[*expected]}"
            )


class TensorReader:
    """Reads tensors of files that stay open: opening one means parsing the names of all its tensors."""

    def __init__(self) -> None:
        self._open: dict[Path, Any] = {}

    def tensor(self, stored: Stored) -> torch.Tensor:
        """Raises `ModelLoadError` for a file that cannot be read."""
        with _readable(stored.shard):
            if stored.shard not in self._open:
                self._open[stored.shard] = safe_open(stored.shard, framework="pt")
            tensor: torch.Tensor = self._open[stored.shard].get_tensor(stored.name)
        return tensor

    def module(self, stored: Mapping[str, Stored]) -> dict[str, torch.Tensor]:
        """The tensors of a module, by their names after the module's."""
        return {suffix: self.tensor(each) for suffix, each in stored.items()}


def stored_tensors(shards: Sequence[Path]) -> list[Stored]:
    """Raises `ModelLoadError` for a file that cannot be read, or whose size is not what its header says."""
    found = []
    for shard in shards:
        with _readable(shard), safe_open(shard, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                header = tensors.get_slice(name)
                found.append(Stored(shard, name, tuple(header.get_shape()), header.get_dtype()))
    return found


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Raises `ModelLoadError` where there are no safetensors files, or not all that the index names."""
    with as_load_errors():
        checkpoint.refuse_other_formats(folder)
        found = tuple(checkpoint.weight_files(folder))
    if not found:
        raise ModelLoadError(f"{folder} holds no *.safetensors file")
    return found


@contextmanager
def _readable(shard: Path) -> Iterator[None]:
    """Raises `ModelLoadError` where the file is not."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(
            f"{shard} is not a readable safetensors file ({error}): delete it and fetch it again"
        ) from error
