"""An API server that a test writes to, and pods that are small HTTP servers on loopback."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from kubernetes.aio.client import Configuration

from llmservice_gateway.app import Gateway
from llmservice_gateway.reflector import KubernetesAPI
from llmservice_gateway.requests.holding import HoldLimits
from llmservice_gateway.requests.inference import GatewayConfig
from llmservice_gateway.routing.table import Routing
from llmservice_httpserver.listening import HttpServer, bind
from llmservice_httpserver.protocol import BoundedHttpProtocol


class FakeCluster:
    """An API server on loopback. It keeps every event, so a watch delivers what is newer than its resourceVersion."""

    def __init__(self) -> None:
        self.url = ""
        self.version = 1
        self.calls: list[tuple[str, dict[str, str]]] = []
        """Each list and each watch, with its query."""
        self.paths: set[str] = set()
        """Of all these."""
        self.answers: dict[str, list[web.Response | bytes]] = {"list": [], "watch": []}
        """What the next lists and watches get instead; bytes are written as they are, then the connection is closed."""
        self.history: dict[str, list[tuple[int, bytes]]] = {"llmservices": [], "pods": []}
        """Of each kind, the version and the line of every event."""
        self.refused: dict[str, int] = {}
        """The status of each answer to a path that contains this."""
        self.compacted = 0
        """A watch from before this version is answered with 410."""
        self.lists_released = asyncio.Event()
        """While it is not set, lists are read but not sent."""
        self.lists_released.set()
        self._items: dict[str, dict[str, dict[str, Any]]] = {"llmservices": {}, "pods": {}}
        self._changed = asyncio.Event()
        self._ended_watches = 0

    def add_kind(self, plural: str) -> None:
        """Serve another kind of objects, of which there are none yet."""
        self.history[plural], self._items[plural] = [], {}

    async def handle(self, request: web.Request) -> web.StreamResponse:
        call, kind = "watch" if "watch" in request.query else "list", request.path.rsplit("/", 1)[1]
        self.calls.append((call, dict(request.query)))
        self.paths.add(request.path)
        for part, status in self.refused.items():
            if part in request.path:
                return web.json_response(self.status(status, "Refused"), status=status)
        if self.answers[call]:
            answer = self.answers[call].pop(0)
            return await _write_and_close(request, answer) if isinstance(answer, bytes) else answer
        if call == "watch":
            return await self._watch(request, kind, int(request.query["resourceVersion"]))
        listed = {"metadata": {"resourceVersion": str(self.version)}, "items": list(self._items[kind].values())}
        body = json.dumps(listed)
        await self.lists_released.wait()
        return web.Response(text=body, content_type="application/json")

    async def _watch(self, request: web.Request, kind: str, version: int) -> web.StreamResponse:
        if version < self.compacted:
            return web.json_response(self.status(410, "Expired"), status=410)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        ended_watches = self._ended_watches
        while self._ended_watches == ended_watches:
            changed = self._changed
            for newer, line in self.history[kind]:
                if newer > version:
                    await response.write(line)
                    version = newer
            await changed.wait()
        return response

    def emit(self, kind: str, event_type: str, item: dict[str, Any]) -> None:
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        key = f"{item['metadata'].get('namespace')}/{item['metadata'].get('name')}"
        if event_type == "DELETED":
            self._items[kind].pop(key)
        else:
            self._items[kind][key] = item
        self.history[kind].append((self.version, self.line(event_type, item)))
        self._wake_watches()

    def end_watches(self) -> None:
        """Ends the open watches, as the API server does at their timeout."""
        self._ended_watches += 1
        self._wake_watches()

    @staticmethod
    def line(event_type: str, item: dict[str, Any]) -> bytes:
        return json.dumps({"type": event_type, "object": item}, ensure_ascii=False).encode() + b"\n"

    @staticmethod
    def status(code: int, reason: str) -> dict[str, Any]:
        """The object that an API server answers with instead of what was requested."""
        return {"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": f"because {reason}"}

    def _wake_watches(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


async def _write_and_close(request: web.Request, answer: bytes) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.write(answer)
    request.transport.close()
    await asyncio.Event().wait()  # until the connection's end cancels the handler
    raise AssertionError("not reached")


@dataclass
class FakePod:
    """A pod's HTTP server. `answer` may be set by a test; by default it returns its own name."""

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


async def _never_ending(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b"data: 1\n\n")
    await asyncio.Event().wait()
    return response


@pytest.fixture
def never_ending() -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Answers of a pod: one event, and then none."""
    return _never_ending


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    cluster = FakeCluster()
    app = web.Application()
    app.router.add_get("/{path:.*}", cluster.handle)
    runner, port = await listen(app)
    cluster.url = f"http://127.0.0.1:{port}"
    yield cluster
    await runner.cleanup()


@pytest.fixture
async def api(cluster: FakeCluster) -> AsyncIterator[KubernetesAPI]:
    async with KubernetesAPI(Configuration(host=cluster.url)) as api:
        yield api


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
    metrics: aiohttp.ClientSession
    """Of the port for /metrics."""
    url: str
    access: Any = None

    async def until(self, model: str, pods: int) -> None:
        """Wait for the table to hold `pods` ready pods of `model`."""
        async with asyncio.timeout(5):
            while self.ready_pods(model) != pods:
                await asyncio.sleep(0)

    def ready_pods(self, model: str) -> int | None:
        """None while the gateway does not know the model."""
        routes = self.routing.table.routes.get(model)
        return sum(len(route.backends) for route in routes) if routes else None


@asynccontextmanager
async def serving(app: Any, client_timeout_s: float = 5.0, **settings: Any) -> AsyncIterator[str]:
    """The URL of `app`, served as `llmservice gateway` serves it; ended at once."""
    server = HttpServer(app, BoundedHttpProtocol.with_timeout(client_timeout_s), **settings)
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    listener = bind("127.0.0.1", 0, "--port")
    await server.startup(sockets=[listener])
    await server.on_tick(0)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        for listening in server.servers:
            listening.close()
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        await asyncio.gather(*server.server_state.tasks, return_exceptions=True)


@asynccontextmanager
async def gateway_front(api: KubernetesAPI, config: GatewayConfig, **arguments: Any) -> AsyncIterator[Front]:
    routing = Routing(api)
    gateway = Gateway(routing, config, **arguments)
    following = asyncio.create_task(routing.run())
    async with (
        serving(gateway.app(), config.client_timeout_s) as url,
        serving(gateway.metrics_app()) as metrics_url,
        aiohttp.ClientSession(url) as client,
        aiohttp.ClientSession(metrics_url) as metrics,
    ):
        yield Front(gateway, routing, client, metrics, url)
    following.cancel()
    await asyncio.wait([following])
    await gateway.close()


@pytest.fixture(name="serving")
def serving_fixture() -> Any:
    return serving


@pytest.fixture(name="gateway_front")
def gateway_front_fixture(api: KubernetesAPI) -> Any:
    return partial(gateway_front, api)


@pytest.fixture
async def front(api: KubernetesAPI) -> AsyncIterator[Front]:
    """A gateway that holds no requests."""
    config = GatewayConfig(max_body_bytes=4096, read_timeout_s=5, client_timeout_s=5, hold=HoldLimits(timeout_s=0))
    async with gateway_front(api, config) as front:
        yield front


class RedisServer:
    """A real one, on a socket in a folder of its own: `start` and `stop` it at will."""

    def __init__(self, folder: Path) -> None:
        self.url = f"unix://{folder}/redis.sock"
        self._command = ["redis-server", "--port", "0", "--unixsocket", f"{folder}/redis.sock", "--save", ""]
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen([*self._command, "--dir", self._folder], stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if b"eady to accept connections" in line:
                return
        raise AssertionError("redis-server has ended")

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


@pytest.fixture(scope="session")
def redis_of() -> Iterator[Callable[[Path], RedisServer]]:
    """Makes one for an empty folder."""
    made: list[RedisServer] = []

    def make(folder: Path) -> RedisServer:
        made.append(RedisServer(folder))
        return made[-1]

    yield make
    for server in made:
        server.stop()
