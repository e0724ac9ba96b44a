"""What arrives and what will once a new pod serves, in units of replicas."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from llmservice_operator.scaling.capacity import ReplicaModel, Staffing
from llmservice_operator.scaling.demand import NO_DEMAND, SAMPLE_S, Cost, Demand, mean
from llmservice_operator.scaling.history import History
from llmservice_operator.scaling.load import ENOUGH_FULL_S, Load
from llmservice_operator.scaling.policy import TARGET_UTILIZATION, ScalePolicy
from llmservice_operator.scaling.supply import Supply
from llmservice_operator.scaling.trend import Trend, is_burst, is_growing, trend

_SETTLED_S = 60.0
_CAUTION = 1.0
"""Standard deviations by which the demand is taken lower until so many seconds, or the window, were observed."""
_CERTAIN = 3.0
"""Standard deviations of what the busiest replica did."""
MEASURED_STAFFING = Staffing(TARGET_UTILIZATION)


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one replica serves of the present mix of requests, per second."""

    source: Literal["predicted", "measured"]
    """By the latency model and its correction, or as measured alone."""
    serves: Demand
    correction: float = 1.0
    """What full replicas did against the prediction; 1 before any was measured."""


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
    recent = load.demand.scaled(1 / load.answered)
    samples = history.demands
    since_s = -math.inf if history.burst_s is None else history.burst_s
    window = [demand for when, demand in samples if when > max(now - policy.window_s, since_s - SAMPLE_S)]
    demand = mean(window) if window else recent
    typical = mean([one for _, one in samples]) if samples else demand
    horizon_s = supply.lead_s + policy.up.stabilization_s
    if typical.requests <= 0:
        return Forecast(NO_DEMAND, None, 0.0, 0.0, horizon_s, None, 0.0, is_burst=False, request=0.0)
    priced = _cost(typical, model, history, now)
    if priced is None:
        return None
    cost, source, correction = priced
    request_s = cost.replicas(typical) / typical.requests
    burst = is_burst(recent, samples, cost, policy.window_s, now)
    growth = trend(samples, cost, horizon_s, now, since_s)
    used = None if burst or history.shrunk_within(policy.down.stabilization_s, now) else growth
    running = None
    if model is not None and source == "predicted" and supply.trouble is None:
        running = _running(load, supply, model, typical)
    level = _level(demand, cost, SAMPLE_S * len(window), policy.window_s)
    return Forecast(
        demand=demand,
        capacity=Capacity(source, _served(demand, typical, cost), correction),
        level=level,
        predicted=level if used is None else max(level, used.after(horizon_s, running or 0.0)),
        horizon_s=horizon_s,
        trend=used,
        may_grow=not burst and (growth is not None or is_growing(samples, cost, now, since_s)),
        recent=cost.replicas(recent),
        is_burst=burst,
        request=request_s,
        running=running,
        staffing=(model.staffing(typical) if model is not None else None) or MEASURED_STAFFING,
    )


def _level(demand: Demand, cost: Cost, observed_s: float, window_s: float) -> float:
    """Replicas that are busy with the demand; fewer where it was observed shortly, as the first requests say little."""
    level = cost.replicas(demand)
    if observed_s >= min(window_s, _SETTLED_S):
        return level
    return max(0.0, level - _CAUTION * cost.deviation(demand, observed_s))


def _served(demand: Demand, typical: Demand, cost: Cost) -> Demand:
    """What one replica serves per second of such requests; of typical ones where the demand is none."""
    mix = demand if demand.requests > 0 and cost.replicas(demand) > 0 else typical
    return mix.scaled(1 / cost.replicas(mix))


def _running(load: Load, supply: Supply, model: ReplicaModel, typical: Demand) -> float:
    """Replicas that are busy with what runs. What waits is the backlog: those that there are work it off."""
    ready = max(1, supply.ready)
    return ready * model.busy(typical, load.running / load.answered / ready)


def _cost(
    typical: Demand, model: ReplicaModel | None, history: History, now: float
) -> tuple[Cost, Literal["predicted", "measured"], float] | None:
    """Of requests, by the model or as measured, with the correction of the model; None: neither is known."""
    predicted = model.cost(typical) if model is not None else None
    if predicted is not None:
        correction = history.correction_at(now)
        return predicted.scaled(1 / correction), "predicted", correction
    capacity_per_s = history.capacity_per_s(now)
    return None if capacity_per_s is None else (Cost(1 / capacity_per_s), "measured", 1.0)


def work_done(load: Load, model: ReplicaModel, typical: Demand) -> tuple[float | None, float]:
    """What full replicas did in a second, on average, and what the busiest of all surely did, full or not.

    Both in seconds that the model gives a full replica for it. Tokens are counted as they are computed: answers may be
    longer than the window, and requests of another mix than the typical one.
    """
    cost = replace(model, itl_p99_s=None).cost(typical)
    if cost is None:
        return None, 0.0
    full, certain = [], 0.0
    for pod in load.pods:
        if pod.work is None:
            continue
        done = cost.replicas(pod.work)
        if pod.is_full:
            full.append(done)
        if pod.work.requests:
            certain = max(certain, done - _CERTAIN * cost.deviation(pod.work, ENOUGH_FULL_S))
    return (sum(full) / len(full) if full else None), certain
