"""How fast a queue drains: what Retry-After is estimated from."""

from __future__ import annotations

import math

_WINDOW_S = 10.0  # what is older than a few of these counts for nothing


class DrainRate:
    """Amount per second, of which the recent past counts most (an exponentially weighted mean)."""

    def __init__(self, started_s: float) -> None:
        self._started_s = started_s
        self._weighted = 0.0
        self._last_s = started_s

    def add(self, amount: float, now: float) -> None:
        self._weighted = self._faded(now) + amount
        self._last_s = now

    def per_s(self, now: float) -> float:
        age_s = now - self._started_s
        seen_s = _WINDOW_S * -math.expm1(-age_s / _WINDOW_S)  # a young rate has seen less than a window
        return self._faded(now) / seen_s if age_s > 0 else 0.0

    def _faded(self, now: float) -> float:
        return self._weighted * math.exp(-(now - self._last_s) / _WINDOW_S)
