"""The scheduler: gives pods that have no node to one that they fit on, and says so where there is none."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from llmservice_local.client import CLAIMS, NODES, PODS
from llmservice_local.control.condition import condition_of, with_condition
from llmservice_local.control.controller import Controller, timestamp
from llmservice_local.control.scheduling import choose_node, claim_missing, claims_of

Object = dict[str, Any]


class Scheduler(Controller):
    name = "default-scheduler"
    watches = (PODS, NODES, CLAIMS)

    async def reconcile(self) -> float | None:
        pending = [
            pod
            for pod in self.informer(PODS)
            if not pod["spec"].get("nodeName")
            and "deletionTimestamp" not in pod["metadata"]
            and pod["spec"].get("schedulerName", "default-scheduler") == self.name
            and not pod["spec"].get("schedulingGates")
        ]
        pending.sort(key=lambda pod: (-pod["spec"].get("priority", 0), pod["metadata"]["creationTimestamp"]))
        for pod in pending:
            node, why = self._choose(pod)
            if node is None:
                await self._refuse(pod, why)
            else:
                await self._place(pod, node)
        return None

    def _choose(self, pod: Object) -> tuple[str | None, str]:
        """A node, or why there is none; a claim that is not there yet keeps a pod from every node."""
        namespace = pod["metadata"]["namespace"]
        for name in claims_of(pod):
            if self.informer(CLAIMS).get(namespace, name) is None:
                return None, f"0/{len(list(self.informer(NODES)))} nodes are available: {claim_missing(name)}"
        return choose_node(pod, self.informer(NODES), self.informer(PODS))

    async def _place(self, pod: Object, node: str) -> None:
        await self.client.bind(pod, node)
        metadata = pod["metadata"]
        self.informer(PODS).observe(await self.client.get(PODS, metadata["namespace"], metadata["name"]))
        message = f"Successfully assigned {metadata['namespace']}/{metadata['name']} to {node}"
        await self.recorder.post(pod, "Normal", "Scheduled", message)

    async def _refuse(self, pod: Object, why: str) -> None:
        known = condition_of(pod, "PodScheduled")
        if known.get("status") == "False" and known.get("message") == why:
            return
        refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": why}
        status = with_condition(pod.get("status") or {}, refused, timestamp(datetime.now(UTC)))
        patch: Object = {"status": {"conditions": status["conditions"]}}
        self.informer(PODS).observe(await self.client.merge(PODS, pod, patch, subresource="status"))
        await self.recorder.post(pod, "Warning", "FailedScheduling", why)
