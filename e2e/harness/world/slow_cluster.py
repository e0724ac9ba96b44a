"""What a cluster's controllers and its node do: pods for Deployments, and no children without owners.

Controllers are done at once, and pods start slowly: so every watcher sees the same steps, however late it looks.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from typing import Any

from aiohttp import web

from llmservice_local.api.registry import MERGE_PATCH, DeleteOptions, Registry, WriteOptions
from llmservice_local.kinds.catalogue import Kind
from llmservice_operator.api.kinds import CHILD_KINDS
from llmservice_operator.api.labels import DELETION_COST
from llmservice_operator.api.resource import GROUP, PLURAL, VERSION

Object = dict[str, Any]
_AS = WriteOptions(manager="controllers")
_NOW = DeleteOptions(grace_period_s=0)
COLLECTED_AFTER_S = 80.0
"""So long do children outlive their owner: it may be created anew meanwhile."""


STARTED_AFTER_S = 80.0
"""So long does a pod take until it is ready."""


class SlowCluster:
    """Pods are there as soon as they are wanted, and say at /metrics what `load` has for their address."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.load: dict[str, tuple[int, int]] = {}
        """Requests running and waiting, by the pod's address."""
        self._timers: list[asyncio.TimerHandle] = []

    async def run(self) -> None:
        """Follow what happens in the store, for ever."""
        loop = asyncio.get_running_loop()
        store = self._registry.store
        try:
            async with store.changes(store.revision) as changes:
                while True:
                    change = await changes.get()
                    if change.collection in {("apps", "deployments"), ("", "pods")}:
                        self._roll()
                    if change.after is None and change.collection == (GROUP, PLURAL):
                        self._timers.append(loop.call_later(COLLECTED_AFTER_S, self._collect))
        finally:
            for timer in self._timers:
                timer.cancel()

    async def metrics(self, request: web.Request) -> web.Response:
        running, waiting = self.load.get(request.url.host or "", (0, 0))
        lines = [f"llmservice_num_requests_running {running}", f"llmservice_num_requests_waiting {waiting}"]
        return web.Response(text="\n".join([*lines, 'llmservice_kv_cache_blocks{state="free"} 1000', ""]))

    def _kind(self, group: str, version: str, plural: str) -> Kind:
        return self._registry.kinds.find(group, version, plural)

    def _roll(self) -> None:
        deployments = self._kind("apps", "v1", "deployments")
        for deployment in list(self._registry.select(deployments, None)):
            pods = self._scale(deployment)
            ready = sum("podIP" in pod["status"] for pod in pods)
            status = {"replicas": len(pods), "updatedReplicas": len(pods)}
            status |= {"readyReplicas": ready, "availableReplicas": ready}
            status["observedGeneration"] = deployment["metadata"]["generation"]
            self._tell(deployments, deployment, status)

    def _scale(self, deployment: Object) -> list[Object]:
        """Pods of the present template in the lowest free places; the cheapest to delete go first."""
        kind, namespace = self._kind("", "v1", "pods"), deployment["metadata"]["namespace"]
        template, uid = deployment["spec"]["template"], deployment["metadata"]["uid"]
        prefix = f"{deployment['metadata']['name']}-{_digest(template)}-"
        pods = {}
        for pod in list(self._registry.select(kind, namespace)):
            if pod["metadata"]["ownerReferences"][0]["uid"] != uid:
                continue
            if pod["metadata"]["name"].startswith(prefix):
                pods[int(pod["metadata"]["name"].removeprefix(prefix))] = pod
            else:
                self._registry.delete(kind, namespace, pod["metadata"]["name"], _NOW)
        surplus = sorted(pods, key=lambda place: (_cost(pods[place]), -place))
        for place in surplus[: max(0, len(pods) - deployment["spec"]["replicas"])]:
            self._registry.delete(kind, namespace, pods.pop(place)["metadata"]["name"], _NOW)
        for place in [place for place in range(deployment["spec"]["replicas"]) if place not in pods]:
            if len(pods) < deployment["spec"]["replicas"]:
                pods[place] = self._start(kind, deployment, f"{prefix}{place}", f"127.0.0.{place + 1}")
        return list(pods.values())

    def _start(self, kind: Kind, deployment: Object, name: str, address: str) -> Object:
        template, metadata = deployment["spec"]["template"], deployment["metadata"]
        owner = {"apiVersion": "apps/v1", "kind": "Deployment", "name": metadata["name"], "uid": metadata["uid"]}
        pod = {"metadata": {**template["metadata"], "name": name, "ownerReferences": [owner]}, "spec": template["spec"]}
        created = self._registry.create(kind, metadata["namespace"], pod, _AS).obj
        loop = asyncio.get_running_loop()
        self._timers.append(loop.call_later(STARTED_AFTER_S, self._make_ready, kind, created, address))
        return created

    def _make_ready(self, kind: Kind, pod: Object, address: str) -> None:
        found = self._registry.select(kind, pod["metadata"]["namespace"])
        if any(one["metadata"]["uid"] == pod["metadata"]["uid"] for one in found):
            ready = {"type": "Ready", "status": "True", "lastTransitionTime": self._registry.now()}
            self._tell(kind, pod, {"phase": "Running", "podIP": address, "conditions": [ready]})

    def _tell(self, kind: Kind, obj: Object, status: Object) -> None:
        if status.items() <= (obj.get("status") or {}).items():
            return
        metadata = obj["metadata"]
        body = {"status": status}
        self._registry.patch(kind, metadata["namespace"], metadata["name"], body, MERGE_PATCH, _AS, "status")

    def _collect(self) -> None:
        """First the children of services that are gone, then the pods of Deployments that are."""
        alive = {one["metadata"]["uid"] for one in self._registry.select(self._kind(GROUP, VERSION, PLURAL), None)}
        for child in (kind for kind in CHILD_KINDS.values() if kind.built_in):
            self._collect_of(self._kind(child.group, child.version, child.plural), alive)
        deployments = self._registry.select(self._kind("apps", "v1", "deployments"), None)
        self._collect_of(self._kind("", "v1", "pods"), {one["metadata"]["uid"] for one in deployments})

    def _collect_of(self, kind: Kind, alive: set[str]) -> None:
        for obj in list(self._registry.select(kind, None)):
            owners = obj["metadata"].get("ownerReferences") or []
            if owners and not alive & {owner["uid"] for owner in owners}:
                self._registry.delete(kind, obj["metadata"]["namespace"], obj["metadata"]["name"], _NOW)


def _digest(template: Object) -> str:
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:8]


def _cost(pod: Object) -> int:
    return int((pod["metadata"].get("annotations") or {}).get(DELETION_COST, "0"))
