"""Keeps the cache's objects of one kind as the API server has them: a list first, then watches from there on.

client-go's word for it. https://kubernetes.io/docs/reference/using-api/api-concepts/#efficient-detection-of-changes
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from llmservice_operator.api.kinds import Followed
from llmservice_operator.api.spec import Manifest
from llmservice_operator.cluster.backoff import Backoff
from llmservice_operator.cluster.kube_client import KubeClient, KubeError
from llmservice_operator.cluster.object_cache import ObjectCache
from llmservice_operator.monitoring.process_metrics import ProcessMetrics

logger = logging.getLogger(__name__)

_GONE = frozenset({404, 410})
"""The version to go on from is forgotten, or the kind itself is gone: only a list can tell."""
_PATIENCE = 5
"""Failures at one version before it is given up for a list: an API server may never again go on from it."""


class Changed(Protocol):
    """Told of an object, once the cache is up to date with it."""

    def __call__(self, kind: str, obj: Manifest, *, news: bool) -> None:
        """`news` is False where the cache knew it so already, or younger."""


@dataclass(slots=True, eq=False)
class Reflector:
    """Of one kind, in one namespace or (None) in the whole cluster."""

    client: KubeClient
    cache: ObjectCache
    followed: Followed
    namespace: str | None
    changed: Changed
    metrics: ProcessMetrics
    lists: asyncio.Lock
    """Held while a collection is listed: what several of them hold in memory would add up."""
    silence_s: float
    """A watch that brings nothing for so long, not even the bookmark that is due every minute, is begun anew."""

    listed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the cache holds what there is, be it nothing for want of a CRD."""
    _served: asyncio.Event = field(default_factory=asyncio.Event)
    _version: str | None = None
    """From which the next watch goes on; None: it begins with a list."""
    _failures: int = 0
    """At that version."""
    _said: str = ""
    _backoff: Backoff = field(default_factory=Backoff)

    async def run(self) -> None:
        """For ever; raises KubeError where the API server forbids it: no patience would change that."""
        while True:
            asked_s = 0.0
            try:
                if self._version is None:
                    self._version = await self._begin()
                await self._watch(self._version)
            except KubeError as error:
                if error.status == 403:
                    raise
                asked_s = error.retry_after_s
                self._failed(error)
            pause_s = self._backoff.failed(asyncio.get_running_loop().time())
            await asyncio.sleep(max(asked_s, pause_s))

    async def list_again(self) -> int:
        """Correct the cache; returns how many objects it held otherwise. Raises KubeError."""
        differences, _ = await self._list()
        return differences

    async def _begin(self) -> str:
        """List, as soon as there is such a kind; the version that the list is of."""
        while True:
            _, version = await self._list()
            if version is not None:
                self.metrics.relisted(self.followed.kind.name)
                return version
            await self._served.wait()  # a resync will find it

    async def _list(self) -> tuple[int, str | None]:
        """How many differences there were, and the version; None where the cluster does not know the kind."""
        kind = self.followed.kind
        async with self.lists:
            try:
                objects, version = await self._listed()
            except KubeError as error:
                if kind.built_in or error.status != 404:
                    raise
                self._served.clear()
                self.cache.withdraw(kind.name)
                self.listed.set()
                return 0, None
            differences = self.cache.replace(kind.name, self.namespace, objects, version)
        self._said = ""
        for one in differences:
            self.changed(kind.name, one, news=True)
        self._served.set()
        self.listed.set()
        return len(differences), version

    async def _listed(self) -> tuple[list[Manifest], str]:
        """An API server that asks for a pause has it, from every list: they all wait for this one."""
        while True:
            try:
                return await self.client.list_all(self.followed.path(self.namespace), self.followed.selector)
            except KubeError as error:
                if not error.retry_after_s:
                    raise
                self._say(error)
                await asyncio.sleep(error.retry_after_s)

    async def _watch(self, since: str) -> None:
        """One watch, to its end."""
        path = self.followed.path(self.namespace)
        async with aclosing(self.client.watch(path, self.followed.selector, since, self.silence_s)) as events:
            async for event in events:
                self._take(event["type"], event["object"])

    def _take(self, what: str, obj: Manifest) -> None:
        self._version, self._failures, self._said = str(obj["metadata"]["resourceVersion"]), 0, ""
        if what == "BOOKMARK":
            return
        kind = self.followed.kind.name
        self.metrics.watched(kind)
        news = self.cache.drop(kind, obj) if what == "DELETED" else self.cache.put(kind, obj)
        self.changed(kind, obj, news=news)

    def _failed(self, error: KubeError) -> None:
        """Go on from the same version, unless that is of no more use."""
        self._say(error)
        self._failures += 1
        if error.status in _GONE or self._failures >= _PATIENCE:
            self._version, self._failures = None, 0

    def _say(self, error: KubeError) -> None:
        """Once, not at every attempt."""
        if str(error) != self._said:
            self._said = str(error)
            remedy = ": its CRD is missing" if error.status == 404 else ""
            logger.warning("%s can't be followed, will be repeated%s: %s", self.followed.kind.plural, remedy, error)
