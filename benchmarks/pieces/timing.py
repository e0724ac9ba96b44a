"""Repeated measurement of a function."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds per call, over `count` calls."""

    count: int
    p50_s: float
    p99_s: float

    @classmethod
    def of(cls, seconds: list[float]) -> Timing:
        p50, p99 = np.percentile(seconds, (50, 99))
        return cls(len(seconds), float(p50), float(p99))


def measure(work: Callable[[], object], count: int, warm_up: int = 3) -> Timing:
    """Time `count` calls of `work` after `warm_up` calls, without garbage collection."""
    for _ in range(warm_up):
        work()
    seconds = []
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(count):
            started_s = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - started_s)
    finally:
        if collecting:
            gc.enable()
    return Timing.of(seconds)
