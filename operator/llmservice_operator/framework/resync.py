"""Lists beside kopf's own: the first one fills the cache, later ones find what no watch reports.

kopf reports no object that was deleted while it listed anew, and no CRD that is installed after its start.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Protocol

from llmservice_operator.api.kinds import FOLLOWED, Followed, Kind
from llmservice_operator.api.resource import KIND
from llmservice_operator.api.spec import Manifest
from llmservice_operator.cluster.kube_client import KubeClient, KubeError
from llmservice_operator.cluster.object_cache import ObjectCache
from llmservice_operator.monitoring.metrics import ProcessMetrics

logger = logging.getLogger(__name__)

_RETRY_S = 5.0
DISCOVER_S = 60.0
"""Between two searches for a missing CRD."""
_DISCOVER_OWN_S = 2.0
"""The same for the operator's own CRD, which `helm install` creates a moment later."""
_OWN = next(one for one in FOLLOWED if one.kind.name == KIND)


class Changed(Protocol):
    """Called for each object that differed from the cache."""

    def __call__(self, kind: str, obj: Manifest, *, news: bool) -> None: ...


class Resync:
    """Corrects the cache every few minutes, and a kind at once after kopf has listed it anew."""

    def __init__(
        self,
        client: KubeClient,
        cache: ObjectCache,
        changed: Changed,
        metrics: ProcessMetrics,
        namespaces: Iterable[str] = (),
        *,
        interval_s: float,
        discover: Callable[[str], Awaitable[None]] | None = None,
        on_complete: Callable[[], None] = lambda: None,
    ) -> None:
        """No namespaces: the whole cluster. `discover` makes kopf discover an API group again; `on_complete` is called
        whenever everything was listed.
        """
        self._client = client
        self._cache = cache
        self._changed = changed
        self._metrics = metrics
        self._places: tuple[str | None, ...] = tuple(namespaces) or (None,)
        cache.unread = {(one.kind.name, place) for one in FOLLOWED for place in self._places if place is not None}
        self._interval_s = interval_s
        self._discover = discover
        self._on_complete = on_complete
        self._due = {one.kind.name for one in FOLLOWED}
        self._wake = asyncio.Event()
        self._followed: set[str] = set()
        """Paths that kopf has listed."""
        self._failed: dict[str, str] = {}
        """Why a kind, or the path of a namespace that may not be read, could not be listed the last time."""
        self.complete = asyncio.Event()
        """Set once everything was listed, of the namespaces that may be read: before, a missing Deployment may only be
        not listed yet."""

    def listed(self, kind: str, path: str) -> None:
        """kopf has listed a collection: if it had before, or could not be listed here, the kind is due."""
        self._metrics.relisted(kind)
        if path in self._followed or path in self._failed or self._cache.lacks(kind):
            self._due.add(kind)
            self._wake.set()
        self._followed.add(path)

    def missing(self, kind: str) -> None:
        """kopf lists or watches a kind that the API server no longer serves."""
        self._due.add(kind)
        self._wake.set()

    async def run(self) -> None:
        """For ever; requests that fail are repeated."""
        clock = asyncio.get_running_loop().time
        all_due_s = clock() + self._interval_s
        while True:
            await self._list_due()
            if not self.complete.is_set() and any(map(self._cache.is_read, self._places)):
                self._on_complete()
                self.complete.set()
            self._wake.clear()
            discover_s = clock() + self._discover_in_s()
            try:
                async with asyncio.timeout_at(min(all_due_s, discover_s)):
                    await self._wake.wait()
            except TimeoutError:
                self._due |= {one.kind.name for one in FOLLOWED if not self._is_followed(one)}
            if clock() >= all_due_s:
                all_due_s = clock() + self._interval_s
                await self._list_all()

    async def _list_all(self) -> None:
        self._due = {one.kind.name for one in FOLLOWED}
        await self._list_due()
        self._on_complete()

    async def _list_due(self) -> None:
        """List each kind that is due, until all have succeeded; one that fails does not hold up the others."""
        differences = 0
        while self._due:
            pause_s = 0.0
            for followed in [one for one in FOLLOWED if one.kind.name in self._due]:
                try:
                    self._due.discard(followed.kind.name)
                    differences += await self._list(followed)
                    self._failed.pop(followed.kind.name, None)
                except KubeError as error:
                    self._due.add(followed.kind.name)
                    self._fail(followed.kind.name, followed.kind, error)
                    pause_s = max(_RETRY_S, error.retry_after_s)
                    if error.retry_after_s:
                        break  # the API server asks for a pause
            await asyncio.sleep(pause_s)
        self._metrics.resynced(differences if self.complete.is_set() else 0)

    def _fail(self, what: str, kind: Kind, error: KubeError) -> None:
        self._metrics.resync_failed()
        if self._failed.get(what) != str(error):
            self._failed[what] = str(error)
            logger.warning("resync of %s failed, will be repeated: %s", kind.plural, error)

    async def _list(self, followed: Followed) -> int:
        """Correct the cache; returns how many objects differed. Raises KubeError.

        A namespace that may not be read, such as a deleted one with its RoleBinding, keeps its cached objects and does
        not hold up the others: it is listed again once kopf has listed it, and with every later list of the kind.
        """
        kind, differences = followed.kind, 0
        lacked = self._cache.lacks(kind.name)
        latest = partial(self._cache.latest, kind.name)
        for namespace in self._places:
            path = followed.path(namespace)
            try:
                objects, version = await self._client.list_all(path, followed.selector, latest)
            except KubeError as error:
                if error.status == 403 and namespace is not None:
                    self._fail(path, kind, error)
                    continue
                if kind.built_in or error.status != 404:
                    raise
                changed = self._cache.withdraw(kind.name)
                self._followed -= {followed.path(one) for one in self._places}
            else:
                changed = self._cache.replace(kind.name, namespace, objects, version)
            self._failed.pop(path, None)
            if namespace is not None:
                self._cache.unread.discard((kind.name, namespace))
            differences += len(changed)
            for one in changed:
                self._changed(kind.name, one, news=True)
        await self._compare_with_kopf(followed, lacked=lacked)
        return differences

    async def _compare_with_kopf(self, followed: Followed, *, lacked: bool) -> None:
        """Make kopf discover the API again where the kinds that it watches differ from those that are served."""
        kind, lacks = followed.kind, self._cache.lacks(followed.kind.name)
        if lacks != lacked:
            logger.info("the API server %s %s", "does not serve" if lacks else "serves", kind.plural)
        differs = not lacked if lacks else not self._is_followed(followed)
        if self._discover is not None and self.complete.is_set() and differs:
            await self._discover(kind.group)

    def _is_followed(self, followed: Followed) -> bool:
        """Whether kopf has listed all of a kind that may be read since the API server has served it."""
        return all(path in self._followed or path in self._failed for path in map(followed.path, self._places))

    def _discover_in_s(self) -> float:
        return DISCOVER_S if self._is_followed(_OWN) else _DISCOVER_OWN_S
