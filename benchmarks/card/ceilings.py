"""What the card can do, measured in the same run as everything that is compared with it."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

_COPY_BYTES = 4 << 30
_MATRIX = 8192


@dataclass(frozen=True, slots=True)
class Ceilings:
    copy_bytes_per_s: float  # read and written, both counted
    matmul_flops: float  # bfloat16, random numbers


def seconds(work: Callable[[], object], repetitions: int = 5, warm_ups: int = 2) -> float:
    """The median time of `work` on the card."""
    times: list[float] = []
    for repetition in range(warm_ups + repetitions):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        work()
        end.record()
        end.synchronize()
        if repetition >= warm_ups:
            times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def measure() -> Ceilings:
    return Ceilings(_copy_bytes_per_s(), _matmul_flops())


def _copy_bytes_per_s() -> float:
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / seconds(lambda: target.copy_(source))


def _matmul_flops() -> float:
    left, right = (torch.randn(_MATRIX, _MATRIX, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    product = torch.empty_like(left)
    return 2.0 * _MATRIX**3 / seconds(lambda: torch.mm(left, right, out=product), repetitions=10)
