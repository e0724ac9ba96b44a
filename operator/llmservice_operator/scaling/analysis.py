"""The load in units of replicas: what is in flight, what arrives, what will once a new pod serves."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from llmservice_operator.scaling.capacity import ReplicaModel, Staffing, work_of
from llmservice_operator.scaling.demand import (
    NO_DEMAND,
    SAMPLE_S,
    Cost,
    Demand,
    Trend,
    is_burst,
    is_growing,
    mean,
    trend,
)
from llmservice_operator.scaling.history import History
from llmservice_operator.scaling.load import Load
from llmservice_operator.scaling.policy import TARGET_UTILIZATION, ScalePolicy
from llmservice_operator.scaling.supply import Supply

_SETTLED_S = 60.0
_CAUTION = 1.0
"""Standard deviations by which the demand is taken lower until so many seconds, or the window, were observed."""
MEASURED_STAFFING = Staffing(TARGET_UTILIZATION)


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one replica serves of the present mix of requests, per second."""

    source: Literal["predicted", "measured"]
    """By the latency model and its correction, or as measured alone."""
    serves: Demand
    correction: float = 1.0
    """What full replicas finished against the prediction; 1 before any was measured."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What arrives, in replicas that would be busy with it all the time."""

    demand: Demand
    """Per second, over the window."""
    capacity: Capacity | None
    """None while nothing arrives."""
    level: float
    predicted: float
    """At the end of the horizon; `level` without a trend."""
    horizon_s: float
    """How long a replica that is asked for now takes until it serves."""
    trend: Trend | None
    recent: float
    """Over the last seconds."""
    is_burst: bool
    request: float
    """What one request of the mean length takes of a replica, in seconds."""
    running: float | None = None
    """What runs now; None where the capacity is measured, or where pods can't start."""
    staffing: Staffing = MEASURED_STAFFING
    """How far replicas may be used."""
    may_grow: bool = False
    """There is a trend, or the last minute looks like the start of one."""

    @property
    def most(self) -> float:
        """What replicas are needed for: the demand, where it is heading, and a burst at once."""
        return max(self.level, self.predicted, self.recent if self.is_burst else 0.0)


@dataclass(frozen=True, slots=True)
class Analysis:
    """The load in units of replicas; None where it is unknown."""

    queue: float | None
    """Replicas that hold what is in flight with at most `queue_depth` waiting each, soon; None without a queue."""
    busy: float
    """Full replicas that hold what runs, by slots or by KV cache, whichever is fuller."""
    utilization: float
    """Replicas that hold what runs at 80 % of their slots, or of their KV cache where that is fuller."""
    arrivals: float | None
    """Replicas that keep up with the arrivals at 80 % of a replica's capacity."""
    capacity_per_s: float | None
    forecast: Forecast | None = None
    """None where the servers count no arrivals, or where a replica's capacity is unknown."""

    @property
    def is_predicted(self) -> bool:
        """Whether the capacity of a replica is known before one was full."""
        capacity = self.forecast.capacity if self.forecast else None
        return self.forecast is not None and (capacity is None or capacity.source == "predicted")


def analyse(
    load: Load,
    slots: float,
    supply: Supply,
    policy: ScalePolicy,
    capacity_per_s: float | None,
    forecast: Forecast | None = None,
) -> Analysis:
    """Put the load into units of replicas; pods whose metrics are missing are assumed to be like the others.

    `slots` is what one replica really runs at once. A queue asks for the replicas that hold all that is in flight, or
    for those that finish it in the time that a new one takes to start, whichever are fewer: any more would be idle by
    the time that they serve.
    """
    busy = busy_replicas(load, policy)
    utilization = busy / TARGET_UTILIZATION
    waiting = load.waiting / load.answered
    queue = (load.running / load.answered + waiting) / (slots + policy.queue_depth)
    arrivals = None
    if capacity_per_s is not None and load.arrivals_per_s is not None:
        arrivals_per_s = load.arrivals_per_s / load.answered
        arrivals = arrivals_per_s / (capacity_per_s * TARGET_UTILIZATION)
        to_do = arrivals_per_s * supply.lead_s + waiting
        queue = min(queue, to_do / (capacity_per_s * supply.lead_s + policy.queue_depth))
        if load.waiting:  # pods that have a queue are full, however few of them are needed
            utilization = min(utilization, supply.replicas)
    if supply.trouble is not None:  # a queue that grows because pods can't start
        queue = min(queue, supply.replicas)
    return Analysis(queue if load.waiting else None, busy, utilization, arrivals, capacity_per_s, forecast)


def busy_replicas(load: Load, policy: ScalePolicy) -> float:
    return sum(max(pod.running / policy.max_num_seqs, pod.kv_usage) for pod in load.pods) / load.answered


def used_slots(load: Load, policy: ScalePolicy) -> float:
    """What one replica really runs at once: fewer than its slots where long requests fill the KV cache first."""
    full = [pod.running for pod in load.pods if pod.waiting and pod.kv_usage >= TARGET_UTILIZATION]
    return min(policy.max_num_seqs, max(1.0, sum(full) / len(full))) if full else policy.max_num_seqs


def forecast_of(
    load: Load, supply: Supply, policy: ScalePolicy, history: History, model: ReplicaModel | None, now: float
) -> Forecast | None:
    """What arrives and will arrive; `history` has the demand of the last minutes, the present one included.

    After a burst the demand is that since then, for what was before is another load. Soon after a replica was removed,
    growth is not extrapolated: that would mostly bring it back because the load varies by chance.
    The cost of a request is that of the mean request of these minutes: a few long ones change it little.
    """
    if load.demand is None:
        return None
    samples = history.demands
    since_s = -math.inf if history.burst_s is None else history.burst_s
    within = [demand for when, demand in samples if when > max(now - policy.window_s, since_s - SAMPLE_S)]
    demand = mean(within) if within else load.demand.scaled(1 / load.answered)
    typical = mean([one for _, one in samples]) if samples else demand
    horizon_s = supply.lead_s + policy.up.stabilization_s
    if typical.requests <= 0:
        return Forecast(NO_DEMAND, None, 0.0, 0.0, horizon_s, None, 0.0, is_burst=False, request=0.0)
    priced = _cost(typical, model, history, now)
    if priced is None:
        return None
    cost, source, correction = priced
    request_s = cost.replicas(typical) / typical.requests
    mix = demand if demand.requests > 0 else typical
    serves = mix.scaled(1 / cost.replicas(mix)) if cost.replicas(mix) > 0 else typical.scaled(1 / request_s)
    recent = load.demand.scaled(1 / load.answered)
    growth = trend(samples, cost, horizon_s, now, since_s)
    burst = is_burst(recent, samples, cost, policy.window_s, now)
    level = cost.replicas(demand)
    observed_s = SAMPLE_S * len(within)
    if observed_s < min(policy.window_s, _SETTLED_S):  # the first requests seen say little
        level = max(0.0, level - _CAUTION * cost.deviation(demand, observed_s))
    staffing = (model.staffing(typical) if model is not None else None) or MEASURED_STAFFING
    found = None if burst or history.shrunk_within(policy.down.stabilization_s, now) else growth
    running = None
    if model is not None and source == "predicted" and supply.trouble is None:
        running = _running(load, supply, model, typical)
    return Forecast(
        demand=demand,
        capacity=Capacity(source, serves, correction),
        level=level,
        predicted=level if found is None else max(level, found.after(horizon_s, running or 0.0)),
        horizon_s=horizon_s,
        trend=found,
        may_grow=not burst and (growth is not None or is_growing(samples, cost, now, since_s)),
        recent=cost.replicas(recent),
        is_burst=burst,
        request=request_s,
        running=running,
        staffing=staffing,
    )


def _running(load: Load, supply: Supply, model: ReplicaModel, typical: Demand) -> float:
    """Replicas that are busy with what runs. What waits is the backlog: those that there are work it off."""
    ready = max(1, supply.ready)
    return ready * model.busy(typical, load.running / load.answered / ready)


def _cost(
    typical: Demand, model: ReplicaModel | None, history: History, now: float
) -> tuple[Cost, Literal["predicted", "measured"], float] | None:
    predicted = model.cost(typical) if model is not None else None
    if predicted is not None:
        correction = history.correction_at(now)
        return predicted.scaled(1 / correction), "predicted", correction
    capacity_per_s = history.capacity_per_s(now)
    return None if capacity_per_s is None else (Cost(1 / capacity_per_s), "measured", 1.0)


def full_replica_per_s(model: ReplicaModel | None, history: History) -> float | None:
    """Requests per second, of the mean length of late, that the model predicts of a replica with a queue."""
    if model is None or not history.demands:
        return None
    work = work_of(mean([demand for _, demand in history.demands]))
    return None if work is None else model.full(work).requests_per_s
