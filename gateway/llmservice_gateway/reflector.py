"""A cache of one kind of object, kept current by list and watch.

The cache outlives the connection: while the API server is away the last known state stands, because sending a request
to where a pod was a minute ago is right far more often than refusing it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Callable, Iterable
from typing import Any

import aiohttp
from kubernetes.aio.client import ApiException
from kubernetes.aio.watch import Watch

from llmservice_gateway.cluster_api import KubernetesAPI

logger = logging.getLogger(__name__)

LIST_TIMEOUT_S = 30
WATCH_GRACE_S = 30
WATCH_S = 240
"""The server ends a watch after so long; a connection that died silently is noticed by then."""
FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0

Object = dict[str, Any]


class Reflector:
    """Keeps `objects` equal to what the API holds under `path` (and `selector`), and says so through `on_change`."""

    def __init__(
        self,
        api: KubernetesAPI,
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
        self._watch = Watch()  # type: ignore[no-untyped-call]  # holds the version that the next watch continues from
        self.synced = asyncio.Event()
        """Set once the first list has arrived."""

    def objects(self) -> Iterable[Object]:
        return self._objects.values()

    async def run(self) -> None:
        """List, then watch, for ever; every failure is waited out with a growing, jittered pause."""
        backoff_s = FIRST_BACKOFF_S
        while True:
            try:
                if not self._watch.resource_version:
                    await self._list()
                await self._follow()
                backoff_s = FIRST_BACKOFF_S
            except ApiException as error:
                # 410 Gone: too old to continue from. After any other refusal: start over
                self._watch.resource_version = None
                if error.status == 410:
                    continue
                answer = f"the API server answered {error.status}: {error.reason}"
                logger.warning("cannot read %s: %s; keeping what is known", self._path, answer)
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                logger.warning("lost %s: %s: %s; keeping what is known", self._path, type(error).__name__, error)
            else:
                continue
            await self._sleep(backoff_s * random.uniform(0.5, 1.0))  # noqa: S311  # jitter, not a secret
            backoff_s = min(backoff_s * 2, LONGEST_BACKOFF_S)

    async def _list(self) -> None:
        response = await self._api.get(self._path, self._query, LIST_TIMEOUT_S)
        answer = json.loads(await response.read())
        self._objects = {_key(item): item for item in answer["items"]}
        self._watch.resource_version = answer["metadata"]["resourceVersion"]
        self.synced.set()
        self._on_change()

    async def _follow(self) -> None:
        query = self._query | {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": str(self._watch.resource_version),
            "timeoutSeconds": str(WATCH_S),
        }

        async def connect(**_: Any) -> Any:  # it declares no model, so Watch leaves each object the dict that it is
            return await self._api.get(self._path, query, WATCH_S + WATCH_GRACE_S)

        # Given a timeout, Watch ends with the response; without one it would reconnect by itself.
        events = self._watch.stream(connect, timeout_seconds=WATCH_S)  # type: ignore[no-untyped-call]
        try:
            async with self._watch:
                async for event in events:
                    if isinstance(event, str):  # Watch returns a line that is not JSON as it is
                        raise aiohttp.ClientPayloadError(f"expected an event, got the line {event[:100]!r}")
                    self._take(event["type"], event["object"])
        except KeyError as error:  # Watch requires `code`, `reason` and `message` of every ERROR event
            raise ApiException(status=500, reason=f"an event without {error}") from error

    def _take(self, kind: str, item: Object) -> None:
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
