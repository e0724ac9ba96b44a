"""Everything that the operator follows, mirrored into the cache: a reflector for each kind, and a list now and then.

The lists find what watches missed: the cache is never further from the truth than one interval.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from itertools import product

from llmservice_operator.api.kinds import FOLLOWED
from llmservice_operator.cluster.kube_client import KubeClient, KubeError
from llmservice_operator.cluster.object_cache import ObjectCache
from llmservice_operator.cluster.reflector import Changed, Reflector
from llmservice_operator.monitoring.process_metrics import ProcessMetrics

logger = logging.getLogger(__name__)

_RETRY_S = 5.0


class Mirror:
    """Fills the cache at the start, and keeps it current from then on."""

    def __init__(
        self,
        client: KubeClient,
        cache: ObjectCache,
        changed: Changed,
        metrics: ProcessMetrics,
        namespaces: Iterable[str] = (),
        *,
        silence_s: float,
        resync_s: float,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        """No namespaces: the whole cluster. `settle` is called whenever everything was listed."""
        lists = asyncio.Lock()
        places = tuple(namespaces) or (None,)
        self._reflectors = [
            Reflector(client, cache, followed, namespace, changed, metrics, lists, silence_s)
            for followed, namespace in product(FOLLOWED, places)
        ]
        self._metrics = metrics
        self._resync_s = resync_s
        self._settle = settle
        self.whole = asyncio.Event()
        """Set once everything was listed: before, a Deployment that is not known yet looks like none."""

    async def run(self) -> None:
        """For ever; raises KubeError where something may not be listed or watched."""
        tasks = [asyncio.create_task(one.run(), name=f"reflect {one.followed.kind.name}") for one in self._reflectors]
        tasks.append(asyncio.create_task(self._correct(), name="resync"))
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def list_all(self) -> int:
        """List everything once; returns how many objects the cache held otherwise. Raises KubeError."""
        differences = 0
        for one in self._reflectors:
            differences += await one.list_again()
        self._settle()
        return differences

    async def _correct(self) -> None:
        for one in self._reflectors:
            await one.listed.wait()
        self._settle()
        self.whole.set()
        pause_s = self._resync_s
        while True:
            await asyncio.sleep(pause_s)
            try:
                self._metrics.resynced(await self.list_all())
                pause_s = self._resync_s
            except KubeError as error:
                self._metrics.resync_failed()
                logger.warning("resync failed, will be repeated: %s", error)
                pause_s = _RETRY_S
