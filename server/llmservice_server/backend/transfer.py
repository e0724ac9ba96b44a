"""Copies between host and device; the host waits for them only where it reads them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT = 4  # int32 numbers: Triton compiles other kernels for pointers that are not multiples of 16 bytes


def to_device(numbers: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """As a tensor on the device, copied from pinned memory: a GPU's copy from other memory blocks the host."""
    tensor = torch.from_numpy(numbers)
    if device.type == "cpu":
        return tensor
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def tables_to_device(tables: Sequence[npt.NDArray[np.int32]], device: torch.device) -> list[torch.Tensor]:
    """The arrays as tensors on the device, in one transfer, each aligned to 16 bytes."""
    starts, size = [], 0
    for table in tables:
        starts.append(size)
        size += -(-table.size // _ALIGNMENT) * _ALIGNMENT
    packed = torch.empty(size, dtype=torch.int32, pin_memory=device.type == "cuda")
    host = packed.numpy()
    for table, start in zip(tables, starts, strict=True):
        host[start : start + table.size] = table.ravel()
    moved = packed.to(device, non_blocking=True)
    return [moved[start : start + table.size].view(table.shape) for table, start in zip(tables, starts, strict=True)]


class HostCopy:
    """One copy of several tensors to the host, on a stream of its own, while the device continues.

    Tensors on the CPU are not copied; from a device integers are copied as int32, other numbers as float32.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._event: torch.cuda.Event | None = None
        device = tensors[0].device
        if device.type != "cuda":
            return
        self._packed = pack(tensors)  # kept until it is read, because torch's allocator does not track the side stream
        side = _side_stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            self._host = torch.empty(self._packed.shape, dtype=torch.int32, pin_memory=True)
            self._host.copy_(self._packed, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(side)

    def wait(self) -> Sequence[torch.Tensor]:
        """The tensors on the CPU; waits for their copy, not for what the device does after it."""
        if self._event is None:
            return self._tensors
        self._event.synchronize()
        return unpack(self._host, self._tensors)


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """All tensors concatenated, as int32 words `[num_words]`."""
    return torch.cat([tensor.to(_word(tensor)).flatten().view(torch.int32) for tensor in tensors])


def unpack(words: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that were passed to `pack`, with the shapes and kinds of `like`."""
    parts = torch.split(words, [tensor.numel() for tensor in like])
    return [part.view(_word(tensor)).view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def _word(tensor: torch.Tensor) -> torch.dtype:
    return torch.float32 if tensor.dtype.is_floating_point else torch.int32


@lru_cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
