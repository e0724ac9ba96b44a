"""The reconcile loop of every cluster controller, and the recorder of its Events."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from llmservice_local.client import EVENTS, KubeClient, Resource
from llmservice_local.control.informer import Informer, Informers
from llmservice_local.errors import ApiError
from llmservice_local.objects import Object, controller_of, controller_reference, owned_by, timestamp
from llmservice_local.selector import matches_labels

RETRY_S = 0.2
LONGEST_RETRY_S = 10.0
RESYNC_S = 30.0
GATHER_S = 0.02  # one pass for a burst of changes
_LOG = logging.getLogger(__name__)


class Controller(ABC):
    """Reconciles all objects whenever a watched collection changes; the cluster is small enough for full passes."""

    name: str
    watches: tuple[Resource, ...]

    def __init__(self, client: KubeClient, informers: Informers) -> None:
        self.client = client
        self.informers = informers
        self.recorder = Recorder(client, self.name)
        self._wake = asyncio.Event()

    @abstractmethod
    async def reconcile(self) -> float | None:
        """Reconcile all objects; returns the seconds until the next pass without changes, None for `RESYNC_S`."""

    def informer(self, resource: Resource) -> Informer:
        return self.informers[resource]

    async def claim(self, resource: Resource, owner: Object) -> list[Object]:
        """The objects that an owner controls, as upstream's ControllerRefManager finds them.

        What its selector matches is adopted where it has no controller; what it no longer matches is released.
        """
        if "deletionTimestamp" in owner["metadata"]:
            return [obj for obj in self.informer(resource) if owned_by(obj, owner)]
        claimed = []
        for obj in self.informer(resource):
            metadata = obj["metadata"]
            matches = metadata["namespace"] == owner["metadata"]["namespace"] and matches_labels(
                owner["spec"]["selector"], metadata.get("labels") or {}
            )
            is_owned = owned_by(obj, owner)
            references = metadata.get("ownerReferences") or []
            if is_owned and not matches:
                left = [reference for reference in references if reference["uid"] != owner["metadata"]["uid"]]
                await self._set_owners(resource, obj, left)
            elif is_owned:
                claimed.append(obj)
            elif matches and controller_of(obj) is None and "deletionTimestamp" not in metadata:
                claimed.append(await self._set_owners(resource, obj, [*references, controller_reference(owner)]))
        return claimed

    async def _set_owners(self, resource: Resource, obj: Object, references: list[Object]) -> Object:
        patch: Object = {"metadata": {"ownerReferences": references or None}}
        stored = await self.client.merge(resource, obj, patch, locked=True)
        self.informer(resource).observe(stored)
        return stored

    async def run(self) -> None:
        """Run until cancelled. After a failed request (a conflict, an unreachable server) the whole pass is retried."""
        for resource in self.watches:
            informer = self.informer(resource)
            informer.listeners.append(self._wake.set)
            await informer.synced.wait()
        refusals = 0
        while True:
            self._wake.clear()
            try:
                again_s = await self.reconcile()
                refusals = 0
            except ApiError as error:
                level = logging.DEBUG if error.code in {404, 409} else logging.WARNING
                _LOG.log(level, "%s: %s", self.name, error)
                again_s = min(LONGEST_RETRY_S, RETRY_S * 2**refusals)
                refusals += 1
            try:
                async with asyncio.timeout(RESYNC_S if again_s is None else again_s):
                    await self._wake.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(GATHER_S)


class Recorder:
    """Posts Events of one component; repetitions increase the count of the first. A failure is only logged."""

    def __init__(self, client: KubeClient, component: str, host: str = "") -> None:
        self._client = client
        self._source = {"component": component} | ({"host": host} if host else {})
        self._posted: dict[tuple[str, str, str], Object] = {}

    async def post(self, about: Mapping[str, Any], kind: str, reason: str, message: str) -> None:
        """Post an Event of `kind` Normal or Warning about an object."""
        metadata = about["metadata"]
        key = (metadata["uid"], reason, message)
        now = timestamp()
        try:
            if (known := self._posted.get(key)) is not None:
                patch = {"count": known["count"] + 1, "lastTimestamp": now}
                self._posted[key] = await self._client.merge(EVENTS, known, patch)
                return
            namespace = metadata.get("namespace") or "default"
            event = {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {"name": f"{metadata['name']}.{time.time_ns():x}", "namespace": namespace},
                "involvedObject": {
                    "apiVersion": about.get("apiVersion"),
                    "kind": about.get("kind"),
                    "name": metadata["name"],
                    "namespace": metadata.get("namespace"),
                    "uid": metadata["uid"],
                },
                "type": kind,
                "reason": reason,
                "message": message,
                "source": self._source,
                "reportingComponent": self._source["component"],
                "count": 1,
                "firstTimestamp": now,
                "lastTimestamp": now,
            }
            self._posted[key] = await self._client.create(EVENTS, namespace, event)
        except ApiError as error:
            self._posted.pop(key, None)
            _LOG.debug("event %s about %s is lost: %s", reason, metadata["name"], error)
