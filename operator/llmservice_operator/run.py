"""The operator as one coroutine: connect, and follow the cluster until told to stop."""

from __future__ import annotations

import asyncio
import logging
import math
import os
from contextlib import AsyncExitStack

import aiohttp

from llmservice_operator.apply.applier import Applier
from llmservice_operator.cluster.heap import expect_many, settle
from llmservice_operator.cluster.kube_client import KubeClient
from llmservice_operator.cluster.mirror import Mirror
from llmservice_operator.cluster.object_cache import ObjectCache
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
from llmservice_operator.wakeups import Wakeups

logger = logging.getLogger(__name__)


async def run_operator(settings: OperatorSettings, stop: asyncio.Event) -> None:
    """Run until `stop` is set; raises LeadershipLostError, and KubeError where the account may not do what it must."""
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
        metrics.process.hold(loops, cache)
        mirror = Mirror(
            client,
            cache,
            Wakeups(cache, loops, reconciler.forget).changed,
            metrics.process,
            settings.namespaces,
            silence_s=settings.watch_silence_s,
            resync_s=settings.resync_s,
            settle=settle,
        )
        await Turn(loops, cache, mirror, _election(client, settings, metrics.process)).run(stop)


def _election(client: KubeClient, settings: OperatorSettings, metrics: ProcessMetrics) -> Election | None:
    if settings.lease_namespace is None:
        metrics.lead(lambda: math.inf)
        return None
    election = Election(client, settings.lease_namespace, settings.lease_name)
    client.may_write_s = election.left_s
    metrics.lead(election.left_s)
    return election
