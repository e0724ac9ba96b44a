"""The lengths of requests where only percentiles are known: log-normal, as prompts and answers of services are about.

A log-normal variable's logarithm is normal; it has the given median, and the given 99th percentile 2.326 standard
deviations above.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TypeVar

Number = TypeVar("Number", int, float)

_Z99 = NormalDist().inv_cdf(0.99)
_MOST = 1e9
_POINTS = 1000
_STRIDE = 617  # coprime to the points, so that no length of a prompt goes with those of answers near its rank


class LengthsError(ValueError):
    """Percentiles that no distribution has; the message says what was expected."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """The distribution of a length in tokens. Raises `LengthsError`."""

    p50: float
    p99: float

    def __post_init__(self) -> None:
        if not 1 <= self.p50 <= self.p99 <= _MOST:
            raise LengthsError(
                f"p50={self.p50:g},p99={self.p99:g}: expected p50 of at least 1, and p99 not below it, at most 10**9"
            )

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """From `p50=512,p99=4096`, or `512` where all are alike."""
        parts = [part.strip().partition("=") for part in text.split(",")]
        try:
            given = {name if equals else "all": float(number if equals else name) for name, equals, number in parts}
        except ValueError:
            given = {}
        if len(given) < len(parts) or set(given) not in ({"all"}, {"p50", "p99"}):
            raise LengthsError(f"{text!r} is no length in tokens, expected p50=512,p99=4096, or 512 if all are alike")
        return cls(given["all"], given["all"]) if "all" in given else cls(given["p50"], given["p99"])

    def points(self) -> list[float]:
        """Equally likely lengths, sorted."""
        sigma = math.log(self.p99 / self.p50) / _Z99
        if not sigma:
            return [self.p50] * _POINTS
        normal = NormalDist(math.log(self.p50), sigma)
        return [max(1.0, math.exp(normal.inv_cdf((i + 0.5) / _POINTS))) for i in range(_POINTS)]


def pairs(prompts: Lengths, outputs: Lengths) -> list[tuple[float, float]]:
    """Equally likely requests, whose prompts and outputs are independent."""
    prompt_points, output_points = prompts.points(), outputs.points()
    return [(prompt_points[i], output_points[i * _STRIDE % _POINTS]) for i in range(_POINTS)]


def percentile(ordered: Sequence[Number], share: float) -> Number:
    """Of sorted values: the smallest that at least `share` of them do not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
