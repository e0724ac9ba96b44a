"""Traffic that was not recorded: of a synthetic shape, or a trace with other times or another rate."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from llmservice_planner.traffic.traces import TraceRequest

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


def synthetic(
    shape: Shape, peak_per_s: float, duration_s: float, lengths: Sequence[TraceRequest], seed: int
) -> list[TraceRequest]:
    """Lengths of a trace at the times of a Poisson process whose rate follows the shape.

    By thinning (Lewis and Shedler, 1979).
    """
    rng = random.Random(seed)  # noqa: S311 - no secret
    requests, now = [], 0.0
    while (now := now + rng.expovariate(peak_per_s)) < duration_s:
        if rng.random() < shape(now / duration_s):
            drawn = rng.choice(lengths)
            requests.append(TraceRequest(now, drawn.prompt_tokens, drawn.output_tokens))
    return requests


_SPREAD_S = 5.0
"""A repeated request comes so much earlier or later at most: at the same time of day, and not at once."""


def scaled(trace: Sequence[TraceRequest], time_scale: float, rate_scale: float, seed: int) -> list[TraceRequest]:
    """Times are multiplied by `time_scale`. With `rate_scale` each request comes so often, on average.

    A whole number repeats every request, a share keeps that share of them at random. Repeated prompts share nothing
    that they did not share before: each repetition has hash ids of its own.
    """
    rng = random.Random(seed)  # noqa: S311 - no secret
    last_s = trace[-1].arrival_s * time_scale if trace else 0.0
    result = []
    for each in trace:
        whole, rest = divmod(rate_scale, 1.0)
        count = int(whole) + (rng.random() < rest)
        for copy in range(count):
            shift_s = rng.uniform(-_SPREAD_S, _SPREAD_S) if copy else 0.0
            arrival_s = min(max(0.0, each.arrival_s * time_scale + shift_s), last_s)
            hash_ids = tuple(copy << 48 | one for one in each.hash_ids)
            result.append(replace(each, arrival_s=arrival_s, hash_ids=hash_ids))
    return sorted(result, key=lambda one: one.arrival_s)
