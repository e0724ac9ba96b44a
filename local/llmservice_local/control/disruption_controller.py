"""PodDisruptionBudgets: writes the allowed disruptions into their status, which the eviction API enforces.

The rules are those of k8s.io/kubernetes/pkg/controller/disruption/disruption.go.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from llmservice_local.client import DEPLOYMENTS, DISRUPTION_BUDGETS, PODS, REPLICA_SETS
from llmservice_local.control.controller import Controller
from llmservice_local.objects import Object, controller_of, has_ended, is_ready, timestamp, with_condition
from llmservice_local.selector import matches_labels


class DisruptionController(Controller):
    name = "disruption-controller"
    watches = (DISRUPTION_BUDGETS, PODS, REPLICA_SETS, DEPLOYMENTS)

    async def reconcile(self) -> float | None:
        now = datetime.now(UTC)
        waiting = False
        for budget in self.informer(DISRUPTION_BUDGETS):
            if "deletionTimestamp" in budget["metadata"]:
                continue
            pods = [pod for pod in self.informer(PODS) if _selects(budget, pod)]
            status = budget_status(budget, pods, self._scale(pods), now)
            waiting = waiting or bool(status["disruptedPods"])
            known = budget.get("status") or {}
            if any(known.get(field) != value for field, value in status.items()):
                # Locked, because an eviction may have been allowed since the budget was read.
                gone = dict.fromkeys(known.get("disruptedPods") or {})
                patch = {"status": {**status, "disruptedPods": {**gone, **(status["disruptedPods"] or {})} or None}}
                stored = await self.client.merge(DISRUPTION_BUDGETS, budget, patch, subresource="status", locked=True)
                self.informer(DISRUPTION_BUDGETS).observe(stored)
        return EVICTION_TIMEOUT.total_seconds() if waiting else None

    def _scale(self, pods: Iterable[Object]) -> int:
        """The sum of `spec.replicas` of the pods' workloads; a pod without a controller counts as one."""
        scales: dict[str, int] = {}
        for pod in pods:
            owner = controller_of(pod)
            uid, scale = self._workload(owner, pod["metadata"]["namespace"]) if owner else (pod["metadata"]["uid"], 1)
            scales[uid] = scale
        return sum(scales.values())

    def _workload(self, owner: Object, namespace: str) -> tuple[str, int]:
        replica_set = self.informer(REPLICA_SETS).get(namespace, owner["name"])
        if owner["kind"] != "ReplicaSet" or replica_set is None:
            return owner["uid"], 1
        above = controller_of(replica_set)
        deployment = self.informer(DEPLOYMENTS).get(namespace, above["name"]) if above else None
        workload = deployment or replica_set
        return workload["metadata"]["uid"], workload["spec"].get("replicas", 1)


def _selects(budget: Object, pod: Object) -> bool:
    """Whether a pod is in the budget's namespace, matches its selector and has not ended."""
    same = pod["metadata"]["namespace"] == budget["metadata"]["namespace"]
    selector = budget["spec"].get("selector") or {}
    return same and not has_ended(pod) and matches_labels(selector, pod["metadata"].get("labels") or {})


EVICTION_TIMEOUT = timedelta(minutes=2)
"""After this time, a pod whose eviction was allowed but that still exists counts as not disrupted."""


def budget_status(budget: Object, pods: Sequence[Object], expected: int, now: datetime) -> Object:
    """The status of a budget; `expected` is the number of replicas of the workloads that control its pods."""
    disrupted = _pending_evictions(budget, pods, now)
    healthy = [
        pod
        for pod in pods
        if is_ready(pod) and "deletionTimestamp" not in pod["metadata"] and pod["metadata"]["name"] not in disrupted
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
    stamp = timestamp(now)
    return {**status, **with_condition({"conditions": conditions}, sufficient, stamp)}


def _desired(spec: Mapping[str, Any], expected: int) -> int:
    """The number of pods that must stay healthy; percentages of both bounds are rounded up, as upstream."""
    if (unavailable := spec.get("maxUnavailable")) is not None:
        return max(0, expected - _count(unavailable, expected))
    return _count(spec.get("minAvailable", 1), expected)


def _count(bound: int | str, expected: int) -> int:
    return bound if isinstance(bound, int) else -(-int(bound.removesuffix("%")) * expected // 100)


def _pending_evictions(budget: Object, pods: Sequence[Object], now: datetime) -> dict[str, str]:
    """Allowed evictions whose pods are not marked as deleted yet."""
    known = (budget.get("status") or {}).get("disruptedPods") or {}
    there = {pod["metadata"]["name"] for pod in pods if "deletionTimestamp" not in pod["metadata"]}
    return {
        name: since
        for name, since in known.items()
        if name in there and now - datetime.fromisoformat(since) < EVICTION_TIMEOUT
    }
