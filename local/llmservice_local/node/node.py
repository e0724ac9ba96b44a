"""The node: registers itself, and runs the pods that are bound to it as processes on this machine."""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, TCPConnector

from llmservice_local.api.discovery import VERSION
from llmservice_local.api.errors import ApiError
from llmservice_local.client import CLAIMS, CONFIG_MAPS, NODES, PODS, SECRETS, KubeClient
from llmservice_local.control.controller import timestamp
from llmservice_local.control.events import Recorder
from llmservice_local.control.informer import Informers
from llmservice_local.node.addresses import AddressBlock
from llmservice_local.node.backoff import FIRST_S
from llmservice_local.node.container_spec import gpu_count
from llmservice_local.node.node_certificate import self_signed
from llmservice_local.node.node_server import serve_node
from llmservice_local.node.pod_worker import PodHost, PodWorker

Object = dict[str, Any]

HOST_IP = "127.0.0.1"
_HEARTBEAT_S = 60.0
_STOP_S = 10.0
_INHERITED = (
    "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ", "USER", "LD_LIBRARY_PATH", "HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT",
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy", "SSL_CERT_FILE", "SSL_CERT_DIR",
    "REQUESTS_CA_BUNDLE", "OMP_NUM_THREADS",
)  # fmt: skip
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """What the node is called and what it says it has."""

    state_dir: Path
    name: str = "local"
    gpus: int = 0
    cpu: str = ""
    """As a quantity; empty: this machine's cores."""
    memory: str = ""
    """As a quantity; empty: this machine's memory."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Beside those that every node has."""
    restart_backoff_s: float = FIRST_S
    secure: bool = False
    """Whether the node's own server speaks TLS, as a real API server expects of it."""


class Node:
    """`run` registers the node and works until cancelled; then no process of any pod is left."""

    def __init__(self, client: KubeClient, informers: Informers, settings: NodeSettings) -> None:
        self._client = client
        self._informers = informers
        self._settings = settings
        self._recorder = Recorder(client, "kubelet", settings.name)
        self._workers: dict[str, tuple[PodWorker, asyncio.Task[None]]] = {}
        self._gpus: dict[int, str] = {}
        self._wake = asyncio.Event()
        self.registered = asyncio.Event()

    async def run(self) -> None:
        addresses = AddressBlock()
        connector = TCPConnector(limit=0, force_close=True)
        tls = await self_signed(self._settings.state_dir, self._settings.name) if self._settings.secure else None
        try:
            async with ClientSession(connector=connector) as session, serve_node(self.worker, HOST_IP, tls) as port:
                node = await self._register(node_object(self._settings, port, addresses.cidr))
                self.registered.set()
                beating = asyncio.create_task(self._heartbeat(node))
                try:
                    await self._work(session, addresses)
                finally:
                    beating.cancel()
                    await asyncio.gather(beating, return_exceptions=True)
                    await self._stop_all()
        finally:
            addresses.close()

    def worker(self, namespace: str, name: str) -> PodWorker | None:
        for worker, _ in self._workers.values():
            metadata = worker.pod["metadata"]
            if (metadata["namespace"], metadata["name"]) == (namespace, name):
                return worker
        return None

    async def _work(self, session: ClientSession, addresses: AddressBlock) -> None:
        for resource in (PODS, CONFIG_MAPS, SECRETS, CLAIMS):
            await self._informers[resource].synced.wait()
        self._informers[PODS].listeners.append(self._wake.set)
        self._wake.set()
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._reconcile(session, addresses)

    def _reconcile(self, session: ClientSession, addresses: AddressBlock) -> None:
        mine = {
            pod["metadata"]["uid"]: pod
            for pod in self._informers[PODS]
            if pod["spec"].get("nodeName") == self._settings.name
        }
        for uid, (worker, task) in list(self._workers.items()):
            if task.done():
                addresses.give_back(worker.address)
                self._gpus = {gpu: owner for gpu, owner in self._gpus.items() if owner != uid}
                del self._workers[uid]
                if not task.cancelled() and (error := task.exception()) is not None:
                    _LOG.error("pod %s: its worker failed", worker.pod["metadata"]["name"], exc_info=error)
            elif uid in mine:
                worker.update(mine[uid])
            else:
                worker.forget()
        for uid, pod in mine.items():
            if uid not in self._workers and "deletionTimestamp" not in pod["metadata"] and not _ended(pod):
                worker = PodWorker(pod, self._pod_host(session, addresses.take(), pod))
                task = asyncio.create_task(worker.run())
                task.add_done_callback(lambda _: self._wake.set())
                self._workers[uid] = worker, task

    def _pod_host(self, session: ClientSession, address: str, pod: Object) -> PodHost:
        return PodHost(
            client=self._client,
            session=session,
            recorder=self._recorder,
            address=address,
            host_ip=HOST_IP,
            base_env=base_environment() | self._take_gpus(pod),
            logs_root=self._settings.state_dir / "logs",
            volumes_root=self._settings.state_dir / "volumes",
            lookup=self._lookup,
            claims=lambda name: self._claim(pod["metadata"]["namespace"], name),
            backoff_s=self._settings.restart_backoff_s,
        )

    def _take_gpus(self, pod: Object) -> dict[str, str]:
        """The pod's share of the node's GPUs, told as a device plugin tells it: by the indices that it may see."""
        free = [gpu for gpu in range(self._settings.gpus) if gpu not in self._gpus]
        taken = free[: gpu_count(pod)]
        self._gpus |= dict.fromkeys(taken, pod["metadata"]["uid"])
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, taken))}

    def _lookup(self, kind: str, namespace: str, name: str) -> dict[str, str] | None:
        found = self._informers[SECRETS if kind == "secret" else CONFIG_MAPS].get(namespace, name)
        if found is None:
            return None
        data: dict[str, str] = found.get("data") or {}
        if kind == "secret":
            return {key: base64.b64decode(value).decode(errors="replace") for key, value in data.items()}
        return data

    def _claim(self, namespace: str, name: str) -> Path | None:
        """The folder behind a claim: one for all pods that mount it, kept as long as the cluster's state."""
        if self._informers[CLAIMS].get(namespace, name) is None:
            return None
        folder = self._settings.state_dir / "claims" / namespace / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    async def _stop_all(self) -> None:
        """End every pod's processes at once: the cluster is going, and nobody is left to drain for."""
        for worker, _ in self._workers.values():
            worker.forget()
        tasks = [task for _, task in self._workers.values()]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=_STOP_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # -- the node object --------------------------------------------------------------------------------------------

    async def _register(self, node: Object) -> Object:
        try:
            created = await self._client.create(NODES, None, {**node, "status": node["status"]})
        except ApiError as error:
            if error.code != 409:
                raise
            created = await self._client.get(NODES, None, node["metadata"]["name"])
        ready = await self._client.merge(NODES, created, {"status": node["status"]}, subresource="status")
        # A real API server taints a new node as not ready, and counts on a controller that runs nowhere here.
        return await self._client.merge(NODES, ready, {"spec": {"taints": None}})

    async def _heartbeat(self, node: Object) -> None:
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            condition = {**node["status"]["conditions"][0], "lastHeartbeatTime": timestamp(datetime.now(UTC))}
            try:
                await self._client.merge(NODES, node, {"status": {"conditions": [condition]}}, subresource="status")
            except ApiError as error:
                _LOG.warning("node heartbeat: %s", error)


def node_object(settings: NodeSettings, port: int, pod_cidr: str) -> Object:
    """The Node as it registers: capacity, addresses, labels."""
    cores = settings.cpu or str(os.cpu_count() or 1)
    memory = settings.memory or f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') // 1024}Ki"
    capacity = {"cpu": cores, "memory": memory, "ephemeral-storage": "100Gi", "pods": "110"}
    if settings.gpus:
        capacity["nvidia.com/gpu"] = str(settings.gpus)
    now = timestamp()
    ready = {
        "type": "Ready",
        "status": "True",
        "reason": "KubeletReady",
        "message": "the node runs pods as local processes",
        "lastHeartbeatTime": now,
        "lastTransitionTime": now,
    }
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": settings.name,
            "labels": {
                "kubernetes.io/hostname": settings.name,
                "kubernetes.io/os": "linux",
                "kubernetes.io/arch": {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), "unknown"),
                **settings.labels,
            },
        },
        "spec": {"podCIDR": pod_cidr, "podCIDRs": [pod_cidr]},
        "status": {
            "capacity": capacity,
            "allocatable": capacity,
            "conditions": [ready],
            "addresses": [
                {"type": "InternalIP", "address": HOST_IP},
                {"type": "Hostname", "address": settings.name},
            ],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
            "nodeInfo": {
                "architecture": platform.machine(),
                "bootID": "",
                "containerRuntimeVersion": "process://1",
                "kernelVersion": platform.release(),
                "kubeProxyVersion": "",
                "kubeletVersion": VERSION["gitVersion"],
                "machineID": "",
                "operatingSystem": "linux",
                "osImage": platform.platform(),
                "systemUUID": "",
            },
        },
    }


def base_environment() -> dict[str, str]:
    """What every container's environment begins with: little of ours, and our own interpreter's commands first."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    return {**inherited, "PATH": path, "PYTHONUNBUFFERED": "1"}


def _ended(pod: Object) -> bool:
    return (pod.get("status") or {}).get("phase") in {"Succeeded", "Failed"}
