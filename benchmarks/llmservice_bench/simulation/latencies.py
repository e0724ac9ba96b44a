"""Percentiles of many times without keeping them: a histogram whose buckets are half a per cent wide."""

from __future__ import annotations

import math
from collections import Counter

_PER_OCTAVE = 139
"""2 ** (1 / 139) is 1.005."""


class GapHistogram:
    """Times between two tokens, in seconds."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    @property
    def total(self) -> int:
        return self._counts.total()

    def add(self, gap_s: float, count: int = 1) -> None:
        self._counts[_bucket(gap_s)] += count

    def add_ramp(self, first_s: float, last_s: float, steps: int, each: int) -> None:
        """`steps` times that grow evenly from the first to the last, each of them `each` times."""
        first, last = _bucket(first_s), _bucket(last_s)
        if first == last or steps == 1:
            self._counts[first] += steps * each
            return
        slope_s = (last_s - first_s) / (steps - 1)
        for step in range(steps):
            self._counts[_bucket(first_s + step * slope_s)] += each

    def percentile(self, share: float) -> float | None:
        """The time that this share of all are at most, by nearest rank, within half a per cent; None without any."""
        rank, seen = math.ceil(share * self.total), 0
        for bucket in sorted(self._counts):
            seen += self._counts[bucket]
            if seen >= rank:
                return float(2 ** ((bucket + 0.5) / _PER_OCTAVE))
        return None


def _bucket(gap_s: float) -> int:
    return math.floor(math.log2(max(gap_s, 1e-9)) * _PER_OCTAVE)
