"""Garbage collection: what an owner leaves behind goes with it, in the background, the foreground, or not at all.

Behaviour: https://kubernetes.io/docs/concepts/architecture/garbage-collection/
"""

from __future__ import annotations

from typing import Any

from llmservice_local.api.errors import ApiError
from llmservice_local.client import DEFINITIONS, KubeClient, Resource, served_resources
from llmservice_local.control.condition import condition_of
from llmservice_local.control.controller import Controller
from llmservice_local.control.informer import Informers

Object = dict[str, Any]

_UNOWNED = {"events", "nodes", "customresourcedefinitions", "leases", "namespaces"}
"""Collections without owners and full of changes, or with a cleanup of their own."""


class GarbageCollector(Controller):
    name = "garbage-collector"
    watches = (DEFINITIONS,)

    def __init__(self, client: KubeClient, informers: Informers) -> None:
        super().__init__(client, informers)
        self._served: set[tuple[str, str | None]] | None = None
        self._resources: list[Resource] = []

    async def reconcile(self) -> float | None:
        watched = await self._watched()
        owners = {obj["metadata"]["uid"]: obj for resource in watched for obj in self.informer(resource)}
        for resource in watched:
            for obj in self.informer(resource):
                await self._collect(resource, obj, owners)
        for resource in watched:
            for obj in self.informer(resource):
                await self._finish(resource, obj, watched)
        return None

    async def _watched(self) -> list[Resource]:
        """Every collection that can have owners or be one; looked up again whenever a definition comes or goes."""
        served = {
            (d["metadata"]["name"], condition_of(d, "Established").get("status")) for d in self.informer(DEFINITIONS)
        }
        if served != self._served:
            found = await self._discover()
            for resource in set(self._resources) - set(found):
                await self.informers.drop(resource)
            self._served, self._resources = served, found
            for resource in found:
                listeners = self.informer(resource).listeners
                if self._wake.set not in listeners:
                    listeners.append(self._wake.set)
        return [resource for resource in self._resources if self.informer(resource).synced.is_set()]

    async def _discover(self) -> list[Resource]:
        return [
            Resource(version, resource["name"], resource["namespaced"])
            for version, resource in await served_resources(self.client)
            if {"list", "watch", "delete"} <= set(resource["verbs"]) and resource["name"] not in _UNOWNED
        ]

    async def _collect(self, resource: Resource, obj: Object, owners: dict[str, Object]) -> None:
        """Delete an object whose owners are all gone, or going in the foreground and waiting for it."""
        references = obj["metadata"].get("ownerReferences") or []
        if not references or "deletionTimestamp" in obj["metadata"]:
            return
        present = [owners[reference["uid"]] for reference in references if reference["uid"] in owners]
        if not present:
            if await self._really_gone(obj, references):
                await self.client.delete(resource, obj)
        elif all(_waits_for_dependents(owner) for owner in present):
            blocking = any(reference.get("blockOwnerDeletion") for reference in references)
            await self.client.delete(resource, obj, propagation="Foreground" if blocking else "Background")

    async def _really_gone(self, obj: Object, references: list[Object]) -> bool:
        """Ask the server itself: an owner may be of a kind, or so new, that no informer has it yet."""
        for reference in references:
            resource = await self._resource_of(reference)
            if resource is None:
                continue  # its kind is not served any more, so it can't be there either
            try:
                owner = await self.client.get(resource, obj["metadata"].get("namespace"), reference["name"])
            except ApiError as error:
                if error.code != 404:
                    raise
            else:
                if owner["metadata"]["uid"] == reference["uid"]:
                    return False
        return True

    async def _resource_of(self, reference: Object) -> Resource | None:
        for version, resource in await served_resources(self.client):
            if version == reference["apiVersion"] and resource["kind"] == reference["kind"]:
                return Resource(version, resource["name"], resource["namespaced"])
        return None

    async def _finish(self, resource: Resource, obj: Object, watched: list[Resource]) -> None:
        """Take away the `foregroundDeletion` and `orphan` finalizers once what they wait for is done."""
        finalizers = obj["metadata"].get("finalizers") or []
        if "deletionTimestamp" not in obj["metadata"]:
            return
        uid = obj["metadata"]["uid"]
        dependents = [
            (kind, dependent)
            for kind in watched
            for dependent in self.informer(kind)
            for reference in dependent["metadata"].get("ownerReferences") or []
            if reference["uid"] == uid
        ]
        if "orphan" in finalizers:
            for kind, dependent in dependents:
                left = [ref for ref in dependent["metadata"]["ownerReferences"] if ref["uid"] != uid]
                patch: Object = {"metadata": {"ownerReferences": left or None}}
                self.informer(kind).observe(await self.client.merge(kind, dependent, patch, locked=True))
            await self._drop_finalizer(resource, obj, "orphan")
        elif "foregroundDeletion" in finalizers and not dependents:
            await self._drop_finalizer(resource, obj, "foregroundDeletion")

    async def _drop_finalizer(self, resource: Resource, obj: Object, finalizer: str) -> None:
        left = [name for name in obj["metadata"]["finalizers"] if name != finalizer]
        await self.client.merge(resource, obj, {"metadata": {"finalizers": left or None}}, locked=True)


def _waits_for_dependents(owner: Object) -> bool:
    metadata = owner["metadata"]
    return "deletionTimestamp" in metadata and "foregroundDeletion" in (metadata.get("finalizers") or [])
