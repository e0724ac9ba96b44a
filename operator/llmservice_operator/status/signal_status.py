"""`status.autoscaling.signals`: the figures beside their thresholds, noted so that live traffic writes seldom."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from llmservice_operator.api.status import CapacityStatus, SignalStatus
from llmservice_operator.pods.pod import epoch
from llmservice_operator.scaling.history import CAPACITY_KEEP_S
from llmservice_operator.scaling.lanes import counted
from llmservice_operator.scaling.scaling import TARGET_UTILIZATION, ScalePolicy
from llmservice_operator.signals.load import Load
from llmservice_operator.signals.service_queries import ServiceQueries
from llmservice_operator.status.conditions import rfc3339
from llmservice_operator.status.note_times import Noting

_NEWS = 0.1
"""A figure that moved by no more than this share is no news."""


def signals_of(
    load: Load | None, policy: ScalePolicy, drain_per_s: float | None, queries: ServiceQueries
) -> list[SignalStatus]:
    """What is scaled on, per ready replica. Thresholds and queries are there before any load is."""
    slots, target = policy.max_num_seqs, TARGET_UTILIZATION
    capacity = None if drain_per_s is None else drain_per_s * target
    now = _per_replica(counted(load, policy.batch, target, slots), slots) if load else {}
    return [
        _signal(now, "queue", policy.queue_depth, "waiting requests per replica", queries.waiting()),
        _signal(now, "utilization", target, f"share of {slots} slots", queries.utilization(slots)),
        _signal(now, "kvCache", target, "share of the KV blocks", queries.kv_cache()),
        _signal(now, "arrivals", capacity, "requests per second per replica", queries.arrivals()),
        _signal(now, "ttftP99", policy.ttft_p99_s, "seconds", queries.ttft_p99()),
    ]


def _per_replica(load: Load, slots: int) -> dict[str, float | None]:
    pods = len(load.pods)
    return {
        "queue": load.waiting / pods,
        "utilization": load.running / pods / slots,
        "kvCache": sum(pod.kv_usage for pod in load.pods) / pods,
        "arrivals": None if load.arrivals_per_s is None else load.arrivals_per_s / pods,
        "ttftP99": load.ttft_p99_s,
    }


def _signal(now: Mapping[str, float | None], name: str, target: float | None, unit: str, query: str) -> SignalStatus:
    return SignalStatus(name=name, value=rounded(now.get(name)), target=rounded(target), unit=unit, query=query)


def rounded(value: float | None) -> float | None:
    """Three significant digits: enough for people."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.3g}")


def noted(before: float | None, now: float | None, noting: Noting) -> float | None:
    """The figure to write: the one that stands already unless the new one is news, and it is time for news."""
    if not noting.due or (now is None and not noting.whole):
        return before
    if before is None or now is None:
        return now
    return now if abs(now - before) > _NEWS * max(abs(now), abs(before)) else before


def noted_signals(before: Sequence[SignalStatus], now: Sequence[SignalStatus], noting: Noting) -> list[SignalStatus]:
    """Thresholds and queries as they are now, values as `noted`."""
    past = {signal.name: signal for signal in before}
    return [
        signal.model_copy(update={"value": noted(past[signal.name].value, signal.value, noting)})
        if signal.name in past
        else signal
        for signal in now
    ]


def capacity_status(before: CapacityStatus | None, drain: tuple[float, float] | None) -> CapacityStatus | None:
    """What one replica finishes, rewritten only where it changed or where the old note would soon be too old."""
    if drain is None:
        return None
    when, per_s = drain
    if before is not None:
        near = abs(before.requests_per_second - per_s) <= _NEWS * per_s
        if near and when - epoch(before.measured_at) < CAPACITY_KEEP_S / 2:
            return before
    return CapacityStatus(requests_per_second=float(f"{per_s:.3g}"), measured_at=rfc3339(when))
