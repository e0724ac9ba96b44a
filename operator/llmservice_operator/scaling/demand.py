"""What clients ask for, tokens per second by arrivals, and what it costs of a replica's time.

Demand is counted when requests arrive. Completions would hide an overload, which caps them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SAMPLE_S = 15.0
"""Length of the short window: three passes."""
LENGTHS_FACTOR = 2.0
"""Variance of the load of n requests against that of n equal ones: 1 + cv², where prompts weigh most. In the Azure
conversation trace of 2023 the coefficient of variation of prompts is 0.96, that of answers 0.77."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Requests and tokens, per second or as a count."""

    requests: float = 0.0
    prompt_tokens: float = 0.0
    """Those that have to be computed."""
    output_tokens: float = 0.0
    """As predicted when the requests arrived."""
    cached_tokens: float = 0.0
    """Prompt tokens that are in the prefix cache."""

    def __add__(self, other: Demand) -> Demand:
        return Demand(
            self.requests + other.requests,
            self.prompt_tokens + other.prompt_tokens,
            self.output_tokens + other.output_tokens,
            self.cached_tokens + other.cached_tokens,
        )

    def without(self, other: Demand) -> Demand:
        return Demand(
            max(0.0, self.requests - other.requests),
            max(0.0, self.prompt_tokens - other.prompt_tokens),
            max(0.0, self.output_tokens - other.output_tokens),
            max(0.0, self.cached_tokens - other.cached_tokens),
        )

    def scaled(self, by: float) -> Demand:
        return Demand(self.requests * by, self.prompt_tokens * by, self.output_tokens * by, self.cached_tokens * by)

    def per_s(self, elapsed_s: float, to_compute: float) -> Demand:
        """Of a count of all prompt tokens: the rate, with a share of them to be computed."""
        rate = self.scaled(1 / elapsed_s)
        prompt_tokens = rate.prompt_tokens * to_compute
        return Demand(rate.requests, prompt_tokens, rate.output_tokens, rate.prompt_tokens - prompt_tokens)

    @property
    def tokens(self) -> float:
        return self.prompt_tokens + self.output_tokens


NO_DEMAND = Demand()
Samples = Sequence[tuple[float, Demand]]
"""(when, demand per second over the `SAMPLE_S` before), oldest first."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What requests cost of a replica's time, in seconds of one that computes nothing else."""

    request_s: float
    prompt_token_s: float = 0.0
    output_token_s: float = 0.0

    def replicas(self, demand: Demand) -> float:
        """Replicas that are busy all the time with so much per second."""
        tokens_s = self.prompt_token_s * demand.prompt_tokens + self.output_token_s * demand.output_tokens
        return max(0.0, self.request_s * demand.requests + tokens_s)

    def scaled(self, by: float) -> Cost:
        return Cost(self.request_s * by, self.prompt_token_s * by, self.output_token_s * by)

    def deviation(self, demand: Demand, over_s: float) -> float:
        """Standard deviation of `replicas(demand)` as measured over so many seconds, arrivals being independent."""
        count = demand.requests * over_s
        return math.sqrt(LENGTHS_FACTOR) * self.replicas(demand) / math.sqrt(count) if count > 0 else 0.0


def mean(demands: Sequence[Demand]) -> Demand:
    return sum(demands, start=NO_DEMAND).scaled(1 / len(demands))
