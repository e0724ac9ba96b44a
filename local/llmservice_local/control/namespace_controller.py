"""Namespaces on their way out: their content is deleted first, then their finalizer goes."""

from __future__ import annotations

from typing import Any

from llmservice_local.client import NAMESPACES, Resource, served_resources
from llmservice_local.control.controller import Controller

Object = dict[str, Any]
_POLL_S = 0.5


class NamespaceController(Controller):
    name = "namespace-controller"
    watches = (NAMESPACES,)

    async def reconcile(self) -> float | None:
        leaving = [namespace for namespace in self.informer(NAMESPACES) if "deletionTimestamp" in namespace["metadata"]]
        for namespace in leaving:
            name = namespace["metadata"]["name"]
            if await self._empty(name):
                await self._finalize(namespace)
        return _POLL_S if leaving else None

    async def _empty(self, namespace: str) -> bool:
        """Delete what is left; returns whether nothing was."""
        left = 0
        for resource in await self._namespaced():
            for obj in (await self.client.list(resource, namespace))["items"]:
                left += 1
                if "deletionTimestamp" not in obj["metadata"]:
                    await self.client.delete(resource, obj)
        return left == 0

    async def _namespaced(self) -> list[Resource]:
        return [
            Resource(version, resource["name"])
            for version, resource in await served_resources(self.client)
            if resource["namespaced"] and {"list", "delete"} <= set(resource["verbs"])
        ]

    async def _finalize(self, namespace: Object) -> None:
        finalizers = [name for name in namespace["spec"].get("finalizers") or [] if name != "kubernetes"]
        body = {**namespace, "spec": {**namespace["spec"], "finalizers": finalizers}}
        await self.client.request("PUT", NAMESPACES.path(None, namespace["metadata"]["name"], "finalize"), body)
