"""What bounds the autoscaler: the user's limits, targets and steps, and which lanes ask for replicas."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from llmservice_operator.api import units
from llmservice_operator.api.autoscaling_spec import Autoscaling, ScaleDown, ScaleUp
from llmservice_operator.api.spec import Slo
from llmservice_operator.scaling.demand import NO_DEMAND
from llmservice_operator.scaling.history import History
from llmservice_operator.scaling.load import Load, PodLoad

TARGET_UTILIZATION = 0.8
"""Waiting times explode beyond it (queueing theory): plan for this share of the slots, not for all of them."""

STARTS_STABILIZED, STARTS_WHOLE = 4.0, 0.5
SHORTEST_STABILIZATION_S, LONGEST_STABILIZATION_S = 120.0, 300.0
"""An idle replica is worth keeping for a few times what its next start takes, for requests are late meanwhile. All of
the surplus is kept for half a start, and half of it for four; soon after a burst all of it for five."""

IDLE_TIMEOUT_S = 300.0
"""About what the start of a model of many GiB costs. A replica that is kept idle for as long as its next start takes
uses at most twice the GPU time of the best schedule in hindsight (the ski-rental problem)."""


@dataclass(frozen=True, slots=True)
class ScalingRules:
    """How fast the replicas may change in one direction.

    At most by the larger of `replicas` and `percent` in `period_s`, and not within `cooldown_s` of a change.
    """

    replicas: int
    percent: int
    period_s: float
    cooldown_s: float
    stabilization_s: float = 0.0
    whole_s: float = math.inf
    """Within the stabilisation, for how long all of the surplus is kept; half of it is for the rest."""
    adapts: bool = False
    """Whether the stabilisation follows the start-up time."""

    @classmethod
    def of(cls, spec: ScaleUp | ScaleDown) -> ScalingRules:
        given = spec.stabilization
        return cls(
            replicas=spec.step_replicas,
            percent=spec.step_percent,
            period_s=units.seconds(spec.step_period),
            cooldown_s=units.seconds(spec.cooldown),
            stabilization_s=LONGEST_STABILIZATION_S if given is None else units.seconds(given),
            adapts=given is None,
        )

    def with_start(self, lead_s: float, *, is_bursty: bool = False) -> ScalingRules:
        """For replicas that take so long to start. In bursty traffic all of the surplus is kept, for one start more."""
        if not self.adapts:
            return self
        start_s = max(lead_s, SHORTEST_STABILIZATION_S / STARTS_STABILIZED)
        kept, whole = (STARTS_STABILIZED + 1, math.inf) if is_bursty else (STARTS_STABILIZED, STARTS_WHOLE)
        stabilization_s = min(kept * start_s, LONGEST_STABILIZATION_S)
        return replace(self, stabilization_s=stabilization_s, whole_s=whole * start_s)

    @property
    def about(self) -> str:
        return f"at most {self.replicas} replicas or {self.percent}% in {self.period_s:g}s"

    def size(self, start: int) -> int:
        """Replicas that one period may add to, or take from, `start`; a share of them is rounded up."""
        return max(self.replicas, math.ceil(start * self.percent / 100))

    def highest(self, current: int, history: History, now: float) -> int:
        """The most replicas that may be set now; never below `current`."""
        start = self._period_start(current, history, now)
        return current if start is None else max(current, start + self.size(start))

    def lowest(self, current: int, history: History, now: float) -> int:
        """The fewest replicas that may be set now; never above `current`."""
        start = self._period_start(current, history, now)
        return current if start is None else min(current, max(0, start - self.size(start)))

    def _period_start(self, current: int, history: History, now: float) -> int | None:
        """The replicas at the start of the period; None during the cooldown."""
        if history.changes and now - history.changes[-1][0] < self.cooldown_s:
            return None
        return max(0, current - sum(change for when, change in history.changes if when > now - self.period_s))


@dataclass(frozen=True, slots=True)
class ScalePolicy:
    """The user's limits and targets."""

    min_replicas: int
    max_replicas: int
    queue_depth: int
    tolerance: float
    up: ScalingRules
    down: ScalingRules
    window_s: float
    ttft_p99_s: float | None
    max_num_seqs: int
    """Slots of one replica."""
    idle_timeout_s: float = math.inf
    """How long there is no request before the last replica is removed; without end where it always stays."""
    batch: Literal["fill", "scale"] = "fill"
    """fill: batch requests use what the others leave, and add no replicas. scale: they count like the others."""
    why_least: str = ""
    """What raised `min_replicas` for now."""
    why_most: str = ""
    """What lowered `max_replicas` for now."""

    @classmethod
    def of(cls, autoscaling: Autoscaling, slo: Slo, max_num_seqs: int) -> ScalePolicy:
        return cls(
            min_replicas=autoscaling.min_replicas,
            max_replicas=autoscaling.max_replicas,
            queue_depth=autoscaling.queue_depth,
            tolerance=autoscaling.tolerance_percent / 100,
            up=ScalingRules.of(autoscaling.scale_up),
            down=ScalingRules.of(autoscaling.scale_down),
            window_s=units.seconds(autoscaling.metrics.window),
            ttft_p99_s=slo.ttft_p99_s,
            max_num_seqs=max_num_seqs,
            idle_timeout_s=_idle_timeout_s(autoscaling),
            batch=autoscaling.batch,
        )

    @property
    def sleeps(self) -> bool:
        """Whether the last replica is removed when there are no requests."""
        return self.min_replicas == 0

    @property
    def memory_s(self) -> float:
        """How far back a decision looks."""
        times = [(rules.stabilization_s, rules.period_s, rules.cooldown_s) for rules in (self.up, self.down)]
        return max(self.window_s, *times[0], *times[1])

    def for_load(self, load: Load) -> ScalePolicy:
        """With the slots that the pods report: fewer than `max_num_seqs` where requests fill the KV cache first."""
        if load.admissible is None:
            return self
        return replace(self, max_num_seqs=max(1, min(self.max_num_seqs, round(load.admissible))))

    def bound_reason(self, asked: int, bounded: int) -> str:
        """Why so many are not asked for."""
        why = self.why_least if bounded > asked else self.why_most
        return f"{why or f'bounds: {self.min_replicas} to {self.max_replicas}'} -> {bounded}"

    def bounded(self, replicas: int) -> int:
        return min(max(replicas, self.min_replicas), self.max_replicas)

    def counted(self, load: Load) -> Load:
        """The load that replicas are added for.

        Rates and quantiles are of all lanes: with batch requests in the window they say nothing about the others.
        """
        if self.batch == "scale" or not (load.batch or load.batch_demand.requests):
            return load
        return replace(
            load,
            pods=tuple(self._without_batch(pod) for pod in load.pods),
            demand=load.demand and load.demand.without(load.batch_demand),
            batch_demand=NO_DEMAND,
            arrivals_per_s=None,
            ttft_p50_s=None,
            ttft_p99_s=None,
            ttft_certain_s=None,
            ttft_count=0.0,
        )

    def _without_batch(self, pod: PodLoad) -> PodLoad:
        """A server that does not report running requests by lane fills its free slots with batch requests.

        While batch requests wait there and no others do, the pod counts as used up to the target at most, which
        neither adds a replica nor removes one.
        """
        waiting = pod.waiting - pod.batch_waiting
        running, kv_usage = pod.running, pod.kv_usage
        if pod.batch_running is not None:
            running = pod.running - pod.batch_running
            kv_usage *= running / pod.running if pod.running else 1.0
        elif pod.batch_waiting and not waiting:
            running = min(running, TARGET_UTILIZATION * self.max_num_seqs)
            kv_usage = min(kv_usage, TARGET_UTILIZATION)
        return replace(pod, running=running, waiting=waiting, kv_usage=kv_usage, batch_waiting=0.0, batch_running=0.0)


def _idle_timeout_s(autoscaling: Autoscaling) -> float:
    if autoscaling.min_replicas:
        return math.inf
    return IDLE_TIMEOUT_S if autoscaling.idle_timeout is None else units.seconds(autoscaling.idle_timeout)
