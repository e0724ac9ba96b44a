"""The times of all steps by what they computed: sums for the planner's latency model, and a histogram."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from llmservice_server.types.messages import StepTime

StepKind = Literal["decode", "mixed"]
"""Of a step without prompt tokens, and of one with them."""

LATENCY_BUCKETS: tuple[float, ...] = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1)
LATENCY_BUCKETS += (0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, math.inf)
"""Upper bounds, in seconds: from 1 ms on, because the autoscaler reads a p99 from them; vLLM's start at 10 ms."""


def cumulative(counts: Iterable[int]) -> list[tuple[str, float]]:
    """Of the `LATENCY_BUCKETS`, as Prometheus has histograms: each with all below its bound."""
    names = [*map(str, LATENCY_BUCKETS[:-1]), "+Inf"]
    return list(zip(names, map(float, accumulate(counts)), strict=True))


@dataclass(slots=True)
class StepSums:
    """Of the steps of one kind with about as many sequences; the figures are those of `StepTime`."""

    kind: StepKind
    sequences: int
    """The most that such a step has, a power of two; the next smaller group has half as many."""
    steps: int = 0
    seconds: float = 0.0
    num_seqs: int = 0
    context_tokens: int = 0
    prompt_tokens: int = 0
    prompt_chunks: int = 0
    attention_pairs: int = 0

    def add(self, step: StepTime) -> None:
        self.steps += 1
        self.seconds += step.seconds
        self.num_seqs += step.num_seqs
        self.context_tokens += step.context_tokens
        self.prompt_tokens += step.prompt_tokens
        self.prompt_chunks += step.prompt_chunks
        self.attention_pairs += step.attention_pairs


class StepTimes(Collector):
    """Since the server's start. Collects the histogram `step_seconds` by kind."""

    def __init__(self, prefix: str, constant: Mapping[str, str]) -> None:
        self._name = prefix + "step_seconds"
        self._constant = constant
        self._groups: dict[tuple[StepKind, int], StepSums] = {}
        self._counts: dict[StepKind, list[int]] = {
            "decode": [0] * len(LATENCY_BUCKETS),
            "mixed": [0] * len(LATENCY_BUCKETS),
        }

    def observe(self, step: StepTime) -> None:
        kind: StepKind = "mixed" if step.prompt_chunks else "decode"
        sequences = 1 << max(0, step.num_seqs + step.prompt_chunks - 1).bit_length()
        group = self._groups.get((kind, sequences))
        if group is None:
            group = self._groups[kind, sequences] = StepSums(kind, sequences)
        group.add(step)
        self._counts[kind][bisect_left(LATENCY_BUCKETS, step.seconds)] += 1

    @property
    def sums(self) -> list[StepSums]:
        """Of all groups that have steps, in order."""
        return [self._groups[key] for key in sorted(self._groups)]

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(
            self._name,
            "Time of a step that computes no prompt (decode), or one (mixed), from the result before to its own",
            labels=(*self._constant, "kind"),
        )
        for kind, counts in self._counts.items():
            seconds = sum(group.seconds for group in self._groups.values() if group.kind == kind)
            family.add_metric((*self._constant.values(), kind), cumulative(counts), seconds)
        yield family
