"""The operator as it runs in a pod, with its watches on the store itself: it tells at once what a connection would."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import aiohttp

from llmservice_local.api.registry import Registry
from llmservice_local.api.selector import label_predicate
from llmservice_local.api.watch import WatchRequest, watch
from llmservice_operator.api.kinds import FOLLOWED
from llmservice_operator.apply.applier import Applier
from llmservice_operator.cluster.kube_client import WATCH_S, KubeClient, KubeError
from llmservice_operator.cluster.mirror import Mirror
from llmservice_operator.cluster.object_cache import ObjectCache
from llmservice_operator.loops import ServiceLoops
from llmservice_operator.models.source import ModelReader
from llmservice_operator.monitoring.metrics import OperatorMetrics
from llmservice_operator.pods.pod_model import PodModels
from llmservice_operator.reconcile import Reconciler
from llmservice_operator.signals.pods import PodSignals
from llmservice_operator.signals.signals import Signals
from llmservice_operator.turn import Turn
from llmservice_operator.wakeups import Wakeups

TICK_S = 30.0
RESYNC_S = 600.0


class StoreClient(KubeClient):
    """Requests as ever; watches without a connection, which would be counted among the calls that fail."""

    def __init__(self, api: Any, registry: Registry) -> None:
        super().__init__(api)
        self._registry = registry
        self._kinds = {one.path(None): one.kind for one in FOLLOWED}

    async def watch(
        self, path: str, selector: str, since: str, silence_s: float
    ) -> AsyncGenerator[dict[str, Any], None]:
        followed = self._kinds[path]
        kind = self._registry.kinds.find(followed.group, followed.version, followed.plural)
        wanted = WatchRequest(kind, None, label_predicate(selector), int(since), WATCH_S)
        async for event in watch(self._registry, wanted, asyncio.get_running_loop().time):
            if event["type"] == "ERROR":
                raise KubeError(event["object"]["code"], event["object"]["message"])
            yield event


class WholeOperator:
    """One process's worth of it, from an empty memory on. It shares nothing with another but the connections."""

    def __init__(
        self, api: Any, session: aiohttp.ClientSession, registry: Registry, clock: Callable[[], float]
    ) -> None:
        client, cache, metrics = StoreClient(api, registry), ObjectCache(), OperatorMetrics()
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
        changed = Wakeups(cache, loops, reconciler.forget).changed
        mirror = Mirror(client, cache, changed, metrics.process, silence_s=2 * WATCH_S, resync_s=RESYNC_S)
        self._turn = Turn(loops, cache, mirror, None)

    async def run(self) -> None:
        """Work until cancelled, which ends it wherever it is."""
        await self._turn.run(asyncio.Event())
