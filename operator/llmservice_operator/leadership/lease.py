"""Who may write: what one candidate does, given the Lease that it read and its own monotonic clock. Pure.

The clocks of candidates are never compared. The holder counts from the moment at which it sent a renewal that
succeeded, and stops writing `renew_deadline_s` later. Everybody else counts from the moment at which they saw the last
renewal, which was later still, and takes over no sooner than `duration_s` after that. So there is a gap without writers
and never two, as long as no clock runs `duration_s / renew_deadline_s` times as fast as another. The scheme is
client-go's (https://pkg.go.dev/k8s.io/client-go/tools/leaderelection), with the deadline as a fence before every write.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from llmservice_operator.api.spec import Manifest

API_VERSION = "coordination.k8s.io/v1"


@dataclass(frozen=True, slots=True)
class Timing:
    """In seconds. After a crash the lease is taken within `duration_s + retry_s`, after a release within `retry_s`."""

    duration_s: float = 15.0
    """For how long others leave a lease alone that nobody renews."""
    renew_deadline_s: float = 10.0
    """For how long the holder writes after the last renewal that succeeded."""
    renew_s: float = 3.0
    """Between two renewals."""
    retry_s: float = 2.0
    """Between two looks at a lease that somebody else holds."""

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
    """Resource version: a write that names it succeeds only if nobody else has written since."""
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
    """Different for every process, also of one pod: a restarted container has no part in what its predecessor held."""
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
        """The API server took our renewal, which was sent at `sent_s`."""
        return replace(self, seen=lease, seen_s=sent_s, leads_until_s=sent_s + self.timing.renew_deadline_s)

    def left_s(self, now_s: float) -> float:
        """For how long this process may still write; not positive: it must not."""
        return 0.0 if self.leads_until_s is None else self.leads_until_s - now_s

    def step(self, now_s: float) -> Step:
        """What follows from what was seen."""
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
            return Step("lost", "somebody deleted the lease")
        if lease.holder != self.identity:
            return Step("lost", f"{lease.holder or 'nobody'} holds the lease")
        return Step("renew", f"{self.left_s(now_s):.1f}s are left")


def lease_of(manifest: Manifest) -> Lease:
    spec: dict[str, Any] = manifest.get("spec") or {}
    return Lease(
        holder=str(spec.get("holderIdentity") or ""),
        duration_s=float(spec.get("leaseDurationSeconds") or 0),
        version=str(manifest["metadata"].get("resourceVersion", "")),
        transitions=int(spec.get("leaseTransitions") or 0),
    )
