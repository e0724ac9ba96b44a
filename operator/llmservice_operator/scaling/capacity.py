"""What one replica can serve: by the planner's latency model with the limits of its engine and the targets."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from llmservice_operator.api.spec import Slo
from llmservice_operator.scaling.demand import Cost, Demand
from llmservice_operator.sizing import Sized
from llmservice_planner.capacity.replica import (
    UTILISATION,
    ReplicaCapacity,
    ReplicaLimits,
    Work,
    operating_point,
    rate_of,
    replica_capacity,
)
from llmservice_planner.model.block_groups import BlockGroups
from llmservice_planner.sizing.latency import LatencyModel

_STEP = 1.05
"""Lengths are rounded to powers of it: a capacity is computed once for requests of about the same length."""
MOST_UTILIZATION = 0.9
"""Of a replica's capacity, however many there are: what is predicted of it is not certain."""
_LEAST_UTILIZATION = 0.3
"""Where even less would be needed for the target, other means than replicas help."""
_LATE = 0.01
"""Share of the requests that may miss the target."""
_BISECTIONS = 10
_LONGER = 1.25
"""How much longer prompts or answers are looked at to see what a token costs."""


@dataclass(frozen=True, slots=True)
class ReplicaModel:
    """The latency model and the limits of one replica, with the targets that it has to keep."""

    latency: LatencyModel
    num_blocks: int
    """Of the KV cache, the null block apart."""
    groups: BlockGroups
    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_chunk_tokens: int
    ttft_p99_s: float | None = None
    itl_p99_s: float | None = None

    @classmethod
    def of(cls, sized: Sized, slo: Slo, kv_blocks: int | None = None) -> ReplicaModel | None:
        """`kv_blocks` as the pods measured them. None where the device's rates or the model's figures are unknown."""
        plan = sized.plan
        groups = sized.block_groups
        if sized.latency is None or plan is None or groups is None or not sized.max_num_seqs:
            return None
        return cls(
            sized.latency,
            kv_blocks or plan.num_blocks - 1,
            groups,
            sized.max_num_seqs,
            plan.max_num_batched_tokens,
            plan.prefill_chunk_tokens,
            slo.ttft_p99_s,
            slo.itl_p99_s,
        )

    def limits(self, work: Work) -> ReplicaLimits:
        """For such requests, of which the pool holds more where layers have windows."""
        kv_tokens = self.groups.tokens(self.num_blocks, max(1, round(work.context_tokens)))
        return ReplicaLimits(self.max_num_seqs, kv_tokens, self.max_num_batched_tokens, self.prefill_chunk_tokens)

    def capacity(self, work: Work) -> ReplicaCapacity:
        """The most that keeps the target of ITL; where nothing does, the most that a full replica does.

        TTFT is no property of one replica: a request that finds one full is sent to another. See `staffing`.
        """
        found = _capacity(self, work)
        return found if found.requests_per_s > 0 else self.full(work)

    def full(self, work: Work) -> ReplicaCapacity:
        """With a queue, whatever the targets."""
        return _capacity(replace(self, itl_p99_s=None), work)

    def staffing(self, demand: Demand) -> Staffing | None:
        """How far replicas may be used by such requests; None without requests."""
        work = work_of(demand)
        return None if work is None else _staffing(self, work)

    def busy(self, demand: Demand, num_seqs: float) -> float:
        """Share of a full replica's rate that one serves with so many of such requests at once, by Little's law."""
        work = work_of(demand)
        return 0.0 if work is None or num_seqs <= 0 else _busy(self, work, round(num_seqs, 1))

    def cost(self, demand: Demand) -> Cost | None:
        """What requests like those of `demand` cost by their tokens, with the targets kept; None without requests.

        What a longer prompt or answer adds is computed as well, so that a demand of other lengths is weighed.
        """
        return None if demand.requests <= 0 else _cost(self, *_lengths(demand))


def work_of(demand: Demand) -> Work | None:
    """The mean request, with lengths rounded; None where there is none."""
    return None if demand.requests <= 0 else _work(*_lengths(demand))


def _lengths(demand: Demand) -> tuple[float, float, float]:
    """Mean tokens of a prompt that are computed, of an answer, and of a prompt that are cached: rounded, at least 1."""
    totals = (demand.prompt_tokens, demand.output_tokens, demand.cached_tokens)
    prompt, output, cached = (_STEP ** round(math.log(max(1.0, total / demand.requests), _STEP)) for total in totals)
    return prompt, output, cached


def _work(prompt_tokens: float, output_tokens: float, cached_tokens: float) -> Work:
    context_tokens = prompt_tokens + cached_tokens + output_tokens / 2
    return Work(prompt_tokens, output_tokens, context_tokens, cached_tokens=cached_tokens)


@dataclass(frozen=True, slots=True)
class Staffing:
    """How far replicas may be used so that 99 % of the requests keep the target of TTFT."""

    alone: float
    """Of one replica."""
    slots: float = 0.0
    """Sequences that a full replica runs at once, where they bound its rate; requests then wait for one of them."""
    hold_s: float = 0.0
    """How long a request has one, on a full replica."""
    patience_s: float = 0.0
    """How long a request may wait for one."""

    def utilization(self, replicas: int) -> float:
        """Of so many: the more slots there are, the less arrivals vary against them."""
        if not self.slots:
            return self.alone
        low, high = self.alone, MOST_UTILIZATION
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if self._late(replicas, middle) <= _LATE else (low, middle)
        return low

    def replicas(self, busy: float) -> float:
        """For a load that would keep so many busy all the time; not rounded."""
        number = max(1, math.ceil(busy / MOST_UTILIZATION))
        while busy > number * self.utilization(number):
            number += 1
        fewer = number - 1
        kept = fewer * self.utilization(fewer) if fewer else 0.0
        return fewer + max(0.0, busy - kept) / (number * self.utilization(number) - kept)

    def _late(self, replicas: int, utilization: float) -> float:
        """Share of the requests that wait longer than they may: M/M/c with many servers (Halfin & Whitt, "Heavy-traffic
        limits for queues with many exponential servers", Operations Research 29(3), 1981)."""
        slots = replicas * self.slots
        spare = (1 - utilization) * math.sqrt(slots)
        density = math.exp(-(spare**2) / 2) / math.sqrt(2 * math.pi)
        waits = density / (density + spare * (1 + math.erf(spare / math.sqrt(2))) / 2)
        return waits * math.exp(-(1 - utilization) * slots * self.patience_s / self.hold_s)


@lru_cache(maxsize=4096)
def _staffing(model: ReplicaModel, work: Work) -> Staffing:
    target_s, full = model.ttft_p99_s, model.capacity(work)
    if target_s is None:
        return Staffing(UTILISATION)
    low, high, limits = _LEAST_UTILIZATION, MOST_UTILIZATION, model.limits(work)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        point = operating_point(model.latency, limits, work, middle * full.requests_per_s)
        is_kept = point is not None and point.ttft_p99_s <= target_s
        low, high = (middle, high) if is_kept else (low, middle)
    unloaded = operating_point(model.latency, limits, work, 0.0)
    patience_s = target_s - (unloaded.ttft_p99_s if unloaded else target_s)
    if full.limited_by not in {"maxNumSeqs", "kvMemory"} or patience_s <= 0:
        return Staffing(low)
    return Staffing(low, full.num_seqs, full.num_seqs / full.requests_per_s, patience_s)


@lru_cache(maxsize=4096)
def _busy(model: ReplicaModel, work: Work, num_seqs: float) -> float:
    return min(1.0, rate_of(model.latency, model.limits(work), work, num_seqs) / model.capacity(work).requests_per_s)


@lru_cache(maxsize=4096)
def _capacity(model: ReplicaModel, work: Work) -> ReplicaCapacity:
    return replica_capacity(model.latency, model.limits(work), work, itl_p99_s=model.itl_p99_s)


@lru_cache(maxsize=4096)
def _cost(model: ReplicaModel, prompt: float, output: float, cached: float) -> Cost:
    def request_s(prompt: float, output: float) -> float:
        return 1 / model.capacity(_work(prompt, output, cached)).requests_per_s

    base = request_s(prompt, output)
    by_prompt = (request_s(prompt * _LONGER, output) - base) / (prompt * (_LONGER - 1))
    by_output = (request_s(prompt, output * _LONGER) - base) / (output * (_LONGER - 1))
    return Cost(base - by_prompt * prompt - by_output * output, by_prompt, by_output)
