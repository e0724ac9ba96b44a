"""ReplicaSets: creates missing pods and deletes surplus ones, those that serve least first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from llmservice_local.client import PODS, REPLICA_SETS
from llmservice_local.control.controller import Controller
from llmservice_local.errors import ApiError
from llmservice_local.objects import (
    Object,
    condition_of,
    controller_reference,
    has_ended,
    is_ready,
    owned_by,
    seconds_since,
    timestamp,
    with_condition,
)

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
_REFUSED = frozenset({403, 422})
_REFUSED_RETRY_S = 2.0
"""No watched object changes when a quota is raised, so a refused creation is retried."""
_PHASES = {"Pending": 0, "Unknown": 1, "Running": 2}


class ReplicaSetController(Controller):
    name = "replicaset-controller"
    watches = (REPLICA_SETS, PODS)

    async def reconcile(self) -> float | None:
        waits = [await self._reconcile_one(replica_set) for replica_set in self.informer(REPLICA_SETS)]
        return min((wait for wait in waits if wait is not None), default=None)

    async def _reconcile_one(self, replica_set: Object) -> float | None:
        active = [pod for pod in await self.claim(PODS, replica_set) if is_active(pod)]
        refused = ""
        if "deletionTimestamp" not in replica_set["metadata"]:
            missing = replica_set["spec"]["replicas"] - len(active)
            refused = await self._create_missing(replica_set, missing)
            for pod in pods_to_delete(active, -missing):
                await self._delete(replica_set, pod)
        active = [pod for pod in self.informer(PODS) if is_active(pod) and owned_by(pod, replica_set)]
        now = datetime.now(UTC)
        status, again_s = replica_set_status(replica_set, active, now, refused)
        if status != replica_set.get("status"):
            stored = await self.client.merge(REPLICA_SETS, replica_set, {"status": status}, subresource="status")
            self.informer(REPLICA_SETS).observe(stored)
        return _REFUSED_RETRY_S if refused else again_s

    async def _create_missing(self, replica_set: Object, missing: int) -> str:
        """Create pods until one is refused; returns the API server's message then (a quota, an admission policy)."""
        for _ in range(missing):
            try:
                await self._create(replica_set)
            except ApiError as error:
                if error.code not in _REFUSED:
                    raise
                await self.recorder.post(replica_set, "Warning", "FailedCreate", f"Error creating: {error}")
                return str(error)
        return ""

    async def _create(self, replica_set: Object) -> None:
        template, metadata = replica_set["spec"]["template"], replica_set["metadata"]
        pod: Object = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                **template["metadata"],
                "generateName": f"{metadata['name']}-",
                "namespace": metadata["namespace"],
                "ownerReferences": [controller_reference(replica_set)],
            },
            "spec": template["spec"],
        }
        created = await self.client.create(PODS, metadata["namespace"], pod)
        self.informer(PODS).observe(created)
        name = created["metadata"]["name"]
        await self.recorder.post(replica_set, "Normal", "SuccessfulCreate", f"Created pod: {name}")

    async def _delete(self, replica_set: Object, pod: Object) -> None:
        deleted = await self.client.delete(PODS, pod)
        if deleted is not None:
            self.informer(PODS).observe(deleted)
        name = pod["metadata"]["name"]
        await self.recorder.post(replica_set, "Normal", "SuccessfulDelete", f"Deleted pod: {name}")


def is_active(pod: Object) -> bool:
    """Whether a pod counts as a replica: it has not ended and is not being deleted."""
    return not has_ended(pod) and "deletionTimestamp" not in pod["metadata"]


def pods_to_delete(pods: Iterable[Object], count: int) -> list[Object]:
    """The `count` pods to delete first.

    The order is upstream's (controller_utils.go, ActivePodsWithRanks): not scheduled, then not running, then not ready,
    then the lower deletion cost, then the more recently ready, then more restarts, then the younger.
    """
    return sorted(pods, key=_rank)[: max(0, count)]


def replica_set_status(
    replica_set: Object, active: Sequence[Object], now: datetime, refused: str = ""
) -> tuple[Object, float | None]:
    """The counts, and in how many seconds `minReadySeconds` makes the next pod available.

    `refused` is the API server's message when it refused to create a pod; it becomes the condition ReplicaFailure.
    """
    least_s = replica_set["spec"].get("minReadySeconds", 0)
    ready = [pod for pod in active if is_ready(pod)]
    ages = [seconds_since(condition_of(pod, "Ready")["lastTransitionTime"], now) for pod in ready]
    available = sum(age >= least_s for age in ages)
    counts = {
        "replicas": len(active),
        "fullyLabeledReplicas": len(active),
        "readyReplicas": len(ready),
        "availableReplicas": available,
    }
    status: Object = {name: count for name, count in counts.items() if count or name == "replicas"}
    status["observedGeneration"] = replica_set["metadata"]["generation"]
    if refused:
        failure = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": refused}
        status |= {"conditions": with_condition(replica_set.get("status") or {}, failure, timestamp(now))["conditions"]}
    status |= {name: None for name in replica_set.get("status") or {} if name not in status}
    return status, min((least_s - age for age in ages if age < least_s), default=None)


def _rank(pod: Object) -> tuple[Any, ...]:
    status, metadata = pod.get("status") or {}, pod["metadata"]
    ready = condition_of(pod, "Ready")
    since = ready.get("lastTransitionTime", "") if is_ready(pod) else ""
    restarts = sum(container.get("restartCount", 0) for container in status.get("containerStatuses") or [])
    return (
        bool(pod["spec"].get("nodeName")),
        _PHASES.get(status.get("phase", "Pending"), 0),
        is_ready(pod),
        _cost(metadata),
        _reversed(since),
        -restarts,
        _reversed(metadata.get("creationTimestamp", "")),
    )


def _cost(metadata: Object) -> int:
    try:
        return int((metadata.get("annotations") or {}).get(DELETION_COST, 0))
    except ValueError:
        return 0


def _reversed(stamp: str) -> float:
    """A sort key that puts later times first."""
    return -datetime.fromisoformat(stamp).timestamp() if stamp else 0.0
