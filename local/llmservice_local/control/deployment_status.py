"""What a Deployment's status says: counts, and the Available and Progressing conditions, as a pure function."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from llmservice_local.control.condition import condition_of
from llmservice_local.control.controller import seconds_since, timestamp
from llmservice_local.control.rollout import resolve

Object = dict[str, Any]


def deployment_status(
    deployment: Object, current: Object | None, owned: Sequence[Object], now: datetime
) -> tuple[Object, float | None]:
    """The status, and in how many seconds the progress deadline has to be looked at again (None: not needed)."""
    spec = deployment["spec"]
    counts = {name: _sum(owned, name) for name in ("replicas", "readyReplicas", "availableReplicas")}
    updated = _sum([current], "replicas") if current is not None else 0
    status: Object = {"observedGeneration": deployment["metadata"]["generation"]}
    status |= {name: value for name, value in counts.items() if value}
    if updated:
        status["updatedReplicas"] = updated
    if missing := max(0, spec["replicas"] - counts["availableReplicas"]):
        status["unavailableReplicas"] = missing
    progressing, again_s = _progressing(deployment, current, status, now)
    status["conditions"] = [_available(deployment, counts["availableReplicas"], now), progressing]
    if failure := _replica_failure(current, owned):
        message = failure.get("message", "")
        status["conditions"].append(_condition(deployment, "ReplicaFailure", "True", failure["reason"], message, now))
    return status | _removed(deployment, status), again_s


def _sum(replica_sets: Sequence[Object], name: str) -> int:
    return sum((rs.get("status") or {}).get(name, 0) for rs in replica_sets)


def _removed(deployment: Object, status: Object) -> Object:
    """Nulls for the counts that have become zero: in a merge patch, leaving them out would keep them."""
    return {name: None for name in deployment.get("status") or {} if name not in status}


def _available(deployment: Object, available: int, now: datetime) -> Object:
    spec = deployment["spec"]
    rolling = spec["strategy"].get("rollingUpdate") or {}
    _, unavailable = resolve(rolling.get("maxSurge", 0), rolling.get("maxUnavailable", 0), spec["replicas"])
    if spec["strategy"]["type"] == "Recreate":
        unavailable = 0
    if available >= spec["replicas"] - unavailable:
        return _condition(
            deployment, "Available", "True", "MinimumReplicasAvailable", "Deployment has minimum availability.", now
        )
    message = "Deployment does not have minimum availability."
    return _condition(deployment, "Available", "False", "MinimumReplicasUnavailable", message, now)


def _progressing(
    deployment: Object, current: Object | None, status: Object, now: datetime
) -> tuple[Object, float | None]:
    spec, before = deployment["spec"], condition_of(deployment, "Progressing")
    if spec.get("paused") or current is None:
        message = "Deployment is paused"
        return _condition(deployment, "Progressing", "Unknown", "DeploymentPaused", message, now), None
    name = current["metadata"]["name"]
    wanted = spec["replicas"]
    if all(
        status.get(count, 0) == wanted for count in ("updatedReplicas", "replicas", "availableReplicas")
    ) and status["observedGeneration"] == deployment["metadata"]["generation"]:  # fmt: skip
        message = f'ReplicaSet "{name}" has successfully progressed.'
        return _condition(deployment, "Progressing", "True", "NewReplicaSetAvailable", message, now), None
    counts = ("replicas", "updatedReplicas", "readyReplicas", "availableReplicas")
    old = deployment.get("status") or {}
    moved = not before or any(status.get(count, 0) != old.get(count, 0) for count in counts)
    moved = moved or old.get("observedGeneration") != status["observedGeneration"]
    since = timestamp(now) if moved else before["lastUpdateTime"]
    left_s = spec.get("progressDeadlineSeconds", 600) - seconds_since(since, now)
    if left_s <= 0:
        message = f'ReplicaSet "{name}" has timed out progressing.'
        found = _condition(deployment, "Progressing", "False", "ProgressDeadlineExceeded", message, now)
        return {**found, "lastUpdateTime": since}, None
    message = f'ReplicaSet "{name}" is progressing.'
    found = _condition(deployment, "Progressing", "True", "ReplicaSetUpdated", message, now)
    return {**found, "lastUpdateTime": since}, left_s


def _replica_failure(current: Object | None, owned: Sequence[Object]) -> Object | None:
    """The newest ReplicaSet's failure, else any other's (upstream: deployment_util.go, getReplicaFailures)."""
    failures = (condition_of(rs, "ReplicaFailure") for rs in ([current] if current is not None else []) + list(owned))
    return next((failure for failure in failures if failure.get("status") == "True"), None)


def _condition(deployment: Object, kind: str, value: str, reason: str, message: str, now: datetime) -> Object:
    before = condition_of(deployment, kind)
    condition = {"type": kind, "status": value, "reason": reason, "message": message}
    stamp = timestamp(now)
    same = all(before.get(field) == condition[field] for field in ("status", "reason", "message"))
    return {
        **condition,
        "lastUpdateTime": before["lastUpdateTime"] if same else stamp,
        "lastTransitionTime": before["lastTransitionTime"] if before.get("status") == value else stamp,
    }
