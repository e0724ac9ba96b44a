"""Leader election over a Lease: the decisions of a candidate, which are pure, and the I/O of one process.

The clocks of candidates are never compared. The leader counts from the moment at which it sent a renewal that
succeeded, and stops writing `renew_deadline_s` later. A standby counts from the moment at which it saw the last
renewal, which was later still, and takes over no sooner than `duration_s` after that. So there is a gap without writers
and never two, as long as no clock runs `duration_s / renew_deadline_s` times as fast as another. The scheme is
client-go's (https://pkg.go.dev/k8s.io/client-go/tools/leaderelection), with the deadline as a fence before every write.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Literal

from llmservice_operator.api.spec import Manifest
from llmservice_operator.cluster.kube_client import KubeClient, KubeError

API_VERSION = "coordination.k8s.io/v1"


@dataclass(frozen=True, slots=True)
class Timing:
    """In seconds. After a crash the lease is taken within `duration_s + retry_s`, after a release within `retry_s`."""

    duration_s: float = 15.0
    """For how long standbys wait after the last renewal."""
    renew_deadline_s: float = 10.0
    """For how long the leader writes after the last renewal that succeeded."""
    renew_s: float = 3.0
    """Between two renewals."""
    retry_s: float = 2.0
    """Between two reads of a lease that another process holds."""

    def __post_init__(self) -> None:
        if not self.retry_s <= self.renew_s < self.renew_deadline_s < self.duration_s:
            raise ValueError(f"{self}: expected retry <= renew < renew deadline < duration, or two could write at once")


@dataclass(frozen=True, slots=True)
class Lease:
    """The lease as the API server has it."""

    holder: str
    """Empty: given back."""
    duration_s: float
    version: str
    """Resource version: a write with it succeeds only if no other was made since."""
    transitions: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """What to do next, and why."""

    action: Literal["create", "take", "renew", "wait", "lost"]
    reason: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """One process that may lead."""

    identity: str
    """Unique for every process: a restarted container does not inherit its predecessor's lease."""
    timing: Timing
    seen: Lease | None = None
    seen_s: float = 0.0
    """When the lease was first seen at its present version, by this process's clock."""
    leads_until_s: float | None = None
    """Until when this process may write; None before it has led."""

    def saw(self, lease: Lease | None, now_s: float) -> Candidate:
        """Read at `now_s`, taken after the answer came: the renewal itself cannot have been later."""
        if lease is not None and self.seen is not None and lease.version == self.seen.version:
            return self
        return replace(self, seen=lease, seen_s=now_s)

    def wrote(self, lease: Lease, sent_s: float) -> Candidate:
        """The API server accepted our renewal, which was sent at `sent_s`."""
        return replace(self, seen=lease, seen_s=sent_s, leads_until_s=sent_s + self.timing.renew_deadline_s)

    def left_s(self, now_s: float) -> float:
        """For how long this process may still write; not positive: it must not."""
        return 0.0 if self.leads_until_s is None else self.leads_until_s - now_s

    def step(self, now_s: float) -> Step:
        """The next action."""
        lease = self.seen
        if self.leads_until_s is not None:
            return self._keep(lease, now_s)
        if lease is None:
            return Step("create", "there is no lease")
        if lease.holder == self.identity:
            return Step("renew", "the lease is ours, though the answer to our write was lost")
        if not lease.holder:
            return Step("take", "the lease was given back")
        patience_s = max(lease.duration_s, self.timing.duration_s)
        idle_s = now_s - self.seen_s
        if idle_s > patience_s:
            return Step("take", f"{lease.holder} has not renewed for {idle_s:.1f}s, longer than {patience_s:g}s")
        return Step("wait", f"{lease.holder} renewed {idle_s:.1f}s ago")

    def _keep(self, lease: Lease | None, now_s: float) -> Step:
        if self.left_s(now_s) <= 0:
            return Step("lost", f"no renewal succeeded for {self.timing.renew_deadline_s:g}s")
        if lease is None:
            return Step("lost", "the lease was deleted")
        if lease.holder != self.identity:
            return Step("lost", f"{lease.holder or 'no operator'} holds the lease")
        return Step("renew", f"{self.left_s(now_s):.1f}s are left")


def lease_of(manifest: Manifest) -> Lease:
    spec: dict[str, Any] = manifest.get("spec") or {}
    return Lease(
        holder=str(spec.get("holderIdentity") or ""),
        duration_s=float(spec.get("leaseDurationSeconds") or 0),
        version=str(manifest["metadata"].get("resourceVersion", "")),
        transitions=int(spec.get("leaseTransitions") or 0),
    )


logger = logging.getLogger(__name__)

_REQUEST_TIMEOUT_S = 3.0
"""Two attempts at a renewal fit before the deadline."""


class LeadershipLostError(Exception):
    """Another process may lead now: this one must end."""


def steady_clock() -> float:
    """Seconds that are independent of the wall clock, and pass during suspension where the platform supports that."""
    boottime: int | None = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boottime is None else time.clock_gettime(boottime)


def own_identity() -> str:
    """The host's name, in a cluster the pod's, with a unique suffix."""
    return f"{socket.gethostname()}_{os.getpid()}_{uuid.uuid4().hex[:8]}"


@dataclass(slots=True)
class Election:
    """One process's candidacy: reads, renews and releases the lease."""

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
        """For how long this process may still write; the client calls it before every write."""
        return self._candidate.left_s(self.clock())

    async def acquire(self) -> None:
        """Wait until the lease is ours, however long the API server is unreachable."""
        said = ""
        while True:
            try:
                await self._step(read=True)
            except KubeError as error:
                said = _log_once(said, f"the lease can't be read or written: {error}")
            if self.left_s() > 0:
                break
            holder = self._candidate.seen.holder if self._candidate.seen else ""
            said = _log_once(said, f"waiting: {holder} leads") if holder else said
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
                await self._step(read=read)
                read, pause_s = False, self.timing.renew_s
            except KubeError as error:
                logger.warning("the lease was not renewed: %s", error)
                read, pause_s = True, self.timing.retry_s

    async def release(self) -> None:
        """Release the lease, so that a standby takes it at its next read. No write may be in flight by now."""
        lease = self._candidate.seen
        if self.left_s() <= 0 or lease is None or lease.holder != self.identity:  # another's is not ours to give back
            return
        self._candidate = Candidate(self.identity, self.timing)
        try:
            try:
                await self._write("PUT", self._manifest("", lease))
            except KubeError as error:
                lease = await self._read() if error.status == 409 else None
                if lease is None or lease.holder != self.identity:
                    raise
                await self._write("PUT", self._manifest("", lease))  # a renewal of ours that was cut off had arrived
        except KubeError as error:
            logger.warning("the lease was not given back, it ends by itself: %s", error)

    async def _step(self, *, read: bool) -> None:
        """One step; without `read` the lease is known from this process's own last write."""
        if read:
            lease = await self._read()
            self._candidate = self._candidate.saw(lease, self.clock())
        step = self._candidate.step(self.clock())
        if step.action == "lost":
            raise LeadershipLostError(step.reason)
        if step.action == "wait":
            return
        if step.action != "renew":
            logger.info("trying to lead: %s", step.reason)
        sent_s = self.clock()
        written = await self._write("POST" if step.action == "create" else "PUT", self._manifest(self.identity))
        self._candidate = self._candidate.wrote(lease_of(written), sent_s)

    async def _read(self) -> Lease | None:
        manifest = await self.client.find("GET", self._path(), timeout_s=_REQUEST_TIMEOUT_S, urgent=True)
        return None if manifest is None else lease_of(manifest)

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
        moment = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")  # informative only
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


def _log_once(before: str, message: str) -> str:
    """Log it once, not at every attempt."""
    if message != before:
        logger.info("%s", message)
    return message
