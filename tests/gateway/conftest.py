"""A cluster API that a test writes to, and pods that are small HTTP servers on loopback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from llmservice_gateway.app import Gateway, GatewayConfig
from llmservice_gateway.reflector import APIStatusError
from llmservice_gateway.routing import Routing


class FakeCluster:
    """The two calls of the Kubernetes API that reflectors make, answered from lists that a test fills."""

    def __init__(self) -> None:
        self.items: dict[str, list[dict[str, Any]]] = {"llmservices": [], "pods": []}
        self.events: dict[str, asyncio.Queue[dict[str, Any] | Exception | None]] = {
            "llmservices": asyncio.Queue(),
            "pods": asyncio.Queue(),
        }
        self.calls: list[tuple[str, str, dict[str, str]]] = []
        self.list_failures: list[Exception] = []
        self.version = 1

    async def list(self, path: str, query: dict[str, str]) -> dict[str, Any]:
        self.calls.append(("list", path, query))
        if self.list_failures:
            raise self.list_failures.pop(0)
        items = [item for item in self.items[path.rsplit("/", 1)[1]] if _scoped(path, item)]
        return {"metadata": {"resourceVersion": str(self.version)}, "items": items}

    async def watch(self, path: str, query: dict[str, str]) -> AsyncGenerator[bytes, None]:
        self.calls.append(("watch", path, query))
        while (event := await self.events[path.rsplit("/", 1)[1]].get()) is not None:
            if isinstance(event, Exception):
                raise event
            yield json.dumps(event).encode() + b"\n"

    def emit(self, kind: str, event_type: str, item: dict[str, Any]) -> None:
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        self.events[kind].put_nowait({"type": event_type, "object": item})

    def gone(self) -> APIStatusError:
        return APIStatusError(410, "too old resource version")


def _scoped(path: str, item: dict[str, Any]) -> bool:
    return "/namespaces/" not in path or f"/namespaces/{item['metadata']['namespace']}/" in path


@dataclass
class FakePod:
    """A pod's HTTP server. `answer` may be set by a test; by default it echoes who it is."""

    name: str
    port: int = 0
    requests: list[tuple[web.Request, bytes]] = field(default_factory=list)
    disconnected: asyncio.Event = field(default_factory=asyncio.Event)
    answer: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append((request, await request.read()))
        try:
            return await self.answer(request) if self.answer else web.json_response({"pod": self.name})
        except asyncio.CancelledError:
            self.disconnected.set()
            raise

    def manifest(self, service: str, namespace: str = "default", ready: bool = True) -> dict[str, Any]:
        return {
            "metadata": {
                "name": self.name,
                "namespace": namespace,
                "uid": f"uid-{self.name}",
                "labels": {"app.kubernetes.io/instance": service},
            },
            "spec": {"containers": [{"name": "server", "ports": [{"name": "http", "containerPort": self.port}]}]},
            "status": {"podIP": "127.0.0.1", "conditions": [{"type": "Ready", "status": "True" if ready else "False"}]},
        }


async def listen(app: web.Application) -> tuple[web.AppRunner, int]:
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, runner.addresses[0][1]


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


@pytest.fixture
async def start_pod() -> AsyncIterator[Callable[[str], Awaitable[FakePod]]]:
    runners: list[web.AppRunner] = []

    async def start(name: str) -> FakePod:
        pod = FakePod(name)
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", pod.handle)
        runner, pod.port = await listen(app)
        runners.append(runner)
        return pod

    yield start
    for runner in runners:
        await runner.cleanup()


@dataclass
class Front:
    """A running gateway and a client of it."""

    gateway: Gateway
    routing: Routing
    client: aiohttp.ClientSession

    async def until(self, model: str, pods: int) -> None:
        """Wait for the table to hold `pods` ready pods of `model`."""
        async with asyncio.timeout(5):
            while self.ready_pods(model) != pods:
                await asyncio.sleep(0)

    def ready_pods(self, model: str) -> int | None:
        """None while the gateway does not know the model."""
        routes = self.routing.table.routes.get(model)
        return sum(len(route.backends) for route in routes) if routes else None


@pytest.fixture
async def front(cluster: FakeCluster) -> AsyncIterator[Front]:
    routing = Routing(cluster)
    gateway = Gateway(routing, GatewayConfig(max_body_bytes=4096, read_timeout_s=5))
    runner, port = await listen(gateway.app())
    following = asyncio.create_task(routing.run())
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
        yield Front(gateway, routing, client)
    following.cancel()
    await asyncio.wait([following])
    await runner.cleanup()
