"""Cached collections, kept in sync by list and watch, as client-go's informers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from aiohttp import ClientError

from llmservice_local.client import KubeClient, Resource
from llmservice_local.errors import ApiError
from llmservice_local.objects import Object

RETRY_S = 0.5
_LOG = logging.getLogger(__name__)


class Informer:
    """One collection's objects by namespace and name; `listeners` are called after every change."""

    def __init__(self, client: KubeClient, resource: Resource) -> None:
        self.resource = resource
        self.synced = asyncio.Event()
        self.listeners: list[Callable[[], None]] = []
        self._client = client
        self._objects: dict[tuple[str, str], Object] = {}
        self._deleted: set[str] = set()

    def __iter__(self) -> Iterator[Object]:
        """Iterate over a snapshot, as the collection may change at any `await` of the loop."""
        return iter(list(self._objects.values()))

    def get(self, namespace: str, name: str) -> Object | None:
        return self._objects.get((namespace, name))

    def observe(self, obj: Object) -> None:
        """Store the response to our own write before the watch delivers it, so that the next pass sees it."""
        known = self._objects.get(_key(obj))
        if obj["metadata"]["uid"] in self._deleted or obj.get("kind") == "Status":
            return
        if known is None or _version(obj) > _version(known):
            self._objects[_key(obj)] = obj
            self._notify()

    async def run(self) -> None:
        """List and watch until cancelled; retries when the server is unreachable."""
        while True:
            try:
                since = await self._list()
                while True:
                    since = await self._follow(since)
            except (ApiError, ClientError, TimeoutError, ConnectionError) as error:
                if not (isinstance(error, ApiError) and error.code == 410):
                    _LOG.debug("watching %s: %s", self.resource.plural, error)
                    await asyncio.sleep(RETRY_S)

    async def _list(self) -> str:
        listed = await self._client.list(self.resource)
        kind = listed["kind"].removesuffix("List")
        fresh = {}
        for item in listed["items"]:
            obj = {"apiVersion": self.resource.api_version, "kind": kind, **item}
            fresh[_key(obj)] = obj
        self._objects = fresh
        self._deleted.clear()
        self.synced.set()
        self._notify()
        version: str = listed["metadata"]["resourceVersion"]
        return version

    async def _follow(self, since: str) -> str:
        async for event in self._client.watch(self.resource, since):
            obj = event["object"]
            since = obj["metadata"]["resourceVersion"]
            if event["type"] == "BOOKMARK":
                continue
            if event["type"] == "DELETED":
                self._deleted.add(obj["metadata"]["uid"])
                known = self._objects.get(_key(obj))
                if known is not None and known["metadata"]["uid"] == obj["metadata"]["uid"]:
                    del self._objects[_key(obj)]
            elif (known := self._objects.get(_key(obj))) is None or _version(obj) >= _version(known):
                self._objects[_key(obj)] = obj
            self._notify()
        return since

    def _notify(self) -> None:
        for listener in self.listeners:
            listener()


class Informers:
    """The informers of one process, one per collection, shared by the controllers."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client
        self._informers: dict[Resource, tuple[Informer, asyncio.Task[None]]] = {}

    def __getitem__(self, resource: Resource) -> Informer:
        if resource not in self._informers:
            informer = Informer(self._client, resource)
            self._informers[resource] = informer, asyncio.create_task(informer.run())
        return self._informers[resource][0]

    async def drop(self, resource: Resource) -> None:
        """Stop watching a collection, for example after its CRD was deleted."""
        found = self._informers.pop(resource, None)
        if found is not None:
            found[1].cancel()
            await asyncio.gather(found[1], return_exceptions=True)

    async def close(self) -> None:
        for resource in list(self._informers):
            await self.drop(resource)


def _key(obj: Mapping[str, Any]) -> tuple[str, str]:
    metadata = obj["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


def _version(obj: Mapping[str, Any]) -> int:
    return int(obj["metadata"]["resourceVersion"])
