"""When requests arrive: an open loop, whose pace does not depend on how fast answers come."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import numpy as np

from llmservice_bench.trace import TraceError, read_rows

COLUMN = "TIMESTAMP"


def arrival_times(rate: float, burstiness: float, rng: np.random.Generator) -> Iterator[float]:
    """Seconds from the start at which requests arrive, without end.

    Gaps are Gamma(shape = burstiness, scale = 1 / (rate · burstiness)), as in `vllm bench serve`: their mean is 1/rate,
    burstiness 1 is a Poisson process, below 1 burstier, above 1 more even. An infinite rate sends everything at once.

    Raises:
        ValueError: rate or burstiness is not positive.
    """
    if not rate > 0 or not burstiness > 0:
        raise ValueError(f"rate and burstiness must be above 0, found {rate} and {burstiness}")
    now = 0.0
    while True:
        yield now
        if rate != float("inf"):
            now += float(rng.gamma(burstiness, 1.0 / (rate * burstiness)))


def read_arrivals(path: Path, time_scale: float = 1.0) -> list[float]:
    """When the requests of a trace came, in seconds from its first one, times `time_scale`: 0.1 is ten times as fast.

    The column TIMESTAMP holds ISO 8601 times or numbers of seconds.

    Raises:
        TraceError: it cannot be read, a time is neither, or a row is earlier than the one before it.
    """
    times = read_rows(path, (COLUMN,), _seconds)
    for row, (earlier, later) in enumerate(pairwise(times), start=2):
        if later < earlier:
            raise TraceError(f"{path}, request {row}: earlier than the one before it; sort the trace by {COLUMN}")
    return [(time - times[0]) * time_scale for time in times]


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = _iso_seconds(text)
    if not math.isfinite(seconds):
        raise ValueError(f"{COLUMN} must be finite")
    return seconds


def _iso_seconds(text: str) -> float:
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        raise ValueError(f"{COLUMN} must be ISO 8601 or a number of seconds") from error
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
