"""Deployments: one ReplicaSet per template, and a rollout that keeps within maxSurge and maxUnavailable.

Behaviour: https://kubernetes.io/docs/concepts/workloads/controllers/deployment/
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from llmservice_local.api.errors import ApiError
from llmservice_local.client import DEPLOYMENTS, REPLICA_SETS
from llmservice_local.control.condition import condition_of
from llmservice_local.control.controller import Controller, controller_reference, owned_by
from llmservice_local.control.deployment_status import deployment_status
from llmservice_local.control.rollout import ReplicaSetState, Scaling, plan_rollout, resolve

Object = dict[str, Any]

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
        owned = [rs for rs in self.informer(REPLICA_SETS) if owned_by(rs, deployment)]
        current = self._current(deployment, owned)
        if current is None and not deployment["spec"].get("paused"):
            current = await self._create(deployment, owned)
            owned.append(current)
        if current is not None:
            current = await self._raise_revision(deployment, current, owned)
            await self._scale(deployment, current, owned)
        owned = [rs for rs in self.informer(REPLICA_SETS) if owned_by(rs, deployment)]
        await self._forget_old(deployment, current, owned)
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
        """A template that is used again (a rollback) becomes the newest revision; the Deployment shows its number."""
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

    async def _forget_old(self, deployment: Object, current: Object | None, owned: Sequence[Object]) -> None:
        """Delete the oldest of the empty ReplicaSets beyond `revisionHistoryLimit`, once the rollout is through."""
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
            try:
                await self.client.delete(REPLICA_SETS, rs)
            except ApiError as error:
                if error.code != 404:
                    raise


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
