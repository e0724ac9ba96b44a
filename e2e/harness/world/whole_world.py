"""An API server that can fail, the whole operator, a slow cluster around them, and a clock that jumps.

Everything runs in one loop, on a `JumpingLoop`, over Unix sockets.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from kubernetes.aio import client as kubernetes_client

from harness.definitions import definition
from harness.world.faulty_front import FaultyFront
from harness.world.slow_cluster import SlowCluster
from harness.world.whole_operator import WholeOperator
from llmservice_local.api.registry import MERGE_PATCH, DeleteOptions, Registry, WriteOptions
from llmservice_local.api.serve import api_application
from llmservice_local.api.store import Store
from llmservice_operator.api.crd import crd
from llmservice_operator.api.kinds import CHILD_KINDS
from llmservice_operator.api.resource import API_VERSION, GROUP, KIND, PLURAL, VERSION

Object = dict[str, Any]

NAMESPACE = "team-a"
FROM_CRDS = tuple(kind.name for kind in CHILD_KINDS.values() if not kind.built_in)
_EPOCH_S = 1_700_000_000.0


@dataclass
class World:
    """An API server that can fail, the cluster around it, and a clock."""

    registry: Registry
    front: FaultyFront
    cluster: SlowCluster
    operator: Callable[[], WholeOperator]
    begun_s: float = 0.0
    """When the play began, by the loop's clock."""
    before_s: float = 0.0
    """What had passed in the world by then."""

    _uids: Iterator[int] = field(default_factory=itertools.count)

    def begin(self, before: Store, passed_s: float) -> None:
        """Once more from this state of the API server, at which so much time has passed."""
        random.seed(0)  # the loops' jitter
        self.registry.store = before.copy()
        self.begun_s, self.before_s = asyncio.get_running_loop().time(), passed_s
        self._uids = itertools.count(before.revision * 1000)

    def new_uid(self) -> str:
        return f"uid-{next(self._uids):06d}-"

    def now(self) -> float:
        return _EPOCH_S + self.before_s + asyncio.get_running_loop().time() - self.begun_s

    def create(
        self, plural: str, body: Object, group: str = GROUP, version: str = VERSION, namespace: str = ""
    ) -> None:
        kind = self.registry.kinds.find(group, version, plural)
        self.registry.create(kind, namespace, body, WriteOptions("user"))

    def create_service(self, spec: Object) -> None:
        body = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "tiny"}, "spec": spec}
        self.create(PLURAL, body, namespace=NAMESPACE)

    def edit(self, spec: Object) -> None:
        kind = self.registry.kinds.find(GROUP, VERSION, PLURAL)
        self.registry.patch(kind, NAMESPACE, "tiny", {"spec": spec}, MERGE_PATCH, WriteOptions("user"))

    def delete(self) -> None:
        kind = self.registry.kinds.find(GROUP, VERSION, PLURAL)
        self.registry.delete(kind, NAMESPACE, "tiny", DeleteOptions())

    def install(self, kind: str) -> None:
        """A CRD that takes everything, for a kind of another project."""
        self.define(definition(CHILD_KINDS[kind].group, kind))

    def define(self, body: Object) -> None:
        self.create("customresourcedefinitions", body, "apiextensions.k8s.io", "v1")


@asynccontextmanager
async def whole_world(folder: Path) -> AsyncIterator[World]:
    """With LLMServices, a namespace, and nothing else; `folder` is for its sockets."""
    worlds: list[World] = []
    registry = Registry(
        lambda: datetime.fromtimestamp(worlds[0].now() if worlds else _EPOCH_S, tz=UTC), lambda: _uid(worlds)
    )
    front, cluster = FaultyFront(), SlowCluster(registry)
    pods = web.Application()
    pods.router.add_get("/metrics", cluster.metrics)
    async with AsyncExitStack() as stack:
        path = await stack.enter_async_context(_served(pods, folder / "pods"))
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.UnixConnector(path)))
        api = api_application(registry, session, [front.handle])
        path = await stack.enter_async_context(_served(api, folder / "api"))
        connector = aiohttp.UnixConnector(path)
        stack.push_async_callback(connector.close)
        configuration = kubernetes_client.Configuration(host="http://api")
        configuration.client_session_kwargs = {"connector": connector, "trust_env": False}
        kube = kubernetes_client.ApiClient(configuration)
        stack.push_async_callback(kube.close)
        world = World(registry, front, cluster, lambda: WholeOperator(kube, session, registry, world.now))
        worlds.append(world)
        world.create("namespaces", {"metadata": {"name": NAMESPACE}}, "", "v1")
        world.define(crd())
        yield world


def _uid(worlds: list[World]) -> str:
    return worlds[0].new_uid() if worlds else "uid-of-the-beginning"


@asynccontextmanager
async def _served(application: web.Application, path: Path) -> AsyncIterator[str]:
    runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.UnixSite(runner, path).start()
    try:
        yield str(path)
    finally:
        await runner.cleanup()
