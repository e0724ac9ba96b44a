"""What operator_scale.py runs the operator against: an API server, and pods that are ready without a node.

The API is the emulator in a process of its own, or the kube-apiserver that KUBEBUILDER_ASSETS names. Instead of
controllers and nodes, `FakeFleet` gives every Deployment its ready pods and a settled status. The pods share one
loopback address where a process answers /metrics as an idle server does: the operator scrapes as many times as there
are pods.

    python benchmarks/fake_fleet.py api|pods        what the benchmark starts; each prints where it listens
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, web

from llmservice_local.api.errors import ApiError
from llmservice_local.client import DEPLOYMENTS, PODS, KubeClient
from llmservice_local.endpoint import Endpoint

Object = dict[str, Any]
Key = tuple[str, str]

POD_ADDRESS = "127.77.0.1"
METRICS_PORT = 8001


@dataclass
class FakeFleet:
    """Controllers, scheduler and kubelets in one watch; also the stopwatch of Deployment changes."""

    client: KubeClient
    deployments: dict[Key, Object] = field(default_factory=dict)
    awaited: dict[Key, tuple[str, asyncio.Future[float]]] = field(default_factory=dict)
    """By Deployment: an argument that its container is to get, and the moment at which it did."""
    _pods: set[Key] = field(default_factory=set)
    _work: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(self) -> None:
        listed = await self.client.list(DEPLOYMENTS)
        version = listed["metadata"]["resourceVersion"]
        while True:
            async for event in self.client.watch(DEPLOYMENTS, version):
                version = event["object"]["metadata"]["resourceVersion"]
                if event["type"] in {"ADDED", "MODIFIED"}:
                    self._changed(event["object"])

    def expect(self, key: Key, argument: str) -> asyncio.Future[float]:
        """The moment (monotonic) at which this Deployment's server gets this argument."""
        moment: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self.awaited[key] = (argument, moment)
        return moment

    def _changed(self, deployment: Object) -> None:
        metadata = deployment["metadata"]
        key = (metadata["namespace"], metadata["name"])
        self.deployments[key] = deployment
        if key in self.awaited:
            argument, moment = self.awaited[key]
            if argument in " ".join(deployment["spec"]["template"]["spec"]["containers"][0]["args"]):
                moment.set_result(time.monotonic())
                del self.awaited[key]
        if deployment.get("status", {}).get("observedGeneration") != metadata["generation"]:
            task = asyncio.create_task(self._settle(key, deployment))
            self._work.add(task)
            task.add_done_callback(self._work.discard)

    async def _settle(self, key: Key, deployment: Object) -> None:
        if key not in self._pods:
            self._pods.add(key)
            await self._start_pod(key, deployment)
        replicas = deployment["spec"]["replicas"]
        counts = dict.fromkeys(("replicas", "readyReplicas", "availableReplicas", "updatedReplicas"), replicas)
        status = {"observedGeneration": deployment["metadata"]["generation"], **counts}
        await self.client.merge(DEPLOYMENTS, deployment, {"status": status}, subresource="status")

    async def _start_pod(self, key: Key, deployment: Object) -> None:
        template = deployment["spec"]["template"]
        ports = template["spec"]["containers"][0]["ports"]
        container = {"name": "server", "image": "img:1", "command": ["llmservice"], "ports": ports}
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"{key[1]}-0", **template["metadata"]},
            "spec": {"containers": [container], "automountServiceAccountToken": False},
        }
        try:
            made = await self.client.create(PODS, key[0], pod)
        except ApiError as error:
            if error.code != 409:
                raise
            return
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": now}
        addresses = {"podIP": POD_ADDRESS, "podIPs": [{"ip": POD_ADDRESS}]}
        status = {"phase": "Running", **addresses, "conditions": [ready]}
        await self.client.merge(PODS, made, {"status": status}, subresource="status")


async def serve_pods() -> None:
    """One server's /metrics page, as an idle one with some history shows it, on the address of all pods."""
    from llmservice_server.messages import Ready
    from llmservice_server.metrics import Metrics

    metrics = Metrics("llmservice_", "model")
    figures = {"max_model_len": 512, "max_num_seqs": 8, "block_size": 16, "max_request_tokens": 512}
    memory = {"weights": 10**9, "kv_cache": 10**9}
    ready = Ready(
        **figures, num_blocks=1000, embedding_size=64, max_embedding_tokens=512, memory_bytes=memory, load_s=20.0
    )
    metrics.set_ready(ready)
    for _ in range(100):
        metrics.ttft.observe(0.2)
    page = metrics.render()

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=page)

    app = web.Application()
    app.router.add_get("/metrics", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, POD_ADDRESS, METRICS_PORT).start()
    print(f"{POD_ADDRESS}:{METRICS_PORT}, {len(page)} bytes", flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until whoever started us has gone


async def serve_emulator() -> None:
    from llmservice_local.api.serve import serve_api

    async with serve_api() as api:
        print(api.url, flush=True)
        await asyncio.to_thread(sys.stdin.read)


@asynccontextmanager
async def beside(what: str) -> AsyncIterator[str]:
    """Run a part of this file as a process of its own; yields the line that it prints once it listens."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, what, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        line = (await process.stdout.readline()).decode().strip() if process.stdout else ""
        if not line:
            raise RuntimeError(f"the process for {what} ended at once: see above")
        yield line
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


@asynccontextmanager
async def api_server(folder: Path) -> AsyncIterator[tuple[Endpoint, str]]:
    """The API to measure against, and what it is."""
    from llmservice_local.control_plane import serve_control_plane

    async with AsyncExitStack() as stack:
        assets = os.environ.get("KUBEBUILDER_ASSETS")
        if assets is None:
            yield Endpoint(await stack.enter_async_context(beside("api"))), "emulator"
            return
        session = await stack.enter_async_context(ClientSession())
        for name in ("components", "logs"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        plane = serve_control_plane(Path(assets), folder, 0, session)
        yield await stack.enter_async_context(plane), "kube-apiserver"


if __name__ == "__main__":
    gc.disable()  # a full collection takes half a second here, which would be counted as the operator's
    asyncio.run(serve_emulator() if sys.argv[1:] == ["api"] else serve_pods())
