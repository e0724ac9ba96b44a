"""The operator's process: assembles all parts and runs them under kopf."""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import kopf
from kopf._cogs.structs.references import Insights
from kopf._core.reactor.observation import process_discovered_resource_event
from prometheus_client import start_http_server

from llmservice_operator.api import labels
from llmservice_operator.cluster.applier import Applier
from llmservice_operator.cluster.kube_client import KubeClient, KubeError, load_configuration
from llmservice_operator.cluster.leadership import Election, LeadershipLostError
from llmservice_operator.cluster.object_cache import ObjectCache, collect_seldom, freeze_heap
from llmservice_operator.framework.handlers import Handlers
from llmservice_operator.framework.kopf_settings import kopf_settings, quieten_kopf
from llmservice_operator.framework.public_keys import public_keys_of
from llmservice_operator.framework.resync import Resync
from llmservice_operator.framework.session import Login, Watches, register_probes
from llmservice_operator.framework.webhook import Certificate, register_admission
from llmservice_operator.grants import Grants
from llmservice_operator.loops import ServiceLoops
from llmservice_operator.model_reader import ModelReader
from llmservice_operator.monitoring.metrics import OperatorMetrics, ProcessMetrics
from llmservice_operator.pods.pod_model import PodModels
from llmservice_operator.reconcile import Reconciler
from llmservice_operator.review import Reviewer
from llmservice_operator.settings import OperatorSettings
from llmservice_operator.signals.held import HeldRequests, gateway_urls
from llmservice_operator.signals.sources import PodSignals, PrometheusSignals, SignalError, Signals
from llmservice_planner.addresses import endpoint

logger = logging.getLogger(__name__)


class OperatorEndedError(Exception):
    """kopf has ended for a reason that needs a new start, such as an error event within a watch."""


@dataclass(slots=True, eq=False)
class Work:
    """Runs beside kopf's own tasks: the resynchronisation, and the loops while this process leads.

    kopf starts it once its own start is over and ends it last, after all watches. Every replica fills its cache, so
    that a new leader has the cluster's state already.
    """

    loops: ServiceLoops
    cache: ObjectCache
    resync: Resync
    election: Election | None
    """None: there is no other operator."""
    beside: list[Callable[[], Coroutine[Any, Any, None]]] = field(default_factory=list)
    """Further coroutines that every replica runs."""
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """kopf's stop flag."""
    failure: BaseException | None = None
    """What ended the work, unless kopf did."""
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
        """End all passes, then release the lease, so that the next leader takes it at its next attempt."""
        await self.loops.stop_all()
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.election is not None:
            await self.election.release()
        self.stop.set()  # kopf waits 5 s for tasks that are left, and the one that waits for this flag is its own

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        """Any failure ends the process: half an operator would look healthy."""
        try:
            await work
        except Exception as error:
            self.failure = self.failure or error
            self.stop.set()

    async def _lead(self) -> None:
        """Wait for the whole cache, then for the lease, and run the loops until it is lost."""
        await self.resync.complete.wait()
        if self.election is not None:
            await self.election.acquire()
        self.loops.open(self.cache.services())
        if self.election is not None:
            try:
                await self.election.hold()
            except LeadershipLostError:
                await self.loops.stop_all()  # at once: kopf takes a moment to end its watches
                raise


@dataclass(frozen=True, slots=True)
class Kopf:
    """What `kopf.operator` is called with."""

    settings: kopf.OperatorSettings
    registry: kopf.OperatorRegistry = field(default_factory=kopf.OperatorRegistry)
    insights: Insights = field(default_factory=Insights)

    async def discover(self, group: str) -> None:
        """What kopf does by itself when a CRD of this group changes, where it may watch CRDs."""
        event: Any = {"type": "MODIFIED", "object": {"spec": {"group": group}}}
        await process_discovered_resource_event(
            raw_event=event, settings=self.settings, registry=self.registry, insights=self.insights
        )

    async def run(self, settings: OperatorSettings, work: Work) -> None:
        """Raises OperatorEndedError, and what the work raised."""
        try:
            await kopf.operator(
                registry=self.registry,
                settings=self.settings,
                insights=self.insights,
                clusterwide=not settings.namespaces,
                namespaces=settings.namespaces,
                standalone=True,
                liveness_endpoint=f"http://{endpoint(settings.host, settings.health_port)}/healthz",
                stop_flag=work.stop,
            )
        except Exception as error:
            raise OperatorEndedError(str(error) or type(error).__name__) from error
        finally:
            await work.end()  # kopf cleans nothing up where it is cancelled
        if work.failure is not None:
            raise work.failure


async def run_operator(settings: OperatorSettings) -> None:
    """Run until SIGTERM or SIGINT.

    Raises ConfigException where no cluster is configured, KeyFileError, OSError where a port is in use,
    LeadershipLostError and OperatorEndedError.
    """
    collect_seldom()
    quieten_kopf()
    configuration = await load_configuration()
    own = Kopf(kopf_settings(settings))
    async with AsyncExitStack() as stack:
        client = KubeClient.of(configuration)
        stack.push_async_callback(client.close)
        metrics, cache = OperatorMetrics(), ObjectCache()
        process = metrics.process
        client.answered = process.answered
        reconciler = await _reconciler(stack, client, cache, settings, metrics)
        loops = ServiceLoops(reconciler.run_pass, settings.tick_s, metrics)
        reconciler.held.wake = loops.start
        process.track(loops, cache)
        handlers = Handlers(cache, loops, reconciler.forget, process)
        resync = Resync(
            client,
            cache,
            handlers.changed,
            process,
            settings.namespaces,
            interval_s=settings.resync_s,
            discover=own.discover,
            on_complete=freeze_heap,
        )
        watches = Watches(process)
        work = Work(loops, cache, resync, _election(client, settings, process), [reconciler.held.run])
        handlers.register(own.registry)
        Login(configuration, resync, watches, process, settings.namespaces).register(own.registry)
        register_probes(own.registry, watches, loops.healthy, process.leads)
        work.register(own.registry)
        if settings.webhook is not None:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="webhook-")))
            certificate = Certificate(client, settings.webhook, settings.host, process.leads, folder)
            work.beside.append(certificate.run)
            reviewer = Reviewer(client, reconciler.read_model, settings.server_image, reconciler.grants)
            address = (settings.host, settings.webhook.port)
            register_admission(own.registry, own.settings, certificate, address, reviewer.review)
        server, _ = start_http_server(settings.port, settings.host, metrics.registry)
        stack.callback(server.shutdown)
        logger.info("metrics on port %d, healthz on port %d", server.server_port, settings.health_port)
        await own.run(settings, work)


async def _reconciler(
    stack: AsyncExitStack, client: KubeClient, cache: ObjectCache, settings: OperatorSettings, metrics: OperatorMetrics
) -> Reconciler:
    # Pods are in the cluster; the hub may be behind a proxy of the environment.
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
        Grants(client, not settings.namespaces, settings.usable_secrets(), settings.allowed_env),
        HeldRequests(inside, partial(gateways, client, settings), counted=metrics.held_read),
        peers=settings.peers(),
        public_keys=public_keys_of(settings.gateway_public_keys) if settings.gateway_public_keys else lambda: None,
    )


async def gateways(client: KubeClient, settings: OperatorSettings) -> list[str]:
    """The metrics ports of all gateways; raises SignalError."""
    if settings.own_namespace is None:
        return list(settings.gateway_urls)
    try:
        pods = await client.list_pods(settings.own_namespace, labels.GATEWAYS)
    except KubeError as error:
        raise SignalError(str(error)) from error
    return [*settings.gateway_urls, *gateway_urls(pods)]


def _election(client: KubeClient, settings: OperatorSettings, process: ProcessMetrics) -> Election | None:
    if not settings.leader_elect or settings.lease_namespace is None:
        process.lead(lambda: math.inf)
        return None
    election = Election(client, settings.lease_namespace, settings.lease_name)
    client.may_write_s = election.left_s
    process.lead(election.left_s)
    return election
