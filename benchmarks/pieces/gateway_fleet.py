"""A gateway process that follows an emulated API with one service, and what is measured beside it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from llmservice_local.api.serve import serve_api
from llmservice_local.client import DEFINITIONS, PODS, Endpoint, KubeClient, Resource, connect
from llmservice_local.errors import ApiError
from llmservice_local.loopback import free_port
from llmservice_operator.api.crd import crd
from pieces.timing import cpu_s

SERVICES = Resource("serving.llmservice.io/v1alpha1", "llmservices")
NAMESPACE = "default"
STREAM_PODS = str(Path(__file__).resolve().parents[1] / "stream_pods.py")
_START_TIMEOUT_S = 60.0
_OTHER_SIZING = {
    **dict.fromkeys(("maxModelLen", "kvBytesPerToken", "blocks"), 1),
    **dict.fromkeys(("weightsGiB", "overheadGiB", "kvPoolGiB"), 1.0),
    "limitedBy": "maxNumSeqs",
    "explanation": "",
}
"""What the schema requires beside the only figure that the gateway reads."""
_NGINX = """\
daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log stderr error;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_body_temp_path {folder}; proxy_temp_path {folder}; fastcgi_temp_path {folder};
  uwsgi_temp_path {folder}; scgi_temp_path {folder};
  upstream pods {{ least_conn; {servers} keepalive 512; }}
  server {{
    listen 127.0.0.1:{port} backlog=2048;
    location / {{
      proxy_pass http://pods; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
      proxy_read_timeout 600s; keepalive_requests 1000000;
    }}
  }}
}}
"""


@dataclass(frozen=True, slots=True)
class Front:
    """A process in front of the pods."""

    url: str
    process_id: int
    metrics_url: str | None = None

    def cpu_s(self) -> float:
        """What the process and its children have used so far."""
        children = Path(f"/proc/{self.process_id}/task/{self.process_id}/children").read_text(encoding="ascii")
        return sum(map(cpu_s, (self.process_id, *map(int, children.split()))))


async def metrics(url: str) -> dict[str, float]:
    """The sum of each metric over its labels."""
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        text = await response.text()
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


@dataclass
class Cluster:
    """The emulated API, and the gateway's view of it."""

    client: KubeClient
    kubeconfig: Path
    folder: Path

    async def add_service(self, name: str, ports: Sequence[int], max_num_seqs: int, strategy: str | None) -> None:
        """A service whose ready pods listen on these ports of loopback."""
        spec: dict[str, Any] = {
            "model": {"uri": "hf://org/name"},
            "resources": {"gpu": {"count": 0}, "requests": {"cpu": "1", "memory": "4Gi"}},
        }
        if strategy is not None:
            spec["routing"] = {"strategy": strategy}
        service = {"apiVersion": SERVICES.api_version, "kind": "LLMService", "metadata": {"name": name}, "spec": spec}
        made = await self.client.create(SERVICES, NAMESPACE, service)
        sizing = {"maxNumSeqs": max_num_seqs, **_OTHER_SIZING}
        await self.client.merge(SERVICES, made, {"status": {"sizing": sizing}}, subresource="status")
        labels = {
            "app.kubernetes.io/name": "llmservice",
            "app.kubernetes.io/component": "server",
            "app.kubernetes.io/instance": name,
        }
        for number, port in enumerate(ports):
            container = {"name": "server", "image": "img:1", "ports": [{"name": "http", "containerPort": port}]}
            pod = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": f"{name}-{number}", "labels": labels},
                "spec": {"containers": [container], "automountServiceAccountToken": False},
            }
            made = await self.client.create(PODS, NAMESPACE, pod)
            status = {"podIP": "127.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}
            await self.client.merge(PODS, made, {"status": {"phase": "Running", **status}}, subresource="status")

    @asynccontextmanager
    async def gateway(self, *flags: str) -> AsyncIterator[Front]:
        """A gateway process that has read the cluster; it ends with the block."""
        port, metrics_port = free_port(), free_port()
        command = ["gateway", "--host", "127.0.0.1", "--port", str(port), "--metrics-port", str(metrics_port)]
        environment = os.environ | {"KUBECONFIG": str(self.kubeconfig), "POD_NAMESPACE": NAMESPACE}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "llmservice_planner", *command, "--log-level", "error", *flags, env=environment
        )
        url = f"http://127.0.0.1:{port}"
        async with _ending(process):
            await until(lambda: _answers(f"{url}/ready"))
            yield Front(url, process.pid, f"http://127.0.0.1:{metrics_port}/metrics")


@asynccontextmanager
async def nginx(ports: Sequence[int], folder: Path) -> AsyncIterator[Front]:
    """nginx as a plain proxy with one worker. Raises SystemExit where it is not installed."""
    binary = shutil.which("nginx")
    if binary is None:
        raise SystemExit("nginx is not installed, which is measured beside the gateway: apt-get install nginx")
    port = free_port()
    servers = " ".join(f"server 127.0.0.1:{each};" for each in ports)
    config = folder / "nginx.conf"
    config.write_text(_NGINX.format(folder=folder, servers=servers, port=port), encoding="utf-8")
    process = await asyncio.create_subprocess_exec(binary, "-p", str(folder), "-c", str(config))
    url = f"http://127.0.0.1:{port}"
    async with _ending(process):
        await until(lambda: _listens(port))
        yield Front(url, process.pid)


@asynccontextmanager
async def cluster() -> AsyncIterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="gateway-bench-") as name:
        folder = Path(name)
        async with serve_api() as api:
            endpoint = Endpoint(api.url)
            endpoint.write_kubeconfig(folder / "kubeconfig")
            async with connect(endpoint, "gateway-bench") as client:
                await client.create(DEFINITIONS, None, crd())
                await until(lambda: is_served(client))
                yield Cluster(client, folder / "kubeconfig", folder)


@asynccontextmanager
async def stream_pods(num_pods: int, period_s: float) -> AsyncIterator[list[int]]:
    """The ports of pods that send an event to each stream every `period_s`."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, STREAM_PODS, str(num_pods), str(period_s), stdout=asyncio.subprocess.PIPE
    )
    async with _ending(process):
        assert process.stdout is not None  # noqa: S101 - the process has a pipe
        yield json.loads(await process.stdout.readline())


async def until(check: Callable[[], Awaitable[bool]]) -> None:
    """Wait for a condition of another process. Raises TimeoutError."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not await check():
        if time.monotonic() > deadline:
            raise TimeoutError("a process did not start in time: see above")
        await asyncio.sleep(0.05)


async def is_served(client: KubeClient) -> bool:
    try:
        await client.list(SERVICES)
    except ApiError:
        return False
    return True


async def _answers(url: str) -> bool:
    try:
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


@asynccontextmanager
async def _ending(process: asyncio.subprocess.Process) -> AsyncIterator[None]:
    try:
        yield
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
