"""The node agent: registers a Node, and runs the pods that are bound to it as processes on this machine."""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import ClientSession, TCPConnector

from llmservice_local.api.discovery import VERSION
from llmservice_local.client import CLAIMS, CONFIG_MAPS, NODES, PODS, SECRETS, KubeClient
from llmservice_local.control.controller import Recorder
from llmservice_local.control.informer import Informers
from llmservice_local.errors import ApiError
from llmservice_local.loopback import AddressBlock
from llmservice_local.node.pod_worker import PodHost, PodWorker
from llmservice_local.node.process import FIRST_S, base_environment
from llmservice_local.node.server import self_signed, serve_node
from llmservice_local.objects import Object, has_ended, requests_of, timestamp

HOST_IP = "127.0.0.1"
_HEARTBEAT_S = 60.0
_STOP_S = 10.0
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """The name, the capacity and the labels of a node."""

    state_dir: Path
    name: str = "local"
    gpus: int = 0
    cpu: str = ""
    """A quantity; empty: this machine's cores."""
    memory: str = ""
    """A quantity; empty: this machine's memory."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels besides those that every node has."""
    restart_backoff_s: float = FIRST_S
    secure: bool = False
    """Whether the node's server uses TLS, which a real API server requires."""


class Kubelet:
    """`run` registers the node and runs its pods until cancelled; then it ends every process of them."""

    def __init__(self, client: KubeClient, informers: Informers, settings: NodeSettings) -> None:
        self._client = client
        self._informers = informers
        self._settings = settings
        self._recorder = Recorder(client, "kubelet", settings.name)
        self._workers: dict[str, tuple[PodWorker, asyncio.Task[None]]] = {}
        self._done: set[str] = set()
        """Pods whose worker has ended, until the watch reports their deletion."""
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
        for resource in (PODS, CONFIG_MAPS):  # a change of a ConfigMap is written into the volumes of running pods
            self._informers[resource].listeners.append(self._wake.set)
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
                addresses.release(worker.address)
                self._gpus = {gpu: owner for gpu, owner in self._gpus.items() if owner != uid}
                del self._workers[uid]
                self._done.add(uid)
                if not task.cancelled() and (error := task.exception()) is not None:
                    _LOG.error("pod %s: its worker failed", worker.pod["metadata"]["name"], exc_info=error)
            elif uid in mine:
                worker.update(mine[uid])
            else:
                worker.forget()
        self._done &= mine.keys()
        for uid, pod in mine.items():
            is_over = "deletionTimestamp" in pod["metadata"] and uid in self._done
            if uid not in self._workers and not is_over and not has_ended(pod):
                worker = PodWorker(pod, self._pod_host(session, addresses.take(), pod))
                worker.update(pod)  # it may have been deleted before it is seen here
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
        """Allocate GPUs to the pod; returns the environment that a device plugin would set."""
        free = [gpu for gpu in range(self._settings.gpus) if gpu not in self._gpus]
        taken = free[: int(requests_of(pod).get("nvidia.com/gpu", 0))]
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
        """The folder of a claim, shared by all pods that mount it, in the cluster's state folder."""
        if self._informers[CLAIMS].get(namespace, name) is None:
            return None
        folder = self._settings.state_dir / "claims" / namespace / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    async def _stop_all(self) -> None:
        """Kill the processes of all pods without a grace period, as the cluster is being stopped."""
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
            created = await self._client.create(NODES, None, node)
        except ApiError as error:
            if error.code != 409:
                raise
            created = await self._client.get(NODES, None, node["metadata"]["name"])
        ready = await self._client.merge(NODES, created, {"status": node["status"]}, subresource="status")
        # A real API server taints new nodes as not ready; the controller that removes the taint does not run here.
        return await self._client.merge(NODES, ready, {"spec": {"taints": None}})

    async def _heartbeat(self, node: Object) -> None:
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            condition = {**node["status"]["conditions"][0], "lastHeartbeatTime": timestamp()}
            try:
                await self._client.merge(NODES, node, {"status": {"conditions": [condition]}}, subresource="status")
            except ApiError as error:
                _LOG.warning("node heartbeat: %s", error)


def node_object(settings: NodeSettings, port: int, pod_cidr: str) -> Object:
    """The Node object: capacity, addresses, labels."""
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
