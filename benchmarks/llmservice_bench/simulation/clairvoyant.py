"""The schedule of one who knows all arrivals and answers: the fewest replicas over time that keep the TTFT target.

Each request's work on a replica is known from the latency model; a slot of time needs the replicas that do the work of
the requests in it at a certain load. The highest such load at which the simulation keeps the promise is found by
bisection, once with the work of each slot alone and once with that of a minute around it. A replica is created its
start-up time before it is needed; one that is needed again before another could start stays. The schedule is feasible,
which the simulation verifies, and close to the fewest GPU-hours; that no other has fewer is not proven.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate

from llmservice_bench.simulation.fleet import Fleet, FleetConfig
from llmservice_bench.simulation.observation import Bounds, Observation
from llmservice_bench.simulation.outcome import Outcome, Targets
from llmservice_operator.scaling.decision import Decision
from llmservice_planner.sizing.latency import LatencyModel, StepBatch
from llmservice_planner.traffic.traces import TraceRequest

SLOT_S = 5.0
PROMISED = 0.99
"""Share of the requests whose TTFT is within the target."""
LEAST_LOAD, MOST_LOAD, STEPS = 0.2, 1.6, 6
"""Of the bisection; a replica's load is 1 where it computes all the time with full batches."""
AROUND = (0, 6)
"""Slots on either side of one, over which its work is averaged: what exceeds the mean for a moment waits a little."""


class Scheduled:
    """Replicas by time, decided before."""

    interval_s = SLOT_S
    jitter = 0.0
    wakes = False

    def __init__(self, name: str, replicas: Sequence[int]) -> None:
        """`replicas`: of each slot; those of the last one stay."""
        self.name = name
        self._replicas = replicas

    def decide(self, seen: Observation) -> Decision:
        slot = min(int(seen.now_s / SLOT_S + 1e-6), len(self._replicas) - 1)
        replicas = self._replicas[slot]
        return Decision(replicas, replicas, (f"{self.name}: planned for {slot * SLOT_S:g}s -> {replicas}",))


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds of a replica that each request takes beside others, and for how long it takes them."""

    latency: LatencyModel
    num_seqs: int
    """Of a full batch."""
    context_tokens: float
    """Of each sequence in it."""

    @classmethod
    def of(cls, latency: LatencyModel, num_seqs: int, trace: Sequence[TraceRequest]) -> Work:
        tokens = sum(each.output_tokens for each in trace)
        context = sum(each.output_tokens * (each.prompt_tokens + each.output_tokens / 2) for each in trace)
        return cls(latency, num_seqs, context / max(1, tokens))

    @property
    def step_s(self) -> float:
        return self.latency.seconds(StepBatch(self.num_seqs, round(self.num_seqs * self.context_tokens)))

    def by_slot(self, trace: Sequence[TraceRequest], duration_s: float) -> list[float]:
        """The mean number of replicas that compute all the time; a prompt is work at its arrival, an answer after."""
        work_s = [0.0] * (math.ceil(duration_s / SLOT_S) + 1)
        step_s, model = self.step_s, self.latency
        for each in trace:
            slot = min(int(each.arrival_s / SLOT_S), len(work_s) - 1)
            pairs = each.prompt_tokens * (each.prompt_tokens + 1) / 2
            work_s[slot] += each.prompt_tokens * (model.token_s + model.transfer_s) + pairs * model.pair_s
            lasts_s = each.output_tokens * step_s
            last = min(int((each.arrival_s + lasts_s) / SLOT_S), len(work_s) - 1)
            for taken in range(slot, last + 1):
                work_s[taken] += lasts_s / self.num_seqs / (last - slot + 1)
        return [one / SLOT_S for one in work_s]


def needed(busy: Sequence[float], load: float, bounds: Bounds, around: int = 0) -> list[int]:
    """Replicas that serve in each slot, at this load; of the mean over so many slots `around` it on either side."""
    sums = [0.0, *accumulate(busy)]
    spans = [(max(0, slot - around), min(len(busy), slot + around + 1)) for slot in range(len(busy))]
    means = [(sums[end] - sums[begin]) / (end - begin) for begin, end in spans]
    return [max(1, bounds.of(math.ceil(mean / load - 1e-9))) if mean else bounds.min_replicas for mean in means]


def created(serving: Sequence[int], startup_s: float) -> list[int]:
    """Replicas to ask for in each slot, so that those `serving` are ready: the most of the start-up time ahead."""
    ahead = math.ceil(startup_s / SLOT_S)
    return [max(serving[slot : slot + ahead + 1]) for slot in range(len(serving))]


@dataclass(frozen=True, slots=True)
class Clairvoyant:
    """The cheapest schedule found."""

    outcome: Outcome
    serving: Sequence[int]
    """Replicas that are ready in each slot."""


def clairvoyant(
    config: FleetConfig,
    trace: Sequence[TraceRequest],
    bounds: Bounds,
    targets: Targets,
    duration_s: float,
    *,
    warmup_s: float = 0.0,
) -> Clairvoyant:
    """By bisection of the load, for each way to smooth the work. Where none keeps the promise, the most replicas."""
    work = Work.of(config.replica.latency, _full_batch(config, trace), trace)
    busy = work.by_slot(trace, duration_s)

    @cache  # loads near each other need the same replicas
    def outcome(replicas: tuple[int, ...]) -> Outcome:
        policy = Scheduled("clairvoyant", replicas)
        return Fleet(replace(config, initial=replicas[0]), trace, policy, duration_s, warmup_s=warmup_s).run()

    def run(load: float, around: int) -> Clairvoyant:
        serving = needed(busy, load, bounds, around)
        return Clairvoyant(outcome(tuple(created(serving, max(config.startup_s)))), serving)

    found = []
    for around in AROUND:
        low, high = LEAST_LOAD, MOST_LOAD
        for _ in range(STEPS):
            load = (low + high) / 2
            result = run(load, around)
            if result.outcome.attainment(targets).ttft >= PROMISED:
                low = load
                found.append(result)
            else:
                high = load
    return min(found, key=lambda one: one.outcome.gpu_s) if found else run(LEAST_LOAD, 0)


def _full_batch(config: FleetConfig, trace: Sequence[TraceRequest]) -> int:
    """Sequences of the trace's mean length that a replica runs at once."""
    tokens = sum(each.prompt_tokens + each.output_tokens for each in trace) / max(1, len(trace))
    room = (config.replica.num_blocks - 1) * config.replica.groups.block_size
    return max(1, min(config.replica.scheduler.max_num_seqs, int(room / max(1.0, tokens))))
