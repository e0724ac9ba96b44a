"""The measured ceilings of this machine: memory bandwidth and operations per second."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from llmservice_server.backend.cpu.compiled import compiled, compiled_inner, for_each, use_threads
from llmservice_server.backend.cpu.linear import PackedLinear, pack
from llmservice_server.backend.torch.layer_ops import TorchLinear

_READ_BYTES = 512 << 20  # much larger than the caches
_MATMUL_ROWS = 512
_MATMUL_WIDTH = 2048
_REPEATS = 7


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The best of several measurements."""

    bandwidth_bytes_per_s: float  # read by all cores
    flops: float  # operations per second of a large packed matrix product in `dtype`
    dtype: torch.dtype

    @classmethod
    def measure(cls, dtype: torch.dtype) -> Ceilings:
        return cls(read_bandwidth(), matmul_flops(dtype, _MATMUL_ROWS), dtype)

    def or_better(self, others: Ceilings) -> Ceilings:
        """The higher of each ceiling."""
        bandwidth = max(self.bandwidth_bytes_per_s, others.bandwidth_bytes_per_s)
        return Ceilings(bandwidth, max(self.flops, others.flops), self.dtype)

    @property
    def ridge(self) -> float:
        """The operations per byte above which arithmetic takes longer than reading."""
        return self.flops / self.bandwidth_bytes_per_s

    @property
    def ridge_rows(self) -> float:
        """The rows of a matrix product above which arithmetic takes longer: each weight is two operations per row."""
        return self.ridge * self.dtype.itemsize / 2

    def as_dict(self) -> dict[str, Any]:
        return {
            "dtype": str(self.dtype).removeprefix("torch."),
            "gigabytes_per_s": self.bandwidth_bytes_per_s / 1e9,
            "gigaflops": self.flops / 1e9,
            "ridge_flop_per_byte": self.ridge,
            "ridge_rows": self.ridge_rows,
        }

    def seconds(self, num_bytes: float, num_operations: float) -> tuple[float, str]:
        """The roofline: the minimum time for both, and which of them determines it."""
        read_s, compute_s = num_bytes / self.bandwidth_bytes_per_s, num_operations / self.flops
        return (read_s, "memory") if read_s > compute_s else (compute_s, "compute")


def read_bandwidth() -> float:
    """Bytes per second that all cores read from one large array."""
    use_threads(torch.get_num_threads())
    rows = np.ones((_READ_BYTES >> 14, 4096), np.float32)
    sums = np.empty(len(rows), np.float32)
    return rows.nbytes / best_seconds(lambda: _sum_rows(rows, sums))


def matmul_flops(dtype: torch.dtype, num_rows: int) -> float:
    """Operations per second of `num_rows` rows times a square matrix, packed like the server's weights."""
    linear = pack(TorchLinear(torch.randn(_MATMUL_WIDTH, _MATMUL_WIDTH).to(dtype)))
    if isinstance(linear, PackedLinear):
        linear.use_kernel()
    rows = torch.randn(num_rows, _MATMUL_WIDTH).to(dtype)
    with torch.inference_mode():
        return 2 * num_rows * _MATMUL_WIDTH**2 / best_seconds(lambda: linear(rows))


def best_seconds(work: Callable[[], object], repeats: int = _REPEATS) -> float:
    """The shortest of several runs, after a warm-up."""
    work()
    return min(seconds(work) for _ in range(repeats))


def seconds(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


@compiled(nogil=True)
def _sum_rows(rows: Any, sums: Any) -> None:
    for_each(_sum_row, len(rows), (rows, sums))


@compiled_inner()
def _sum_row(row: int, rows: Any, sums: Any) -> None:
    total = np.float32(0)
    for index in range(rows.shape[1]):
        total += rows[row, index]
    sums[row] = total
