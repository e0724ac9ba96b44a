"""Lists what the watches follow, now and then: whatever they missed is found here.

kopf tells of everything that it lists anew after a gap, but not of what was deleted meanwhile; and a watch may have
died without a word. So the cache is never further from the truth than one interval.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from llmservice_operator.api.kinds import FOLLOWED, Followed
from llmservice_operator.api.spec import Manifest
from llmservice_operator.cluster.kube_client import KubeClient, KubeError
from llmservice_operator.cluster.object_cache import ObjectCache
from llmservice_operator.monitoring.process_metrics import ProcessMetrics

logger = logging.getLogger(__name__)

_SOON_S = 5.0
_RETRY_S = 5.0

Changed = Callable[[Followed, Manifest], None]
"""Told of each object that differs from what the cache held."""


class Resync:
    """Fills the cache at the start, and corrects it from then on."""

    def __init__(
        self,
        client: KubeClient,
        cache: ObjectCache,
        namespaces: Iterable[str] = (),
        metrics: ProcessMetrics | None = None,
        kinds: Sequence[Followed] = FOLLOWED,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        """`settle` is called whenever everything was listed and what is in the cache will stay for a while."""
        self._client = client
        self._cache = cache
        self._namespaces: tuple[str | None, ...] = tuple(namespaces) or (None,)
        self._kinds = kinds
        self._metrics = metrics
        self._settle = settle
        self._asked = asyncio.Event()

    async def once(self, changed: Changed | None = None) -> int:
        """List everything; returns how many objects differed from the cache. Raises KubeError."""
        differences = 0
        for followed in self._kinds:
            for namespace in self._namespaces:
                found = await self._take_over(followed, namespace)
                differences += len(found)
                if changed is not None:
                    for one in found:
                        changed(followed, one)
        self._settle()
        return differences

    async def _take_over(self, followed: Followed, namespace: str | None) -> list[Manifest]:
        kind = followed.kind
        try:
            objects, version = await self._client.list_all(followed.path(namespace), followed.selector)
        except KubeError as error:
            if kind.built_in or error.status != 404:
                raise
            self._cache.withdraw(kind.name)
            return []
        return self._cache.replace(kind.name, namespace, objects, version)

    def soon(self) -> None:
        """A watch began anew: look at what it can't tell of."""
        self._asked.set()

    async def run(self, changed: Changed, interval_s: float) -> None:
        """Correct the cache every interval, and soon after somebody asked for it; for ever."""
        wait_s = interval_s
        while True:
            try:
                async with asyncio.timeout(wait_s):
                    await self._asked.wait()
                    await asyncio.sleep(_SOON_S)  # several watches begin anew at once, and list for a while themselves
            except TimeoutError:
                pass
            self._asked.clear()
            try:
                differences = await self.once(changed)
                if self._metrics:
                    self._metrics.resynced(differences)
                wait_s = interval_s
            except KubeError as error:
                if self._metrics:
                    self._metrics.resync_failed()
                logger.warning("resync failed, will be repeated: %s", error)
                await asyncio.sleep(max(_RETRY_S, error.retry_after_s))  # what asks for a resync must not cut it short
                wait_s = 0.0
