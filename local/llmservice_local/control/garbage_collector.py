"""Cascading deletion: the dependents of deleted owners, and the contents of deleted namespaces.

Behaviour: https://kubernetes.io/docs/concepts/architecture/garbage-collection/
"""

from __future__ import annotations

from llmservice_local.client import DEFINITIONS, NAMESPACES, KubeClient, Resource, served_resources
from llmservice_local.control.controller import Controller
from llmservice_local.control.informer import Informers
from llmservice_local.errors import ApiError
from llmservice_local.objects import Object, condition_of

_UNOWNED = {"events", "nodes", "customresourcedefinitions", "leases", "namespaces"}
"""Collections that have no owners and change often, or have their own cleanup."""


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
        """Every collection whose objects can be owners or have one; listed again when a CRD is added or removed."""
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
        """Delete an object whose owners are all deleted, or wait for it in a foreground deletion."""
        references = obj["metadata"].get("ownerReferences") or []
        if not references or "deletionTimestamp" in obj["metadata"]:
            return
        present = [owners[reference["uid"]] for reference in references if reference["uid"] in owners]
        if not present:
            if await self._are_deleted(obj, references):
                await self.client.delete(resource, obj)
        elif all(_waits_for_dependents(owner) for owner in present):
            blocking = any(reference.get("blockOwnerDeletion") for reference in references)
            await self.client.delete(resource, obj, propagation="Foreground" if blocking else "Background")

    async def _are_deleted(self, obj: Object, references: list[Object]) -> bool:
        """Check with the API server: an owner may be too new for the informers, or of a kind without one."""
        for reference in references:
            resource = await self._resource_of(reference)
            if resource is None:
                continue  # its kind is no longer served, so it does not exist
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
        """Remove the `foregroundDeletion` and `orphan` finalizers once the dependents are deleted or orphaned."""
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


_POLL_S = 0.5


class NamespaceController(Controller):
    """Deletes the objects of a deleted namespace, then removes its finalizer."""

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
        """Delete the objects of a namespace; returns whether there were none."""
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
