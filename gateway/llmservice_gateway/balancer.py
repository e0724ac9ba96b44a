"""Which of a model's ready pods gets the next request, and which gets one that another pod has no slot for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice

from llmservice_gateway.routes import Backend

FAILURE_PENALTY_S = 2.0
"""A pod that just refused a connection is asked last for so long: it has nothing in flight, so it would otherwise be
picked first by every request until the cluster notices that it is gone."""


@dataclass(slots=True, eq=False)
class Ticket:
    """One request's place at one pod, until its answer has ended. `backend` changes when the request is moved."""

    backend: Backend
    leave: Callable[[], bool] | None = None
    """Set while nothing of an answer has come: gives up the pod, and tells whether there was still time to."""


@dataclass(slots=True)
class _Load:
    tickets: dict[Ticket, None] = field(default_factory=dict)
    """In the order of their arrival, which is that in which a pod takes them from its queue."""
    last_turn: int = 0
    failed_at: float = float("-inf")

    @property
    def in_flight(self) -> int:
        return len(self.tickets)


class Balancer:
    """Least in flight first; ties go to the pod that was picked longest ago, which is round-robin among equals."""

    def __init__(self) -> None:
        self._loads: dict[str, _Load] = {}
        self._turn = 0

    def pick(self, backends: Sequence[Backend], tried: Collection[str], now: float) -> Backend | None:
        """The pod to ask next, or None when all were `tried` (uids). `now` is any monotonic clock, in seconds."""
        candidates = [backend for backend in backends if backend.uid not in tried]
        if not candidates:
            return None

        def order(backend: Backend) -> tuple[bool, int, int]:
            load = self._loads.get(backend.uid) or _Load()
            return self._is_avoided(backend, now), load.in_flight, load.last_turn

        return min(candidates, key=order)

    @contextmanager
    def hold(self, backend: Backend) -> Iterator[Ticket]:
        """Count one request in flight on `backend`, or wherever it is moved to, while the block runs."""
        ticket = Ticket(backend)
        self._put(ticket)
        try:
            yield ticket
        finally:
            del self._loads[ticket.backend.uid].tickets[ticket]

    def share(self, backends: Sequence[Backend], now: float) -> None:
        """Move who waits at one pod to another that has a free slot, or a line shorter by more than it has slots.

        So a new pod takes its part of the line at once, though the line is in the pods' own queues, where lanes,
        deadlines and bounds hold and the autoscaler sees it. Pods whose slots are not known give and get nothing.
        """
        sources = [backend for backend in backends if backend.slots is not None]
        targets = [backend for backend in sources if not self._is_avoided(backend, now)]
        while sources and targets:
            source, target = min(sources, key=self._free), max(targets, key=self._free)
            free = self._free(target)
            if self._free(source) >= 0 or (free <= 0 and free - self._free(source) <= (target.slots or 0)):
                break
            ticket = self._leaver(source, ahead=max(0, -free))
            if ticket is None:
                sources.remove(source)
                continue
            del self._loads[source.uid].tickets[ticket]
            ticket.backend = target
            self._put(ticket)

    def _leaver(self, backend: Backend, ahead: int) -> Ticket | None:
        """One who has left the pod's line just now: with as many `ahead` of it there as there are where it goes.

        The first of a pod's requests, as many as it has slots, run; the others wait, in the order of their arrival.
        """
        waiting = islice(list(self._loads[backend.uid].tickets), (backend.slots or 0) + ahead, None)
        return next((ticket for ticket in waiting if ticket.leave is not None and ticket.leave()), None)

    def _free(self, backend: Backend) -> int:
        """Slots without a request; below 0 as many requests wait."""
        return (backend.slots or 0) - self.in_flight(backend)

    def _is_avoided(self, backend: Backend, now: float) -> bool:
        load = self._loads.get(backend.uid)
        return load is not None and now - load.failed_at < FAILURE_PENALTY_S

    def _put(self, ticket: Ticket) -> None:
        load = self._loads.setdefault(ticket.backend.uid, _Load())
        self._turn += 1
        load.last_turn = self._turn
        load.tickets[ticket] = None

    def mark_failed(self, backend: Backend, now: float) -> None:
        """`backend` did not take a connection."""
        self._loads.setdefault(backend.uid, _Load()).failed_at = now

    def forget_all_but(self, uids: Collection[str]) -> None:
        """Drop the figures of pods that left the table, once nothing is in flight on them."""
        self._loads = {uid: load for uid, load in self._loads.items() if load.in_flight or uid in uids}

    def in_flight(self, backend: Backend) -> int:
        return self._loads[backend.uid].in_flight if backend.uid in self._loads else 0
