"""`llmservice operator` as a process of its own, and one service, `tiny`, that it reconciles."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from llmservice_local.loopback import free_port
from llmservice_operator.api.kinds import CHILD_KINDS, LLMSERVICES
from llmservice_operator.cluster.kube_client import KubeClient
from llmservice_planner.addresses import endpoint

SHAPE = {"layers": 2, "heads": 4, "hiddenSize": 64, "intermediateSize": 128, "vocabSize": 512}
SPEC: dict[str, Any] = {"model": {"uri": "hf://org/name", "shape": SHAPE}, "engine": {"maxModelLen": 512}}
_MAIN = "import sys; from llmservice_planner.command import main; sys.exit(main())"


@dataclass
class OperatorProcess:
    process: asyncio.subprocess.Process
    log: Path
    health_port: int
    host: str = field(default="127.0.0.1", kw_only=True)

    @property
    def leads(self) -> bool:
        return " leads" in self.log.read_text()

    def has_logged(self, text: str, times: int = 1) -> bool:
        return self.log.read_text().count(text) >= times

    async def metrics(self) -> str:
        port = re.search(r"metrics on port (\d+)", self.log.read_text())
        assert port is not None, "the operator has not started"
        return await self._get(f"http://{endpoint(self.host, int(port[1]))}/metrics")

    async def health(self) -> str:
        return await self._get(f"http://{endpoint(self.host, self.health_port)}/healthz")

    async def _get(self, url: str) -> str:
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            response.raise_for_status()
            return await response.text()

    async def ended(self) -> int:
        async with asyncio.timeout(20):
            return await self.process.wait()


Start = Callable[..., Awaitable[OperatorProcess]]


@asynccontextmanager
async def operator_processes(folder: Path) -> AsyncIterator[Start]:
    """Yields a function that starts an operator with a kubeconfig and flags; all are killed at the end."""
    started: list[OperatorProcess] = []

    async def start(kubeconfig: Path, *flags: str) -> OperatorProcess:
        log, health_port = folder / f"operator-{len(started)}.log", free_port()
        command = ["operator", "--port", "0", "--host", "127.0.0.1", "--server-image", "img:1"]
        command += ["--health-port", str(health_port), *flags]
        environment = {**os.environ, "KUBECONFIG": str(kubeconfig)}
        with log.open("wb") as errors:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", _MAIN, *command, env=environment, stderr=errors
            )
        started.append(OperatorProcess(process, log, health_port))
        return started[-1]

    try:
        yield start
    finally:
        for one in started:
            if one.process.returncode is None:
                one.process.send_signal(signal.SIGCONT)
                one.process.kill()
            await one.process.wait()


async def until(check: Callable[[], Any], limit_s: float = 30.0) -> float:
    """Poll until `check` is true, which may be a coroutine function; returns the seconds that it took."""
    started = time.monotonic()
    async with asyncio.timeout(limit_s):
        while not (await found if asyncio.iscoroutine(found := check()) else found):
            await asyncio.sleep(0.05)
    return time.monotonic() - started


async def create_service(kube: KubeClient, namespace: str = "team-a", **spec: Any) -> None:
    metadata = {"name": "tiny", "namespace": namespace}
    body = {"apiVersion": LLMSERVICES.api_version, "kind": LLMSERVICES.name, "metadata": metadata}
    path = LLMSERVICES.path(namespace)
    await kube.request("POST", path, body={**body, "spec": {**SPEC, **spec}}, content_type="application/json")


async def change_replicas(kube: KubeClient, replicas: int) -> None:
    await kube.request("PATCH", LLMSERVICES.path("team-a", "tiny"), body={"spec": {"replicas": replicas}})


async def has_replicas(kube: KubeClient, replicas: int) -> bool:
    deployment = await kube.get_child(CHILD_KINDS["Deployment"], "team-a", "tiny")
    return deployment is not None and deployment["spec"]["replicas"] == replicas
