"""Deployments: one ReplicaSet per template, and a rollout that keeps within maxSurge and maxUnavailable.

Behaviour: https://kubernetes.io/docs/concepts/workloads/controllers/deployment/
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime

from llmservice_local.client import DEPLOYMENTS, REPLICA_SETS
from llmservice_local.control.controller import Controller
from llmservice_local.control.rollout import ReplicaSetState, Scaling, plan_rollout, resolve
from llmservice_local.objects import Object, condition_of, controller_reference, owned_by, seconds_since, timestamp

REVISION = "deployment.kubernetes.io/revision"
HASH_LABEL = "pod-template-hash"
_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"


class DeploymentController(Controller):
    name = "deployment-controller"
    watches = (DEPLOYMENTS, REPLICA_SETS)

    async def reconcile(self) -> float | None:
        waits = [
            await self._reconcile_one(deployment)
            for deployment in self.informer(DEPLOYMENTS)
            if "deletionTimestamp" not in deployment["metadata"]
        ]
        return min((wait for wait in waits if wait is not None), default=None)

    async def _reconcile_one(self, deployment: Object) -> float | None:
        owned = await self.claim(REPLICA_SETS, deployment)
        current = self._current(deployment, owned)
        if current is None and not deployment["spec"].get("paused"):
            current = await self._create(deployment, owned)
            owned.append(current)
        if current is not None:
            current = await self._raise_revision(deployment, current, owned)
            await self._scale(deployment, current, owned)
        owned = [rs for rs in self.informer(REPLICA_SETS) if owned_by(rs, deployment)]
        await self._delete_old(deployment, current, owned)
        now = datetime.now(UTC)
        status, again_s = deployment_status(deployment, current, owned, now)
        if status != deployment.get("status"):
            stored = await self.client.merge(DEPLOYMENTS, deployment, {"status": status}, subresource="status")
            self.informer(DEPLOYMENTS).observe(stored)
        return again_s

    def _current(self, deployment: Object, owned: Sequence[Object]) -> Object | None:
        wanted = deployment["spec"]["template"]
        matching = [rs for rs in owned if _template(rs) == wanted]
        return min(matching, key=lambda rs: rs["metadata"]["creationTimestamp"], default=None)

    async def _create(self, deployment: Object, owned: Sequence[Object]) -> Object:
        template = deployment["spec"]["template"]
        digest = template_hash(template)
        labels = {**(template["metadata"].get("labels") or {}), HASH_LABEL: digest}
        selector = deployment["spec"]["selector"]
        metadata = deployment["metadata"]
        replica_set: Object = {
            "apiVersion": "apps/v1",
            "kind": "ReplicaSet",
            "metadata": {
                "name": f"{metadata['name']}-{digest}",
                "namespace": metadata["namespace"],
                "labels": labels,
                "annotations": {REVISION: str(_latest_revision(owned) + 1)},
                "ownerReferences": [controller_reference(deployment)],
            },
            "spec": {
                "replicas": 0,
                "minReadySeconds": deployment["spec"].get("minReadySeconds", 0),
                "selector": {**selector, "matchLabels": {**(selector.get("matchLabels") or {}), HASH_LABEL: digest}},
                "template": {**template, "metadata": {**template["metadata"], "labels": labels}},
            },
        }
        created = await self.client.create(REPLICA_SETS, metadata["namespace"], replica_set)
        self.informer(REPLICA_SETS).observe(created)
        return created

    async def _raise_revision(self, deployment: Object, current: Object, owned: Sequence[Object]) -> Object:
        """Make the current ReplicaSet the newest revision (after a rollback) and annotate the Deployment with it."""
        others = [rs for rs in owned if rs["metadata"]["uid"] != current["metadata"]["uid"]]
        if _revision(current) <= _latest_revision(others):
            annotation = {"metadata": {"annotations": {REVISION: str(_latest_revision(others) + 1)}}}
            current = await self.client.merge(REPLICA_SETS, current, annotation)
            self.informer(REPLICA_SETS).observe(current)
        shown = str(_revision(current))
        if (deployment["metadata"].get("annotations") or {}).get(REVISION) != shown:
            stored = await self.client.merge(DEPLOYMENTS, deployment, {"metadata": {"annotations": {REVISION: shown}}})
            self.informer(DEPLOYMENTS).observe(stored)
        return current

    async def _scale(self, deployment: Object, current: Object, owned: Sequence[Object]) -> None:
        spec = deployment["spec"]
        replicas = spec["replicas"]
        rolling = spec["strategy"].get("rollingUpdate") or {}
        surge, unavailable = resolve(rolling.get("maxSurge", "25%"), rolling.get("maxUnavailable", "25%"), replicas)
        scaling = Scaling(
            replicas=replicas,
            max_surge=surge,
            max_unavailable=unavailable,
            recreate=spec["strategy"]["type"] == "Recreate",
            paused=bool(spec.get("paused")),
        )
        by_name = {rs["metadata"]["name"]: rs for rs in owned}
        states = [_state(rs) for rs in sorted(owned, key=_revision)]
        wanted = plan_rollout(scaling, current["metadata"]["name"], states)
        for name, count in wanted.items():
            before = by_name[name]["spec"]["replicas"]
            if count == before:
                continue
            stored = await self.client.merge(REPLICA_SETS, by_name[name], {"spec": {"replicas": count}})
            self.informer(REPLICA_SETS).observe(stored)
            direction = "up" if count > before else "down"
            message = f"Scaled {direction} replica set {name} from {before} to {count}"
            await self.recorder.post(deployment, "Normal", "ScalingReplicaSet", message)

    async def _delete_old(self, deployment: Object, current: Object | None, owned: Sequence[Object]) -> None:
        """Delete the oldest of the empty ReplicaSets beyond `revisionHistoryLimit`, once the rollout is complete."""
        if current is None or condition_of(deployment, "Progressing").get("reason") != "NewReplicaSetAvailable":
            return
        empty = [
            rs
            for rs in sorted(owned, key=_revision)
            if rs["metadata"]["uid"] != current["metadata"]["uid"]
            and not rs["spec"]["replicas"]
            and not (rs.get("status") or {}).get("replicas")
            and "deletionTimestamp" not in rs["metadata"]
        ]
        surplus = len(empty) - deployment["spec"].get("revisionHistoryLimit", 10)
        for rs in empty[: max(0, surplus)]:
            await self.client.delete(REPLICA_SETS, rs)


def template_hash(template: Object) -> str:
    """The short hash that names a template's ReplicaSet and marks its pods."""
    digest = hashlib.sha256(json.dumps(template, sort_keys=True).encode()).digest()
    return "".join(_ALPHABET[byte % len(_ALPHABET)] for byte in digest[:10])


def _template(replica_set: Object) -> Object:
    """A ReplicaSet's template as its Deployment had it, without the hash label."""
    template = replica_set["spec"]["template"]
    labels = {key: value for key, value in template["metadata"]["labels"].items() if key != HASH_LABEL}
    return {**template, "metadata": {**template["metadata"], "labels": labels}}


def _revision(replica_set: Object) -> int:
    return int((replica_set["metadata"].get("annotations") or {}).get(REVISION, 0))


def _latest_revision(owned: Sequence[Object]) -> int:
    return max((_revision(rs) for rs in owned), default=0)


def _state(replica_set: Object) -> ReplicaSetState:
    status = replica_set.get("status") or {}
    return ReplicaSetState(
        name=replica_set["metadata"]["name"],
        wanted=replica_set["spec"]["replicas"],
        actual=status.get("replicas", 0),
        available=status.get("availableReplicas", 0),
    )


def deployment_status(
    deployment: Object, current: Object | None, owned: Sequence[Object], now: datetime
) -> tuple[Object, float | None]:
    """The status, and the seconds until the progress deadline must be checked again (None: not needed)."""
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
    """Nulls for the counts that have become zero: a merge patch keeps omitted fields."""
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
