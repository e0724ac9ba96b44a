"""Disruption budgets: keeps in each one's status how many of its pods may go, for the API server to honour."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from llmservice_local.api.selector import matches_labels
from llmservice_local.client import DEPLOYMENTS, DISRUPTION_BUDGETS, PODS, REPLICA_SETS
from llmservice_local.control.controller import Controller, controller_of
from llmservice_local.control.disruption import EVICTION_TIMEOUT, budget_status

Object = dict[str, Any]


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
                # Locked: an eviction may have been granted since the budget was read, and must not be forgotten.
                gone = dict.fromkeys(known.get("disruptedPods") or {})
                patch = {"status": {**status, "disruptedPods": {**gone, **(status["disruptedPods"] or {})} or None}}
                stored = await self.client.merge(DISRUPTION_BUDGETS, budget, patch, subresource="status", locked=True)
                self.informer(DISRUPTION_BUDGETS).observe(stored)
        return EVICTION_TIMEOUT.total_seconds() if waiting else None

    def _scale(self, pods: Iterable[Object]) -> int:
        """The replicas that the pods' workloads are asked for; a pod that nobody controls counts for itself."""
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
    """Pods in the budget's namespace that its selector chooses and that have not ended."""
    ended = (pod.get("status") or {}).get("phase") in {"Succeeded", "Failed"}
    same = pod["metadata"]["namespace"] == budget["metadata"]["namespace"]
    selector = budget["spec"].get("selector") or {}
    return same and not ended and matches_labels(selector, pod["metadata"].get("labels") or {})
