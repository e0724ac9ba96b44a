"""Numbers on their way between host and device; the host waits for them only where it reads them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy.typing as npt
import torch


def to_device(numbers: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """As a tensor there; from pinned memory, as from any other a GPU's copy keeps the host waiting."""
    tensor = torch.from_numpy(numbers)
    if device.type == "cpu":
        return tensor
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


class HostCopy:
    """Tensors' values for the host: all in one copy, on a stream of its own, beside what the device does next.

    What is on the CPU already stays as it is; from elsewhere integers come as int32, other numbers as float32.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._event: torch.cuda.Event | None = None
        device = tensors[0].device
        if device.type != "cuda":
            return
        self._packed = pack(tensors)  # kept until it is read: the side stream is none of the allocator's business
        side = _side_stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            self._host = torch.empty(self._packed.shape, dtype=torch.int32, pin_memory=True)
            self._host.copy_(self._packed, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(side)

    def wait(self) -> Sequence[torch.Tensor]:
        """The tensors on the CPU, once they are there; what the device does after them is not waited for."""
        if self._event is None:
            return self._tensors
        self._event.synchronize()
        return unpack(self._host, self._tensors)


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Everything end to end, as int32 words `[num_words]`."""
    return torch.cat([tensor.to(_word(tensor)).flatten().view(torch.int32) for tensor in tensors])


def unpack(words: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What `pack` made of tensors of these shapes and kinds."""
    parts = torch.split(words, [tensor.numel() for tensor in like])
    return [part.view(_word(tensor)).view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def _word(tensor: torch.Tensor) -> torch.dtype:
    return torch.float32 if tensor.dtype.is_floating_point else torch.int32


@lru_cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
