"""A cache of one kind of object, kept current by list and watch.

The cache outlives the connection: while the API server is away the last known state stands, because sending a request
to where a pod was a minute ago is right far more often than refusing it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from typing import Any, Protocol

import aiohttp

logger = logging.getLogger(__name__)

WATCH_S = 240
"""The server ends a watch after so long; a connection that died silently is noticed by then."""
FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0

Object = dict[str, Any]


class ClusterAPI(Protocol):
    """What a reflector needs of the Kubernetes API."""

    async def list(self, path: str, query: dict[str, str]) -> Object:
        """GET a list; raises `APIStatusError` when the API refuses."""
        ...

    def watch(self, path: str, query: dict[str, str]) -> AsyncGenerator[bytes, None]:
        """The lines of a watch; ends when the server ends it; raises as `list` does."""
        ...


class APIStatusError(Exception):
    """The API server answered, but not with what was asked for."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"the API server answered {status}: {reason}")
        self.status = status


class Reflector:
    """Keeps `objects` equal to what the API holds under `path` (and `selector`), and says so through `on_change`."""

    def __init__(
        self,
        api: ClusterAPI,
        path: str,
        on_change: Callable[[], None],
        selector: str = "",
        sleep: Callable[[float], Any] = asyncio.sleep,
    ) -> None:
        self._api = api
        self._path = path
        self._on_change = on_change
        self._query = {"labelSelector": selector} if selector else {}
        self._sleep = sleep
        self._objects: dict[tuple[str, str], Object] = {}
        self._resource_version = ""
        self.synced = asyncio.Event()
        """Set once the first list has arrived."""

    def objects(self) -> Iterable[Object]:
        return self._objects.values()

    async def run(self) -> None:
        """List, then watch, for ever; every failure is waited out with a growing, jittered pause."""
        backoff_s = FIRST_BACKOFF_S
        while True:
            try:
                if not self._resource_version:
                    await self._list()
                await self._watch()
                backoff_s = FIRST_BACKOFF_S
            except APIStatusError as error:
                self._resource_version = ""  # 410 Gone: too old to continue from. After any other refusal: start over
                if error.status == 410:
                    continue
                logger.warning("cannot read %s: %s; keeping what is known", self._path, error)
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                logger.warning("lost %s: %s: %s; keeping what is known", self._path, type(error).__name__, error)
            else:
                continue
            await self._sleep(backoff_s * random.uniform(0.5, 1.0))  # noqa: S311  # jitter, not a secret
            backoff_s = min(backoff_s * 2, LONGEST_BACKOFF_S)

    async def _list(self) -> None:
        answer = await self._api.list(self._path, self._query)
        self._objects = {_key(item): item for item in answer["items"]}
        self._resource_version = answer["metadata"]["resourceVersion"]
        self.synced.set()
        self._on_change()

    async def _watch(self) -> None:
        query = self._query | {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._resource_version,
            "timeoutSeconds": str(WATCH_S),
        }
        async with aclosing(self._api.watch(self._path, query)) as lines:
            async for line in lines:
                self._take(json.loads(line))

    def _take(self, event: Object) -> None:
        kind, item = event["type"], event["object"]
        if kind == "ERROR":
            raise APIStatusError(item.get("code", 500), item.get("message", "no reason given"))
        self._resource_version = item["metadata"]["resourceVersion"]
        if kind == "BOOKMARK":
            return
        if kind == "DELETED":
            self._objects.pop(_key(item), None)
        else:
            self._objects[_key(item)] = item
        self._on_change()


def _key(item: Object) -> tuple[str, str]:
    metadata = item["metadata"]
    return metadata.get("namespace", ""), metadata["name"]
