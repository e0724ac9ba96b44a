"""Synthetic traffic: how the rate of requests changes over time, with arrivals at random and lengths of a trace."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence

from llmservice_planner.traffic import TraceRequest

Shape = Callable[[float], float]
"""From the share of the duration that has passed to the share of the highest rate."""

SHAPES: Mapping[str, Shape] = {
    "step": lambda at: 0.25 if at < 0.3 else 1.0,
    "ramp": lambda at: 0.15 + 0.85 * min(1.0, at / 0.8),
    "flash crowd": lambda at: 1.0 if 0.4 <= at < 0.6 else 0.2,
    "daily cycle": lambda at: 0.6 - 0.4 * math.cos(2 * math.pi * at),
    "on/off": lambda at: 1.0 if int(at * 6) % 2 else 0.1,
    "slow leak": lambda at: 1.0 - 0.8 * at,
}
"""A step, a ramp up, a crowd for a fifth of the time, one cycle, three bursts, and a slow decline."""


def traffic(
    shape: Shape, peak_per_s: float, duration_s: float, lengths: Sequence[TraceRequest], seed: int
) -> list[TraceRequest]:
    """A Poisson process whose rate follows the shape (by thinning: Lewis and Shedler, 1979)."""
    rng = random.Random(seed)  # noqa: S311 - no secret
    requests, now = [], 0.0
    while (now := now + rng.expovariate(peak_per_s)) < duration_s:
        if rng.random() < shape(now / duration_s):
            drawn = rng.choice(lengths)
            requests.append(TraceRequest(now, drawn.prompt_tokens, drawn.output_tokens))
    return requests
