"""A trace with other times or another rate."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from llmservice_planner.traffic import TraceRequest

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
