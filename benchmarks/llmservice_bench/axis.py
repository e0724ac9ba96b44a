"""From values to places on paper, linear or logarithmic, with ticks at round numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Axis:
    """Maps `low`..`high` to `start`..`end` (pixels; SVG's y grows downwards, so `start` may exceed `end`)."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __post_init__(self) -> None:
        if not self.low < self.high or (self.log and self.low <= 0):
            raise ValueError(f"no axis from {self.low} to {self.high}{', logarithmic' if self.log else ''}")

    @classmethod
    def around(cls, values: Sequence[float], start: float, end: float, *, log: bool = False) -> Axis:
        """Wide enough for all values: a linear one from 0 on, a logarithmic one between round numbers."""
        if log:
            low, high = _round_below(min(values)), _round_above(max(values))
            return cls(low, high if high > low else low * 10, start, end, log=True)
        return cls(0.0, max(values) * 1.04 or 1.0, start, end)

    def place(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Five to ten of them: 1, 2, 5 and their decades, or decades alone where there are many."""
        if not self.log:
            step = _round_above(self.high / 6)
            return [step * number for number in range(int(self.high / step + 1e-9) + 1)]
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        steps = (1, 2, 5) if len(decades) <= 4 else (1,)
        ticks = [step * 10.0**decade for decade in decades for step in steps]
        return [tick for tick in ticks if self.low <= tick * (1 + 1e-9) and tick <= self.high * (1 + 1e-9)]


def _round_above(value: float) -> float:
    decade = 10.0 ** math.floor(math.log10(value))
    return next(step * decade for step in (1, 2, 5, 10) if step * decade >= value * (1 - 1e-9))


def _round_below(value: float) -> float:
    decade = 10.0 ** math.floor(math.log10(value))
    return next(step * decade for step in (5, 2, 1) if step * decade <= value * (1 + 1e-9))


def tick_label(value: float) -> str:
    """`0.5`, `20`, `5k`."""
    return f"{value / 1000:g}k" if value >= 1000 else f"{value:g}"
