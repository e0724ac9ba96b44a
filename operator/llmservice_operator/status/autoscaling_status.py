"""`status.autoscaling`: load, signals, capacity and the last decisions, written rarely however the traffic moves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from llmservice_operator.api.status import (
    MAX_DECISIONS,
    CapacityStatus,
    DecisionStatus,
    DemandStatus,
    GpuHoursStatus,
    SignalStatus,
)
from llmservice_operator.monitoring.promql import service_queries
from llmservice_operator.pods.pod import epoch
from llmservice_operator.scaling.decision import Decision
from llmservice_operator.scaling.forecast import Forecast
from llmservice_operator.scaling.history import CAPACITY_KEEP_S, Timed
from llmservice_operator.scaling.load import Load
from llmservice_operator.scaling.policy import TARGET_UTILIZATION, ScalePolicy
from llmservice_operator.scaling.schedule import GpuHours
from llmservice_operator.status.conditions import rfc3339

WRITE_EVERY_S = 15.0
"""Figures are written no more often than this, however the traffic moves."""
_SMALL = 0.1
"""A change of a figure by no more than this share is not written."""
_REASONS = 16


@dataclass(frozen=True, slots=True)
class WriteAllowance:
    """What one pass may write of the figures that move with the traffic."""

    due: bool = True
    """Whether it is time to write them."""
    complete: bool = True
    """Whether a whole window was observed: until then a missing figure is only not known yet."""
    resuming: bool = False
    """Whether this process has just started beside a service whose status has figures already: they stay, as long as no
    replica is to be added or removed."""


UNLIMITED = WriteAllowance()


@dataclass(frozen=True, slots=True)
class StatusWriteThrottle:
    """Of one service, in one process. Times are seconds of a monotonic clock."""

    began_s: float
    """When this process first observed the service."""
    resumed: bool
    """Whether its status had figures of the load by then."""
    written_s: float | None = None

    def allow(self, now: float, window_s: float) -> tuple[WriteAllowance, StatusWriteThrottle]:
        """What the present pass may write, and the next state; `window_s` is how far the signals look back."""
        observed_s = abs(now - self.began_s)
        if self.resumed and observed_s < WRITE_EVERY_S:
            return WriteAllowance(due=False, complete=False, resuming=True), self
        due = self.written_s is None or abs(now - self.written_s) >= WRITE_EVERY_S
        allowance = WriteAllowance(due=due, complete=not self.resumed or observed_s >= window_s)
        return allowance, replace(self, written_s=now) if due else self


def throttled(before: float | None, now: float | None, allowance: WriteAllowance) -> float | None:
    """The figure to write: the previous one, unless it is time for a new one and that differs by more than a tenth."""
    if not allowance.due or (now is None and not allowance.complete):
        return before
    if before is None or now is None:
        return now
    return now if abs(now - before) > _SMALL * max(abs(now), abs(before)) else before


def rounded(value: float | None) -> float | None:
    """Three significant digits."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.3g}")


def signals_status(
    service: tuple[str, str],
    load: Load | None,
    policy: ScalePolicy,
    capacity_per_s: float | None,
    before: Sequence[SignalStatus],
    allowance: WriteAllowance,
) -> list[SignalStatus]:
    """What is scaled on, per ready replica. Thresholds and queries are always current, values are throttled."""
    slots, target = (policy.for_load(load) if load else policy).max_num_seqs, TARGET_UTILIZATION
    queries = service_queries(*service, policy.window_s, counts_batch=policy.batch == "scale")
    values = _per_replica(policy.counted(load), slots) if load else {}
    past = {signal.name: signal.value for signal in before}
    signals = []
    for name, threshold, unit in (
        ("queue", policy.queue_depth, "waiting requests per replica"),
        ("utilization", target, f"share of {slots} slots"),
        ("kvCache", target, "share of the KV blocks"),
        ("arrivals", None if capacity_per_s is None else capacity_per_s * target, "requests per second per replica"),
        ("ttftP99", policy.ttft_p99_s, "seconds"),
    ):
        value = rounded(values.get(name))
        if name in past:
            value = throttled(past[name], value, allowance)
        signals.append(SignalStatus(name=name, value=value, target=rounded(threshold), unit=unit, query=queries[name]))
    return signals


def _per_replica(load: Load, slots: int) -> dict[str, float | None]:
    pods = len(load.pods)
    return {
        "queue": load.waiting / pods,
        "utilization": load.running / pods / slots,
        "kvCache": sum(pod.kv_usage for pod in load.pods) / pods,
        "arrivals": None if load.arrivals_per_s is None else load.arrivals_per_s / pods,
        "ttftP99": load.ttft_p99_s,
    }


def demand_status(
    before: DemandStatus | None, forecast: Forecast | None, allowance: WriteAllowance
) -> DemandStatus | None:
    """What arrives, each figure throttled. A burst is written at once."""
    if forecast is None:
        return before if not allowance.complete else None
    capacity = forecast.capacity
    past = before.model_dump() if before else {}
    figures: dict[str, float | None] = {
        "requests_per_second": forecast.demand.requests,
        "prompt_tokens_per_second": forecast.demand.prompt_tokens,
        "output_tokens_per_second": forecast.demand.output_tokens,
        "replica_requests_per_second": capacity.serves.requests if capacity else None,
        "replica_tokens_per_second": capacity.serves.tokens if capacity else None,
        "load": forecast.level,
        "predicted_load": forecast.predicted,
        "horizon_seconds": math.ceil(forecast.horizon_s),
    }
    written = {name: throttled(past.get(name), rounded(value), allowance) for name, value in figures.items()}
    if any(written[name] is None for name in ("load", "horizon_seconds")):
        return before  # not yet time to write the first figures
    return DemandStatus.model_validate(
        {**written, "source": capacity.source if capacity else None, "burst": forecast.is_burst}
    )


def gpu_hours_status(
    before: GpuHoursStatus | None, spent: GpuHours | None, most: float | None
) -> GpuHoursStatus | None:
    """Rewritten at every hundredth of what the day allows."""
    if spent is None or most is None:
        return None
    if before is not None and before.day == spent.day and abs(spent.hours - before.hours) < most / 100:
        return before
    return GpuHoursStatus(day=spent.day, hours=round(spent.hours, 2), counted_at=rfc3339(spent.counted_s))


def capacity_status(
    before: CapacityStatus | None, capacity: Timed | None, correction: float = 1.0
) -> CapacityStatus | None:
    """What one replica finishes, rewritten only where it changed or where the old figure would soon be too old."""
    if capacity is None:
        return None
    when, per_s = capacity
    if before is not None:
        near = abs(before.requests_per_second - per_s) <= _SMALL * per_s
        near = near and abs(before.correction - correction) <= _SMALL * correction
        if near and when - epoch(before.measured_at) < CAPACITY_KEEP_S / 2:
            return before
    return CapacityStatus(
        requests_per_second=float(f"{per_s:.3g}"), measured_at=rfc3339(when), correction=float(f"{correction:.3g}")
    )


def log_decision(log: Sequence[DecisionStatus], decision: Decision, now: float) -> list[DecisionStatus]:
    """Newest first. A decision is logged where it changes the replicas, or begins or ends a wait for fewer or more."""
    newest = log[0] if log else None
    if newest and newest.replicas == decision.replicas and _direction(newest) == _direction(decision):
        return list(log)
    entry = DecisionStatus(
        time=rfc3339(now),
        wanted=decision.wanted,
        replicas=decision.replicas,
        load=rounded(decision.forecast.level) if decision.forecast else None,
        reasons=list(decision.reasons[:_REASONS]),
    )
    return [entry, *log][:MAX_DECISIONS]


def _direction(decision: Decision | DecisionStatus) -> int:
    return (decision.wanted > decision.replicas) - (decision.wanted < decision.replicas)
