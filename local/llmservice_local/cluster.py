"""The whole local cluster: API, controllers, node, operator, gateway and Prometheus, as one context manager.

async with LocalCluster(ClusterSettings(state_dir=path)) as cluster:
    cluster.kubeconfig, cluster.api_url, cluster.gateway_url
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from urllib.parse import urlsplit

from aiohttp import ClientSession

from llmservice_local.api.serve import serve_api
from llmservice_local.client import DEFINITIONS, Endpoint, KubeClient, connect
from llmservice_local.component import Component, ComponentSpec
from llmservice_local.control.controller import Controller
from llmservice_local.control.deployment_controller import DeploymentController
from llmservice_local.control.disruption_controller import DisruptionController
from llmservice_local.control.endpoints_controller import EndpointsController
from llmservice_local.control.garbage_collector import GarbageCollector, NamespaceController
from llmservice_local.control.informer import Informers
from llmservice_local.control.replica_set_controller import ReplicaSetController
from llmservice_local.control.scheduler import ClaimController, Scheduler
from llmservice_local.control_plane import AUDIT_LOG, serve_control_plane
from llmservice_local.errors import ApiError
from llmservice_local.loopback import free_port
from llmservice_local.manifests import Part, Release, install_grants, install_webhooks, issue_token
from llmservice_local.node.kubelet import Kubelet, NodeSettings
from llmservice_local.node.process import base_environment
from llmservice_local.prometheus import PrometheusTargets, prometheus_spec
from llmservice_planner.sizing.gpu import find_gpu

CONTROLLERS: tuple[type[Controller], ...] = (
    DeploymentController,
    ReplicaSetController,
    DisruptionController,
    EndpointsController,
    GarbageCollector,
    NamespaceController,
    ClaimController,
    Scheduler,
)
CONTROLLERS_OF_REAL_API = tuple(found for found in CONTROLLERS if found is not EndpointsController)
"""A real API server refuses endpoints with loopback addresses, which all pods of the local nodes have."""
COMPONENT_START_S = 60.0
_LOG = logging.getLogger(__name__)


def _assets() -> Path | None:
    named = os.environ.get("KUBEBUILDER_ASSETS")
    return Path(named) if named else None


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """The parts and the size of the cluster. Port 0 selects a free one."""

    state_dir: Path
    api_port: int = 0
    gateway_port: int = 0
    nodes: int = 1
    """Number of nodes; each has the capacity of the whole machine, or `cpu`, `memory` and `gpus`."""
    gpus: int = 0
    gpu_product: str = "l4"
    """The GPU of the nodes, by its name in the planner's catalogue."""
    cpu: str = ""
    memory: str = ""
    node_labels: Mapping[str, str] = field(default_factory=dict)
    models_root: Path | None = None
    operator: bool = True
    gateway: bool = True
    prometheus: bool = False
    operator_arguments: tuple[str, ...] = ()
    release: Release | None = None
    """Operator and gateway use its accounts and arguments; None: both have all rights."""
    restart_backoff_s: float = 10.0
    assets: Path | None = field(default_factory=_assets)
    """The folder of etcd and kube-apiserver; None: the emulated API."""


class LocalCluster:
    """Starts every part on entry, ends every process on exit."""

    def __init__(self, settings: ClusterSettings) -> None:
        self.settings = settings
        self.kubeconfig = settings.state_dir / "kubeconfig"
        self.endpoint = Endpoint("")
        self.gateway_url = ""
        self.prometheus_url = ""
        self.components: dict[str, Component] = {}
        self._stack = AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []
        self._webhook_port = free_port()
        """The port of the first operator, the only one that the API server calls."""

    @property
    def api_url(self) -> str:
        return self.endpoint.url

    async def __aenter__(self) -> LocalCluster:
        """Raises `ComponentError` if a part does not start, after stopping those already started."""
        async with AsyncExitStack() as stack:
            await self._start(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def failed(self) -> None:
        """Wait until a controller or a node ends unexpectedly; raises its exception."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def _start(self, stack: AsyncExitStack) -> None:
        settings = self.settings
        for folder in ("components", "logs", "volumes"):
            (settings.state_dir / folder).mkdir(parents=True, exist_ok=True)
        session = await stack.enter_async_context(ClientSession())
        if settings.assets is None:
            serving = serve_api(port=settings.api_port, audit=settings.state_dir / AUDIT_LOG)
            api = await stack.enter_async_context(serving)
            self.endpoint = Endpoint(api.url)
        else:
            plane = serve_control_plane(settings.assets, settings.state_dir, settings.api_port, session)
            self.endpoint = await stack.enter_async_context(plane)
        self.endpoint.write_kubeconfig(self.kubeconfig)
        client = await stack.enter_async_context(connect(self.endpoint, "llmservice-local"))
        await _install_definition(client)
        await _until_served(client)
        stack.push_async_callback(self._stop_tasks)
        informers = Informers(client)
        stack.push_async_callback(informers.close)
        controllers = CONTROLLERS if settings.assets is None else CONTROLLERS_OF_REAL_API
        self._tasks = [
            asyncio.create_task(controller(client, informers).run(), name=controller.name) for controller in controllers
        ]
        if settings.prometheus:
            targets = PrometheusTargets(client, informers, self._targets)
            self._tasks.append(asyncio.create_task(targets.run(), name=targets.name))
        if settings.release is not None:
            await self._identify(client, settings.release)
        await self._start_nodes(client, informers)
        await self._start_components(stack, session)

    async def _identify(self, client: KubeClient, release: Release) -> None:
        """Create the accounts of the release, and a kubeconfig for operator and gateway each."""
        await install_grants(client, release)
        await install_webhooks(client, release, self._webhook_port)
        for name, part in release.parts.items():
            own = replace(self.endpoint, token=await issue_token(client, part))
            own.write_kubeconfig(self._kubeconfig_of(name))

    def _kubeconfig_of(self, part: str) -> Path:
        return self.kubeconfig if self.settings.release is None else self.settings.state_dir / f"{part}.kubeconfig"

    async def _start_nodes(self, client: KubeClient, informers: Informers) -> None:
        """Wait until all nodes are registered; raises the exception of a part that failed."""
        count = self.settings.nodes
        names = ["local"] if count == 1 else [f"local-{number}" for number in range(1, count + 1)]
        nodes = {name: Kubelet(client, informers, self._node_settings(name)) for name in names}
        self._tasks += [asyncio.create_task(node.run(), name=f"node {name}") for name, node in nodes.items()]
        for node in nodes.values():
            registered = asyncio.create_task(node.registered.wait())
            await asyncio.wait([registered, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
            registered.cancel()

    def _node_settings(self, name: str) -> NodeSettings:
        settings = self.settings
        return NodeSettings(
            state_dir=settings.state_dir,
            name=name,
            gpus=settings.gpus,
            cpu=settings.cpu,
            memory=settings.memory,
            labels={**_gpu_labels(settings), **settings.node_labels},
            restart_backoff_s=settings.restart_backoff_s,
            secure=settings.assets is not None,
        )

    async def _start_components(self, stack: AsyncExitStack, session: ClientSession) -> None:
        specs: list[ComponentSpec] = []
        if self.settings.prometheus:
            self.prometheus_url = f"http://127.0.0.1:{free_port()}"
        has_gateway = self.settings.gateway and self._has_gateway
        metrics_port = free_port() if has_gateway else 0
        if self.settings.operator:
            specs += self._operator_specs(metrics_port)
        if has_gateway:
            specs.append(self._gateway_spec(metrics_port))
        if self.settings.prometheus:
            own = {spec.name: spec.metrics for spec in specs}
            specs.append(self._prometheus_spec(own))
        self.components = {spec.name: Component(spec) for spec in specs}
        for component in self.components.values():
            stack.push_async_callback(component.stop)
        await asyncio.gather(*(component.start(session, COMPONENT_START_S) for component in self.components.values()))

    def _prometheus_spec(self, own: Mapping[str, str]) -> ComponentSpec:
        log = self.settings.state_dir / "components" / "prometheus.log"
        port = urlsplit(self.prometheus_url).port or 0
        return prometheus_spec(self.settings.state_dir / "prometheus", self._targets, own, log, port)

    @property
    def _targets(self) -> Path:
        return self.settings.state_dir / "prometheus-targets.json"

    def _operator_specs(self, gateway_port: int) -> list[ComponentSpec]:
        """As many operators as the release has replicas; they elect a leader.

        `gateway_port` is that of the gateway's metrics, 0 without a gateway: it is no pod that they could find.
        """
        part = self._part("operator")
        others = range(2, part.replicas + 1 if part is not None else 2)
        names = ("operator", *(f"operator-{number}" for number in others))
        return [self._operator_spec(name, gateway_port) for name in names]

    def _operator_spec(self, name: str, gateway_port: int) -> ComponentSpec:
        port, health_port = free_port(), free_port()
        webhook_port = self._webhook_port if name == "operator" else free_port()
        flags = ["--host", "127.0.0.1", "--port", str(port), "--health-port", str(health_port)]
        flags += ["--webhook-port", str(webhook_port)]
        if self.settings.models_root is not None:
            flags += ["--file-models-root", str(self.settings.models_root)]
        if self.prometheus_url:
            flags += ["--prometheus-url", self.prometheus_url]
        if gateway_port:
            flags += ["--gateway-metrics-url", f"http://127.0.0.1:{gateway_port}"]
        flags += self.settings.operator_arguments
        return self._own_command(name, "operator", flags, f"{health_port}/healthz", port)

    def _gateway_spec(self, metrics_port: int) -> ComponentSpec:
        port = free_port(self.settings.gateway_port)
        self.gateway_url = f"http://127.0.0.1:{port}"
        flags = ["--host", "127.0.0.1", "--port", str(port), "--metrics-port", str(metrics_port)]
        return self._own_command("gateway", "gateway", flags, f"{port}/health", metrics_port)

    @property
    def _has_gateway(self) -> bool:
        return self.settings.release is None or "gateway" in self.settings.release.parts

    def _part(self, command: str) -> Part | None:
        return None if self.settings.release is None else self.settings.release.parts[command]

    def _own_command(self, name: str, command: str, flags: list[str], health: str, metrics_port: int) -> ComponentSpec:
        """The arguments of the release come first, so that local flags override them."""
        part = self._part(command)
        env = {**base_environment(), "KUBECONFIG": str(self._kubeconfig_of(command))}
        if part is not None:
            env["POD_NAMESPACE"] = part.namespace
            flags = [*part.arguments, *flags]
        return ComponentSpec(
            name=name,
            command=[sys.executable, "-m", "llmservice_planner", command, *flags],
            log=self.settings.state_dir / "components" / f"{name}.log",
            health_url=f"http://127.0.0.1:{health}",
            metrics=f"127.0.0.1:{metrics_port}",
            env=env,
        )

    async def _stop_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        for task, result in zip(self._tasks, results, strict=True):
            if isinstance(result, Exception):
                _LOG.error("%s failed", task.get_name(), exc_info=result)


def _gpu_labels(settings: ClusterSettings) -> dict[str, str]:
    """The labels that GPU feature discovery would set; raises UnknownGPU."""
    if not settings.gpus:
        return {}
    gpu = find_gpu(settings.gpu_product)
    return {gpu.label_key: gpu.node_labels[0]}


async def _until_served(client: KubeClient) -> None:
    """Wait until the API serves LLMServices and their OpenAPI document, which kubectl reads."""
    from llmservice_operator.api.resource import GROUP, VERSION

    async with asyncio.timeout(COMPONENT_START_S):
        for path in (f"/apis/{GROUP}/{VERSION}", f"/openapi/v3/apis/{GROUP}/{VERSION}", "/openapi/v2"):
            await _until_answered(client, path)


async def _until_answered(client: KubeClient, path: str) -> None:
    while True:
        try:
            await client.request("GET", path)
            return
        except ApiError as error:
            if error.code == 404 and path == "/openapi/v2":
                return  # the emulated API has no v2, which kubectl does not need
        await asyncio.sleep(0.1)


async def _install_definition(client: KubeClient) -> None:
    """Install the LLMService CRD of the installed operator package."""
    from llmservice_operator.api.crd import crd

    definition = crd()
    try:
        await client.create(DEFINITIONS, None, definition)
    except ApiError as error:
        if error.code != 409:
            raise
        await client.merge(DEFINITIONS, definition, {"spec": definition["spec"]})
