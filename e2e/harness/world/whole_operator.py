"""The operator as it runs in a pod, without kopf: events come from the store itself, at once and in one process.

kopf runs on no loop whose clock jumps, and its own requests would be counted among the calls that fail.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp

from llmservice_local.api.registry import Registry
from llmservice_local.api.watch import WatchRequest, watch
from llmservice_local.errors import ApiError
from llmservice_local.selector import label_predicate
from llmservice_operator.api.kinds import FOLLOWED, Followed
from llmservice_operator.cluster.applier import Applier
from llmservice_operator.cluster.kube_client import WATCH_S, KubeClient
from llmservice_operator.cluster.object_cache import ObjectCache
from llmservice_operator.framework.handlers import Handlers
from llmservice_operator.framework.operator import Work
from llmservice_operator.framework.resync import Resync
from llmservice_operator.grants import Grants
from llmservice_operator.loops import ServiceLoops
from llmservice_operator.model_reader import ModelReader
from llmservice_operator.monitoring.metrics import OperatorMetrics
from llmservice_operator.pods.pod_model import PodModels
from llmservice_operator.reconcile import Reconciler
from llmservice_operator.signals.held import HeldRequests
from llmservice_operator.signals.sources import PodSignals, Signals

TICK_S = 30.0
RESYNC_S = 600.0


async def _no_gateways() -> list[str]:
    return []


class WholeOperator:
    """One process's worth of it, from an empty memory on. It shares nothing with another but the connections."""

    def __init__(
        self, api: Any, session: aiohttp.ClientSession, registry: Registry, clock: Callable[[], float]
    ) -> None:
        client, cache, metrics = KubeClient(api), ObjectCache(), OperatorMetrics()
        reconciler = Reconciler(
            client,
            cache,
            Applier(client, cache, clock),
            ModelReader(session, None, "http://127.0.0.1:9", None).read,
            Signals(PodSignals(session), None),
            PodModels(session),
            metrics,
            "img:1",
            Grants(client, clock=clock),
            HeldRequests(session, _no_gateways),
            clock,
            monotonic=clock,
        )
        loops = ServiceLoops(reconciler.run_pass, TICK_S, metrics)
        self._handlers = Handlers(cache, loops, reconciler.forget, metrics.process)
        self._resync = Resync(client, cache, self._handlers.changed, metrics.process, interval_s=RESYNC_S)
        self._work = Work(loops, cache, self._resync, None)
        self._registry = registry

    async def run(self) -> None:
        """Work until cancelled, which ends it wherever it is."""
        watching = [asyncio.create_task(self._watch(one), name=f"watch {one.kind.plural}") for one in FOLLOWED]
        self._work.begin()
        try:
            await self._work.stop.wait()
            assert self._work.failure is not None
            raise self._work.failure
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
            await self._work.end()

    async def _watch(self, followed: Followed) -> None:
        """Every event from now on, of a kind that may not be there yet."""
        kind, predicate = followed.kind, label_predicate(followed.selector)
        since, path = self._registry.store.revision, followed.path(None)
        while True:
            try:
                served = self._registry.kinds.find(kind.group, kind.version, kind.plural)
            except ApiError:
                await asyncio.sleep(1.0)
                continue
            if path is not None:
                self._resync.listed(kind.name, path)
                path = None
            wanted = WatchRequest(served, None, predicate, since, WATCH_S)
            async for event in watch(self._registry, wanted, asyncio.get_running_loop().time):
                assert event["type"] != "ERROR", event
                since = int(event["object"]["metadata"]["resourceVersion"])
                if event["type"] != "BOOKMARK":
                    self._handlers.take(kind.name, event["type"], event["object"])
