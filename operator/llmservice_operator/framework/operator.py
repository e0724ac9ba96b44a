"""The operator's process: kopf runs it, and what is decided elsewhere is put together here."""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import kopf
from kopf._cogs.structs.references import Insights
from kopf._core.reactor.observation import process_discovered_resource_event
from prometheus_client import start_http_server

from llmservice_operator.apply.applier import Applier
from llmservice_operator.cluster.configuration import load_configuration
from llmservice_operator.cluster.heap import expect_many, settle
from llmservice_operator.cluster.kube_client import KubeClient
from llmservice_operator.cluster.object_cache import ObjectCache
from llmservice_operator.framework.admission import register_admission
from llmservice_operator.framework.certificate import Certificate
from llmservice_operator.framework.handlers import Handlers
from llmservice_operator.framework.login import Login
from llmservice_operator.framework.probes import Watches, register_probes
from llmservice_operator.framework.resync import Resync
from llmservice_operator.framework.settings import kopf_settings, quieten_kopf
from llmservice_operator.grants import Grants
from llmservice_operator.leadership.election import Election, LeadershipLostError
from llmservice_operator.loops import ServiceLoops
from llmservice_operator.models.source import ModelReader
from llmservice_operator.monitoring.metrics import OperatorMetrics
from llmservice_operator.monitoring.process_metrics import ProcessMetrics
from llmservice_operator.pods.pod_model import PodModels
from llmservice_operator.reconcile import Reconciler
from llmservice_operator.review import Reviewer
from llmservice_operator.settings import OperatorSettings
from llmservice_operator.signals.pods import PodSignals
from llmservice_operator.signals.prometheus import PrometheusSignals
from llmservice_operator.signals.signals import Signals

logger = logging.getLogger(__name__)


class OperatorEndedError(Exception):
    """kopf has ended, by what nothing but a new start answers: an error event within a watch, for one."""


@dataclass(slots=True, eq=False)
class Work:
    """What runs beside kopf's own tasks: the resynchronisation, and the loops while this process leads.

    kopf starts it once its own start is over and ends it last, after all watches. Every replica fills its cache, so
    that a new leader knows the cluster already.
    """

    loops: ServiceLoops
    cache: ObjectCache
    resync: Resync
    election: Election | None
    """None: there is no other process."""
    beside: list[Callable[[], Coroutine[Any, Any, None]]] = field(default_factory=list)
    """What every replica runs as well."""
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """kopf's stop flag."""
    failure: BaseException | None = None
    """What ended the work, where that was not kopf."""
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def register(self, registry: kopf.OperatorRegistry) -> None:
        @kopf.on.startup(registry=registry, id="work", errors=kopf.ErrorsMode.PERMANENT)
        async def startup(**_: object) -> None:
            self.begin()

        @kopf.on.cleanup(registry=registry, id="work", errors=kopf.ErrorsMode.PERMANENT)
        async def cleanup(**_: object) -> None:
            await self.end()

    def begin(self) -> None:
        for work in (self.resync.run, self._lead, *self.beside):
            self._tasks.append(asyncio.create_task(self._guarded(work())))

    async def end(self) -> None:
        """No pass any more, then the lease: the next leader takes it at its next look."""
        await self.loops.stop_all()
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.election is not None:
            await self.election.release()
        self.stop.set()  # kopf waits 5 s for tasks that are left, and the one that waits for this flag is its own

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        """Whatever fails ends the process: half an operator looks healthy."""
        try:
            await work
        except Exception as error:
            self.failure = self.failure or error
            self.stop.set()

    async def _lead(self) -> None:
        """Wait for the whole cache, then for the lease, and work until it is lost."""
        await self.resync.whole.wait()
        if self.election is not None:
            await self.election.acquire()
        self.loops.open(self.cache.services())
        if self.election is not None:
            try:
                await self.election.hold()
            except LeadershipLostError:
                await self.loops.stop_all()  # at once: kopf takes a moment to end its watches
                raise


async def run_operator(settings: OperatorSettings) -> None:
    """Run until SIGTERM or SIGINT.

    Raises ConfigException where no cluster is configured, OSError where a port is taken, LeadershipLostError and
    OperatorEndedError.
    """
    expect_many()
    quieten_kopf()
    configuration = await load_configuration()
    registry, insights, own = kopf.OperatorRegistry(), Insights(), kopf_settings(settings)
    async with AsyncExitStack() as stack:
        client = KubeClient.of(configuration)
        stack.push_async_callback(client.close)
        metrics, cache = OperatorMetrics(), ObjectCache()
        process = metrics.process
        client.answered = process.answered
        reconciler = await _reconciler(stack, client, cache, settings, metrics)
        loops = ServiceLoops(reconciler.run_pass, settings.tick_s, metrics)
        process.hold(loops, cache)
        handlers = Handlers(cache, loops, reconciler.forget, process)

        async def discover(group: str) -> None:
            """What kopf does by itself when a CRD of this group changes, where it may watch CRDs."""
            event: Any = {"type": "MODIFIED", "object": {"spec": {"group": group}}}
            await process_discovered_resource_event(raw_event=event, settings=own, registry=registry, insights=insights)

        resync = Resync(
            client,
            cache,
            handlers.changed,
            process,
            settings.namespaces,
            interval_s=settings.resync_s,
            discover=discover,
            settle=settle,
        )
        watches = Watches(process)
        work = Work(loops, cache, resync, _election(client, settings, process))
        handlers.register(registry)
        Login(configuration, resync, watches, process, settings.namespaces).register(registry)
        register_probes(registry, watches, loops.healthy, process.leads)
        work.register(registry)
        if (webhook := settings.webhook) is not None:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="webhook-")))
            certificate = Certificate(client, webhook, settings.host, process.leads, folder)
            work.beside.append(certificate.run)
            reviewer = Reviewer(client, reconciler.read_model, settings.server_image, reconciler.grants)
            register_admission(registry, own, certificate, (settings.host, webhook.port), reviewer.review)
        server, _ = start_http_server(settings.port, settings.host, metrics.registry)
        stack.callback(server.shutdown)
        logger.info("metrics on port %d, healthz on port %d", server.server_port, settings.health_port)
        try:
            await kopf.operator(
                registry=registry,
                settings=own,
                insights=insights,
                clusterwide=not settings.namespaces,
                namespaces=settings.namespaces,
                standalone=True,
                liveness_endpoint=f"http://{settings.host}:{settings.health_port}/healthz",
                stop_flag=work.stop,
            )
        except Exception as error:
            raise OperatorEndedError(str(error) or type(error).__name__) from error
        finally:
            await work.end()  # kopf cleans nothing up where it is cancelled
        if work.failure is not None:
            raise work.failure


async def _reconciler(
    stack: AsyncExitStack, client: KubeClient, cache: ObjectCache, settings: OperatorSettings, metrics: OperatorMetrics
) -> Reconciler:
    # Pods are in the cluster, the hub is not: only the latter may be behind a proxy that the environment names.
    inside = await stack.enter_async_context(aiohttp.ClientSession())
    outside = await stack.enter_async_context(aiohttp.ClientSession(trust_env=True))
    token = os.environ.get("HF_TOKEN") if settings.shares_hf_token else None
    reader = ModelReader(outside, settings.file_models_root, settings.hf_endpoint, token)
    prometheus = PrometheusSignals(inside, settings.prometheus_url) if settings.prometheus_url else None
    return Reconciler(
        client,
        cache,
        Applier(client, cache),
        reader.read,
        Signals(PodSignals(inside), prometheus),
        PodModels(inside),
        metrics,
        settings.server_image,
        Grants(client, not settings.namespaces, settings.usable_secrets, settings.allowed_env),
        peers=settings.peers,
    )


def _election(client: KubeClient, settings: OperatorSettings, process: ProcessMetrics) -> Election | None:
    if settings.lease_namespace is None:
        process.lead(lambda: math.inf)
        return None
    election = Election(client, settings.lease_namespace, settings.lease_name)
    client.may_write_s = election.left_s
    process.lead(election.left_s)
    return election
