"""The operator as one coroutine: connect, wait for the CRD, watch until told to stop."""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Callable
from contextlib import AsyncExitStack

import aiohttp

from llmservice_operator.api.kinds import FOLLOWED, Followed
from llmservice_operator.api.resource import API_VERSION, PLURAL
from llmservice_operator.apply.applier import Applier
from llmservice_operator.cluster.heap import expect_many, settle
from llmservice_operator.cluster.kube_client import KubeClient, KubeError
from llmservice_operator.cluster.object_cache import ObjectCache
from llmservice_operator.cluster.resync import Resync
from llmservice_operator.handlers import Watches, handlers, kopf_settings
from llmservice_operator.leadership.election import Election
from llmservice_operator.loops import ServiceLoops
from llmservice_operator.models.source import ModelReader
from llmservice_operator.monitoring.http_server import serve_http
from llmservice_operator.monitoring.metrics import OperatorMetrics
from llmservice_operator.monitoring.process_metrics import ProcessMetrics
from llmservice_operator.pods.pod_model import PodModels
from llmservice_operator.reconcile import Reconciler
from llmservice_operator.settings import OperatorSettings
from llmservice_operator.signals.pods import PodSignals
from llmservice_operator.signals.prometheus import PrometheusSignals
from llmservice_operator.signals.signals import Signals
from llmservice_operator.turn import Turn
from llmservice_operator.watching import Watching

logger = logging.getLogger(__name__)

_CRD_RETRY_S = 2.0


async def run_operator(settings: OperatorSettings, stop: asyncio.Event, take_signals: Callable[[], None]) -> None:
    """Run until `stop` is set; raises LeadershipLostError.

    `take_signals` takes back the signals that kopf takes for itself.
    """
    expect_many()
    async with AsyncExitStack() as stack:
        client = await KubeClient.connect()
        stack.push_async_callback(client.close)
        # Pods are in the cluster, the hub is not: only the latter may be behind a proxy that the environment names.
        inside = await stack.enter_async_context(aiohttp.ClientSession())
        outside = await stack.enter_async_context(aiohttp.ClientSession(trust_env=True))
        metrics = OperatorMetrics()
        client.answered = metrics.process.answered
        cache = ObjectCache()
        reader = ModelReader(outside, settings.file_models_root, settings.hf_endpoint, os.environ.get("HF_TOKEN"))
        prometheus = PrometheusSignals(inside, settings.prometheus_url) if settings.prometheus_url else None
        signals = Signals(PodSignals(inside), prometheus)
        applier = Applier(client, cache)
        reconciler = Reconciler(
            client,
            cache,
            applier,
            reader.read,
            signals,
            PodModels(inside),
            metrics,
            settings.server_image,
            peers=settings.peers,
        )
        loops = ServiceLoops(reconciler.run_pass, settings.tick_s, metrics)
        port = await stack.enter_async_context(serve_http(settings.host, settings.port, metrics, loops.healthy))
        logger.info("healthz and metrics on port %d", port)
        if not await _crd_served(client, stop):
            return
        resync = Resync(client, cache, settings.namespaces, metrics.process, settle=settle)
        watches = Watches(cache, loops, reconciler.forget, resync.soon, metrics.process)
        kinds = await _served_kinds(client)
        turn = Turn(loops, cache, resync, watches, _election(client, settings, metrics.process), settings.resync_s)
        metrics.process.hold(loops, cache)

        settled = kopf_settings(kinds, settings.watch_silence_s)
        watching = Watching(handlers(watches, kinds), settled, settings.namespaces, take_signals)
        await turn.run(watching.run, stop)


async def _served_kinds(client: KubeClient) -> list[Followed]:
    """The kinds to watch. A CRD that is installed later is found by the resync; only its events are not seen."""
    return [one for one in FOLLOWED if one.kind.built_in or await client.serves(one.kind.api_version, one.kind.plural)]


def _election(client: KubeClient, settings: OperatorSettings, metrics: ProcessMetrics) -> Election | None:
    if settings.lease_namespace is None:
        metrics.lead(lambda: math.inf)
        return None
    election = Election(client, settings.lease_namespace, settings.lease_name)
    client.may_write_s = election.left_s
    metrics.lead(election.left_s)
    return election


async def _crd_served(client: KubeClient, stop: asyncio.Event) -> bool:
    """Wait until the API server knows LLMServices: kopf, which scans only once, would never see them come."""
    said = ""
    while not stop.is_set():
        try:
            if await client.serves(API_VERSION, PLURAL):
                return True
            message = f"{API_VERSION} {PLURAL} are not known to the API server yet: waiting for the CRD"
        except KubeError as error:
            message = str(error)
        if message != said:
            logger.warning("%s", message)
            said = message
        try:
            async with asyncio.timeout(_CRD_RETRY_S):
                await stop.wait()
        except TimeoutError:
            continue
    return False
