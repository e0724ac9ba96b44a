"""Load balancing over a model's ready pods, and rebalancing of requests that wait for a slot."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice

from llmservice_gateway.routes import Backend

FAILURE_PENALTY_S = 2.0
"""A pod that refused a connection is picked last for this time: having nothing in flight, it would otherwise be picked
first by every request until its deletion is observed."""


@dataclass(slots=True, eq=False)
class Ticket:
    """One request in flight on a pod, until its response has ended. `backend` changes when the request is moved."""

    backend: Backend
    leave: Callable[[], bool] | None = None
    """Set until the response begins: cancels the request to the pod, and returns whether it was still possible."""


@dataclass(slots=True)
class _Load:
    tickets: dict[Ticket, None] = field(default_factory=dict)
    """In the order of arrival, in which a pod admits them."""
    last_pick: int = 0
    failed_at: float = float("-inf")
    slots: int | None = None
    """What the pod reports, of requests like those before."""

    @property
    def in_flight(self) -> int:
        return len(self.tickets)


class Balancer:
    """Picks the pod with the fewest requests in flight; ties go to the least recently picked."""

    def __init__(self) -> None:
        self._loads: dict[str, _Load] = {}
        self._picks = 0

    def pick(self, backends: Sequence[Backend], tried: Collection[str], now: float) -> Backend | None:
        """The next pod, or None when all were `tried` (uids). `now` is any monotonic clock, in seconds."""
        candidates = [backend for backend in backends if backend.uid not in tried]
        if not candidates:
            return None

        def order(backend: Backend) -> tuple[bool, int, int]:
            load = self._loads.get(backend.uid) or _Load()
            return self._is_avoided(backend, now), load.in_flight, load.last_pick

        return min(candidates, key=order)

    @contextmanager
    def hold(self, backend: Backend) -> Iterator[Ticket]:
        """Count one request in flight on `backend`, or on the pod that it is moved to, while the block runs."""
        ticket = Ticket(backend)
        self._put(ticket)
        try:
            yield ticket
        finally:
            del self._loads[ticket.backend.uid].tickets[ticket]

    def rebalance(self, backends: Sequence[Backend], now: float) -> None:
        """Move waiting requests to pods that have a free slot, or a queue shorter by more than their slots.

        So a new pod gets its part of the load at once, though requests wait in the pods' queues, where lanes, deadlines
        and limits apply and the autoscaler sees them. Pods whose slots are unknown are left out.
        """
        sources = [backend for backend in backends if self.slots(backend)]
        targets = [backend for backend in sources if not self._is_avoided(backend, now)]
        while sources and targets:
            source, target = min(sources, key=self._free), max(targets, key=self._free)
            free = self._free(target)
            if self._free(source) >= 0 or (free <= 0 and free - self._free(source) <= self.slots(target)):
                break
            ticket = self._movable(source, ahead=max(0, -free))
            if ticket is None:
                sources.remove(source)
                continue
            del self._loads[source.uid].tickets[ticket]
            ticket.backend = target
            self._put(ticket)

    def _movable(self, backend: Backend, ahead: int) -> Ticket | None:
        """A waiting request that was just cancelled on its pod: one with as many `ahead` of it as on the new pod.

        A pod runs its first requests, as many as it has slots; the others wait, in the order of arrival.
        """
        waiting = islice(list(self._loads[backend.uid].tickets), self.slots(backend) + ahead, None)
        return next((ticket for ticket in waiting if ticket.leave is not None and ticket.leave()), None)

    def _free(self, backend: Backend) -> int:
        """Slots without a request; below 0 as many requests wait."""
        return self.slots(backend) - self.in_flight(backend)

    def slots(self, backend: Backend) -> int:
        """0: unknown."""
        load = self._loads.get(backend.uid)
        return (load and load.slots) or backend.slots or 0

    def _is_avoided(self, backend: Backend, now: float) -> bool:
        load = self._loads.get(backend.uid)
        return load is not None and now - load.failed_at < FAILURE_PENALTY_S

    def _put(self, ticket: Ticket) -> None:
        load = self._loads.setdefault(ticket.backend.uid, _Load())
        self._picks += 1
        load.last_pick = self._picks
        load.tickets[ticket] = None

    def mark_failed(self, backend: Backend, now: float) -> None:
        """`backend` refused a connection."""
        self._loads.setdefault(backend.uid, _Load()).failed_at = now

    def set_slots(self, backend: Backend, slots: int) -> None:
        """`backend` reports how many requests like those before it runs at once."""
        self._loads.setdefault(backend.uid, _Load()).slots = slots

    def forget_all_but(self, uids: Collection[str]) -> None:
        """Drop the state of pods that left the table, once nothing is in flight on them."""
        self._loads = {uid: load for uid, load in self._loads.items() if load.in_flight or uid in uids}

    def in_flight(self, backend: Backend) -> int:
        return self._loads[backend.uid].in_flight if backend.uid in self._loads else 0
