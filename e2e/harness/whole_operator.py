"""The operator as it runs in a pod, with the watches' place taken by the store: it tells at once what they would."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp

from llmservice_local.api.registry import Registry
from llmservice_local.api.selector import label_predicate
from llmservice_operator.api.kinds import FOLLOWED
from llmservice_operator.api.resource import KIND
from llmservice_operator.apply.applier import Applier
from llmservice_operator.cluster.kube_client import KubeClient
from llmservice_operator.cluster.object_cache import ObjectCache
from llmservice_operator.cluster.resync import Resync
from llmservice_operator.handlers import Watches
from llmservice_operator.loops import ServiceLoops
from llmservice_operator.models.source import ModelReader
from llmservice_operator.monitoring.metrics import OperatorMetrics
from llmservice_operator.pods.pod_model import PodModels
from llmservice_operator.reconcile import Reconciler
from llmservice_operator.signals.pods import PodSignals
from llmservice_operator.signals.signals import Signals
from llmservice_operator.turn import Turn

TICK_S = 30.0
RESYNC_S = 600.0


class WholeOperator:
    """One process's worth of it, from an empty memory on. It shares nothing with another but the connections."""

    def __init__(
        self, api: Any, session: aiohttp.ClientSession, registry: Registry, clock: Callable[[], float]
    ) -> None:
        self._registry = registry
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
            clock,
        )
        loops = ServiceLoops(reconciler.run_pass, TICK_S, metrics)
        resync = Resync(client, cache)
        self._watches = Watches(cache, loops, reconciler.forget, resync.soon, metrics.process)
        self._turn = Turn(loops, cache, resync, self._watches, None, RESYNC_S)

    async def run(self) -> None:
        """Work until cancelled, which ends it wherever it is."""
        await self._turn.run(self._watch, asyncio.Event())

    async def _watch(self, until: asyncio.Event) -> None:
        telling = asyncio.create_task(self._tell())
        try:
            await until.wait()
        finally:
            telling.cancel()

    async def _tell(self) -> None:
        followed = {(one.kind.group, one.kind.plural): (one.kind.name, one.selector) for one in FOLLOWED}
        store = self._registry.store
        async with store.changes(store.revision) as changes:
            while True:
                change = await changes.get()
                name, selector = followed.get(change.collection, ("", ""))
                obj = change.after or change.final
                if not name or obj is None or not label_predicate(selector)(obj):
                    continue
                kind = "MODIFIED" if change.after and change.before else "ADDED" if change.after else "DELETED"
                if name == KIND:
                    self._watches.service_changed(kind, obj)
                else:
                    self._watches.child_changed(kind, name, obj)
