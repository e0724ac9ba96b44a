"""How many pods of a disruption budget may go: a pure function of the budget, its pods and their workloads.

The rules are upstream's (k8s.io/kubernetes/pkg/controller/disruption/disruption.go).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from llmservice_local.control.condition import condition_of, with_condition

Object = dict[str, Any]

EVICTION_TIMEOUT = timedelta(minutes=2)
"""A pod whose eviction was granted, and that is still there after this time, is taken to stay."""


def budget_status(budget: Object, pods: Sequence[Object], expected: int, now: datetime) -> Object:
    """The status of a budget over its pods; `expected` is the scale of the workloads that control them."""
    disrupted = _still_going(budget, pods, now)
    healthy = [
        pod
        for pod in pods
        if condition_of(pod, "Ready").get("status") == "True"
        and "deletionTimestamp" not in pod["metadata"]
        and pod["metadata"]["name"] not in disrupted
    ]
    desired = _desired(budget["spec"], expected)
    allowed = max(0, len(healthy) - desired) if expected else 0
    status: Object = {
        "observedGeneration": budget["metadata"]["generation"],
        "expectedPods": expected,
        "currentHealthy": len(healthy),
        "desiredHealthy": desired,
        "disruptionsAllowed": allowed,
        "disruptedPods": disrupted or None,
    }
    sufficient = {
        "type": "DisruptionAllowed",
        "status": "True" if allowed else "False",
        "reason": "SufficientPods" if allowed else "InsufficientPods",
        "message": "",
        "observedGeneration": budget["metadata"]["generation"],
    }
    conditions = (budget.get("status") or {}).get("conditions") or []
    stamp = now.strftime("%Y-%m-%dT%H:%M:%SZ")
    return {**status, **with_condition({"conditions": conditions}, sufficient, stamp)}


def _desired(spec: Mapping[str, Any], expected: int) -> int:
    """Pods that must stay healthy; shares are rounded up, as upstream does, for both bounds."""
    if (unavailable := spec.get("maxUnavailable")) is not None:
        return max(0, expected - _count(unavailable, expected))
    return _count(spec.get("minAvailable", 1), expected)


def _count(bound: int | str, expected: int) -> int:
    return bound if isinstance(bound, int) else -(-int(bound.removesuffix("%")) * expected // 100)


def _still_going(budget: Object, pods: Sequence[Object], now: datetime) -> dict[str, str]:
    """Evictions that were granted and whose pods have not been marked as going so far."""
    known = (budget.get("status") or {}).get("disruptedPods") or {}
    there = {pod["metadata"]["name"] for pod in pods if "deletionTimestamp" not in pod["metadata"]}
    return {
        name: since
        for name, since in known.items()
        if name in there and now - datetime.fromisoformat(since) < EVICTION_TIMEOUT
    }
