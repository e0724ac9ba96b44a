"""The cluster of operator_scale.py: an API server, and ready pods without a node.

The API is the emulator in its own process, or the kube-apiserver of KUBEBUILDER_ASSETS. Instead of controllers and
nodes, `FakeFleet` creates the ready pods of every Deployment and sets its status. All pods share one loopback address,
where a process serves the /metrics of an idle server.

    python benchmarks/fake_fleet.py api|pods        started by the benchmark; each prints its address
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

from llmservice_local.client import DEPLOYMENTS, PODS, Endpoint, KubeClient
from llmservice_local.errors import ApiError

Object = dict[str, Any]
Key = tuple[str, str]

POD_ADDRESS = "127.77.0.1"
METRICS_PORT = 8001


@dataclass
class FakeFleet:
    """Replaces controllers, scheduler and kubelets, and measures when Deployments change."""

    client: KubeClient
    deployments: dict[Key, Object] = field(default_factory=dict)
    awaited: dict[Key, tuple[str, asyncio.Future[float]]] = field(default_factory=dict)
    """By Deployment: an expected argument of its container, and the time when it was set."""
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
        """A future of the time (monotonic) when this Deployment's server gets this argument."""
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
    """Serve the /metrics page of an idle server on the address of all pods."""
    from llmservice_server.ipc.metrics import Metrics
    from llmservice_server.types.messages import Ready

    metrics = Metrics("llmservice_", "model")
    ready = Ready(
        max_model_len=512,
        max_num_seqs=8,
        block_size=16,
        num_blocks=1000,
        max_request_tokens=512,
        embedding_size=64,
        max_embedding_tokens=512,
        memory_bytes={"weights": 10**9, "kv_cache": 10**9},
        architecture="LlamaForCausalLM",
        model_code="own",
        load_s=20.0,
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
    await asyncio.to_thread(sys.stdin.read)  # until the parent process has ended


async def serve_emulator() -> None:
    from llmservice_local.api.serve import serve_api

    async with serve_api() as api:
        print(api.url, flush=True)
        await asyncio.to_thread(sys.stdin.read)


@asynccontextmanager
async def beside(what: str) -> AsyncIterator[str]:
    """Run a part of this file in its own process; yields the line that it prints when it listens."""
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
    """The endpoint of the API server, and its kind."""
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
    gc.disable()  # a full garbage collection takes 0.5 s here, which would be attributed to the operator
    asyncio.run(serve_emulator() if sys.argv[1:] == ["api"] else serve_pods())
