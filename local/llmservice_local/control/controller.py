"""The loop of every cluster controller: wake on a change of what it watches, look at everything, set it right."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from datetime import UTC, datetime
from typing import Any

from llmservice_local.api.errors import ApiError
from llmservice_local.client import KubeClient, Resource
from llmservice_local.control.events import Recorder
from llmservice_local.control.informer import Informer, Informers

Object = dict[str, Any]
RETRY_S = 0.2
LONGEST_RETRY_S = 10.0
RESYNC_S = 30.0
GATHER_S = 0.02  # changes come in bursts: one pass for all of them
_LOG = logging.getLogger(__name__)


class Controller(ABC):
    """A full pass over a small cluster costs less than the bookkeeping of partial ones: passes are always full."""

    name: str
    watches: tuple[Resource, ...]

    def __init__(self, client: KubeClient, informers: Informers) -> None:
        self.client = client
        self.informers = informers
        self.recorder = Recorder(client, self.name)
        self._wake = asyncio.Event()

    @abstractmethod
    async def reconcile(self) -> float | None:
        """One pass; returns after how many seconds to look again even if nothing changes, None for the usual."""

    def informer(self, resource: Resource) -> Informer:
        return self.informers[resource]

    async def run(self) -> None:
        """Run until cancelled. A refused write (a conflict, an unreachable server) is tried again with fresh eyes."""
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


def controller_of(obj: Object) -> Object | None:
    """The owner reference that controls an object."""
    references = obj["metadata"].get("ownerReferences") or []
    return next((reference for reference in references if reference.get("controller")), None)


def owned_by(obj: Object, owner: Object) -> bool:
    reference = controller_of(obj)
    return reference is not None and reference["uid"] == owner["metadata"]["uid"]


def controller_reference(owner: Object) -> Object:
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def timestamp(moment: datetime | None = None) -> str:
    return (moment or datetime.now(UTC)).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds_since(stamp: str, now: datetime) -> float:
    return (now - datetime.fromisoformat(stamp.replace("Z", "+00:00"))).total_seconds()
