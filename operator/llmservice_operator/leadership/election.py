"""The Lease on the API server: wait for it, hold it, give it back. What to do is decided in lease.py."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from llmservice_operator.api.spec import Manifest
from llmservice_operator.cluster.kube_client import KubeClient, KubeError
from llmservice_operator.leadership.lease import API_VERSION, Candidate, Lease, Timing, lease_of

logger = logging.getLogger(__name__)

_REQUEST_TIMEOUT_S = 3.0
"""Two attempts at a renewal fit before the deadline."""


class LeadershipLostError(Exception):
    """Another process may write now: this one must end."""


def steady_clock() -> float:
    """Seconds that no setting of the clock moves, and that pass while the machine sleeps, where the platform tells."""
    boottime: int | None = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boottime is None else time.clock_gettime(boottime)


def own_identity() -> str:
    """For people the host's (in a cluster: the pod's) name; unique by what follows it."""
    return f"{socket.gethostname()}_{os.getpid()}_{uuid.uuid4().hex[:8]}"


@dataclass(slots=True)
class Election:
    """One process's part in it."""

    client: KubeClient
    namespace: str
    name: str
    timing: Timing = field(default_factory=Timing)
    identity: str = field(default_factory=own_identity)
    clock: Callable[[], float] = steady_clock
    _candidate: Candidate = field(init=False)

    def __post_init__(self) -> None:
        self._candidate = Candidate(self.identity, self.timing)

    def left_s(self) -> float:
        """For how long this process may still write; the client asks before every write."""
        return self._candidate.left_s(self.clock())

    async def acquire(self) -> None:
        """Wait until the lease is ours. An API server that is away is waited for."""
        said = ""
        while True:
            try:
                await self._turn(read=True)
            except KubeError as error:
                said = _say(said, f"the lease can't be read or written: {error}")
            if self.left_s() > 0:
                break
            holder = self._candidate.seen.holder if self._candidate.seen else ""
            said = _say(said, f"waiting: {holder} leads") if holder else said
            await asyncio.sleep(self.timing.retry_s)
        logger.info("%s leads", self.identity)

    async def hold(self) -> None:
        """Renew for ever; raises LeadershipLostError once it is no longer ours, at the latest at the deadline."""
        read = False
        pause_s = self.timing.renew_s
        while True:
            await asyncio.sleep(min(pause_s, max(0.0, self.left_s())))
            step = self._candidate.step(self.clock())
            if step.action == "lost":
                raise LeadershipLostError(step.reason)
            try:
                await self._turn(read=read)
                read, pause_s = False, self.timing.renew_s
            except KubeError as error:
                logger.warning("the lease was not renewed: %s", error)
                read, pause_s = True, self.timing.retry_s

    async def release(self) -> None:
        """Give the lease back, so that another takes it at its next look. No write may be under way by now."""
        if self.left_s() <= 0 or self._candidate.seen is None:
            return
        lease: Lease | None = self._candidate.seen
        self._candidate = Candidate(self.identity, self.timing)
        try:
            try:
                await self._write("PUT", self._manifest("", lease))
            except KubeError as error:
                lease = await self._read() if error.status == 409 else None
                if lease is None or lease.holder != self.identity:
                    raise
                await self._write("PUT", self._manifest("", lease))  # a renewal of ours, cut short, had landed
        except KubeError as error:
            logger.warning("the lease was not given back, it ends by itself: %s", error)

    async def _turn(self, *, read: bool) -> None:
        """One look and what follows from it; the look is spared by who knows the lease from its own last write."""
        if read:
            lease = await self._read()
            self._candidate = self._candidate.saw(lease, self.clock())
        step = self._candidate.step(self.clock())
        if step.action == "lost":
            raise LeadershipLostError(step.reason)
        if step.action == "wait":
            return
        if step.action != "renew":
            logger.info("standing for leader: %s", step.reason)
        sent_s = self.clock()
        written = await self._write("POST" if step.action == "create" else "PUT", self._manifest(self.identity))
        self._candidate = self._candidate.wrote(lease_of(written), sent_s)

    async def _read(self) -> Lease | None:
        try:
            manifest = await self.client.request("GET", self._path(), timeout_s=_REQUEST_TIMEOUT_S, urgent=True)
        except KubeError as error:
            if error.status == 404:
                return None
            raise
        return lease_of(manifest)

    async def _write(self, method: str, manifest: Manifest) -> Manifest:
        path = self._path() if method == "PUT" else self._path().rpartition("/")[0]
        return await self.client.request(
            method,
            path,
            body=manifest,
            content_type="application/json",
            timeout_s=_REQUEST_TIMEOUT_S,
            urgent=True,
        )

    def _manifest(self, holder: str, before: Lease | None = None) -> Manifest:
        before = before or self._candidate.seen
        moment = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")  # for people: nobody reckons with it
        taken = before is not None and holder not in {"", before.holder}
        metadata = {"name": self.name, "namespace": self.namespace}
        spec = {
            "holderIdentity": holder,
            "leaseDurationSeconds": math.ceil(self.timing.duration_s) if holder else 1,
            "renewTime": moment,
            "acquireTime": moment,
            "leaseTransitions": (before.transitions if before else 0) + taken,
        }
        version = {"resourceVersion": before.version} if before is not None else {}
        return {"apiVersion": API_VERSION, "kind": "Lease", "metadata": metadata | version, "spec": spec}

    def _path(self) -> str:
        return f"/apis/{API_VERSION}/namespaces/{self.namespace}/leases/{self.name}"


def _say(before: str, message: str) -> str:
    """Say it once, not at every look."""
    if message != before:
        logger.info("%s", message)
    return message
