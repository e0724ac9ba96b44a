"""Runs one pod on the node: its containers in order, its status, its deletion."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from aiohttp import ClientSession

from llmservice_local.client import PODS, KubeClient
from llmservice_local.control.controller import Recorder
from llmservice_local.errors import ApiError
from llmservice_local.node.container import Container, ContainerHost, Launch
from llmservice_local.node.container_spec import (
    Claims,
    ConfigError,
    command_line,
    container_mounts,
    environment,
    translate,
    volume_paths,
    write_config_maps,
)
from llmservice_local.node.logs import PodLogs
from llmservice_local.node.pod_status import pod_status
from llmservice_local.objects import Object, timestamp

RETRY_S = 0.5
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PodHost:
    """The node of a pod, as far as the pod uses it."""

    client: KubeClient
    session: ClientSession
    recorder: Recorder
    address: str
    host_ip: str
    base_env: dict[str, str]
    logs_root: Path
    volumes_root: Path
    lookup: Callable[[str, str, str], dict[str, str] | None]
    """(`configmap` or `secret`, namespace, name) -> its data."""
    claims: Claims
    backoff_s: float


class PodWorker:
    """Runs a pod until it has been deleted from the API."""

    def __init__(self, pod: Object, host: PodHost) -> None:
        self.pod = pod
        self.address = host.address
        self.logs = PodLogs(host.logs_root, pod)
        self._host = host
        self._dirty = asyncio.Event()
        self._ending = asyncio.Event()
        self._gone = asyncio.Event()
        self._closed = False
        self._grace_s = 30.0
        policy = pod["spec"].get("restartPolicy", "Always")
        container_host = ContainerHost(
            pod_ip=host.address,
            pod_name=f"{pod['metadata']['name']}_{pod['metadata']['namespace']}({pod['metadata']['uid']})",
            logs=self.logs,
            session=host.session,
            prepare=self._prepare,
            changed=self._dirty.set,
            report=self._report,
            grace_s=float(pod["spec"].get("terminationGracePeriodSeconds", 30)),
        )
        init_policy = "OnFailure" if policy == "Always" else policy
        self.init = [
            Container(spec, container_host, init_policy, host.backoff_s)
            for spec in pod["spec"].get("initContainers") or []
        ]
        self.containers = [
            Container(spec, container_host, policy, host.backoff_s) for spec in pod["spec"]["containers"]
        ]
        self._dirty.set()

    def update(self, pod: Object) -> None:
        """Set a newer state of the pod; a deletion timestamp starts its termination."""
        self.pod = pod
        if "deletionTimestamp" in pod["metadata"] and not self._ending.is_set():
            self._grace_s = float(pod["metadata"].get("deletionGracePeriodSeconds", 30))
            self._ending.set()
        if any(container.state.get("running") for container in self._all()):
            with contextlib.suppress(ConfigError):  # what was mounted stays
                self._write_config_maps()

    def forget(self) -> None:
        """Kill all containers of a pod that no longer exists in the API."""
        self._gone.set()
        self._ending.set()
        for container in self._all():
            container.kill()

    def container(self, name: str) -> Container | None:
        return next((container for container in self._all() if container.name == name), None)

    async def run(self) -> None:
        """Returns when every process has ended and the pod has been deleted from the API."""
        reporting = asyncio.create_task(self._report_status())
        living = asyncio.create_task(self._live())
        try:
            await self._ending.wait()
            await self._end(living)
        finally:
            for container in self._all():
                container.kill()
            living.cancel()
            await asyncio.gather(living, return_exceptions=True)
            self._closed = True
            self._dirty.set()
            await asyncio.gather(reporting, return_exceptions=True)
            self.logs.remove()
            shutil.rmtree(self._host.volumes_root / self.pod["metadata"]["uid"], ignore_errors=True)

    # -- containers -------------------------------------------------------------------------------------------------

    async def _live(self) -> None:
        if self._ending.is_set():
            return
        for container in self.init:
            await container.run()
            if container.exit_code != 0 or self._ending.is_set():
                return
            container.ready = True
            self._dirty.set()
        await asyncio.gather(*(container.run() for container in self.containers))

    async def _end(self, living: asyncio.Task[None]) -> None:
        if not self._gone.is_set():
            await asyncio.gather(*(container.stop(self._grace_s) for container in self._all()))
        await asyncio.gather(living, return_exceptions=True)
        while not self._gone.is_set():
            try:
                await self._host.client.delete(PODS, self.pod, grace_s=0)
                return
            except ApiError as error:
                _LOG.warning("deleting pod %s: %s", self.pod["metadata"]["name"], error)
                await asyncio.sleep(RETRY_S)

    def _prepare(self, spec: Object) -> Launch:
        pod = {**self.pod, "status": {**(self.pod.get("status") or {}), "podIP": self.address}}
        pod["status"]["hostIP"] = self._host.host_ip
        metadata = pod["metadata"]
        volumes = volume_paths(pod, self._host.volumes_root / metadata["uid"], self._host.claims)
        for name, path in volumes.items():
            if path.is_relative_to(self._host.volumes_root):
                path.mkdir(parents=True, exist_ok=True)
            elif not path.exists():
                _LOG.info("volume %s of pod %s: %s does not exist", name, metadata["name"], path)
        self._write_config_maps()
        mounts = container_mounts(spec, volumes)
        for mount in spec.get("volumeMounts") or []:  # a missing subPath is created, as by the kubelet
            if mount.get("subPath") and mount["mountPath"] in mounts and volumes[mount["name"]].is_dir():
                mounts[mount["mountPath"]].mkdir(parents=True, exist_ok=True)
        given = environment(spec, pod, self._lookup)
        own = {name: translate(value, mounts) for name, value in given.items()}
        env = {**self._host.base_env, "HOSTNAME": metadata["name"], "LLMSERVICE_HOST": self.address, **own}
        working_dir = Path(spec["workingDir"]) if spec.get("workingDir") else None
        return Launch(command_line(spec, env, mounts), env, working_dir)

    def _write_config_maps(self) -> None:
        write_config_maps(self.pod, self._host.volumes_root / self.pod["metadata"]["uid"], self._lookup)

    def _lookup(self, kind: str, name: str) -> dict[str, str] | None:
        return self._host.lookup(kind, self.pod["metadata"]["namespace"], name)

    def _all(self) -> list[Container]:
        return [*self.init, *self.containers]

    # -- status and Events ------------------------------------------------------------------------------------------

    async def _report(self, kind: str, reason: str, message: str) -> None:
        await self._host.recorder.post(self.pod, kind, reason, message)

    async def _report_status(self) -> None:
        """Write the status after every change; a single writer, so that no older state overwrites a newer one."""
        reported: Object | None = None
        while not self._gone.is_set():
            await self._dirty.wait()
            self._dirty.clear()
            init = [container.status() for container in self.init]
            containers = [container.status() for container in self.containers]
            known = self.pod if reported is None else {**self.pod, "status": reported}
            status = pod_status(known, init, containers, self.address, self._host.host_ip, timestamp())
            if status != reported:
                try:
                    await self._host.client.merge(PODS, self.pod, {"status": status}, subresource="status")
                    reported = status
                except ApiError as error:
                    if error.code == 404:
                        return
                    _LOG.warning("status of pod %s: %s", self.pod["metadata"]["name"], error)
                    self._dirty.set()
                    if not self._closed:
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(RETRY_S):
                                await self._gone.wait()
            if self._closed:
                return
