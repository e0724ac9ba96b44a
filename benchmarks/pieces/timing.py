"""Repeated measurement of a function, and the CPU time of a process."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

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


def cpu_s(process_id: int) -> float:
    """Seconds of CPU time that a process has used, without its children."""
    fields = Path(f"/proc/{process_id}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
