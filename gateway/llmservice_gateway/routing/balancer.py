"""Load balancing over a model's ready pods, and rebalancing of requests that wait for a slot.

A pod's load is the tokens of its requests in flight. Requests with the same beginning go to the pod that has it in its
KV cache, by consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2018, arXiv:1608.01350).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice

from llmservice_gateway.routing.demand import Demand, Usage
from llmservice_gateway.routing.routes import Backend

FAILURE_PENALTY_S = 2.0
"""A pod that refused a connection is picked last for this time: having nothing in flight, it would otherwise be picked
first by every request until its deletion is observed."""
BOUND = 1.25
"""No request is assigned to a pod whose load would exceed the mean by this factor and the largest single request.

The factor is for pods that have the request's beginning: what they spare is worth some waiting. Another takes it up to
the mean. Of what comes on top, half is the request's own size: it keeps the pods' loads closer together than the
largest alone, and more conversations on their pods than the request's own size alone.
"""
MOST_PREFIXES = 50_000
"""Beginnings of prompts that are remembered, about 15 MB."""

ONE_REQUEST = Demand(0, 1)


@dataclass(slots=True, eq=False)
class Ticket:
    """One request in flight on a pod, until its response has ended. `backend` changes when the request is moved."""

    backend: Backend
    tokens: int = 1
    """Its part of the pod's load."""
    leave: Callable[[], bool] | None = None
    """Set until the response begins: cancels the request to the pod, and returns whether it was still possible."""
    has_waited: bool = False
    """Whether its pod failed while earlier requests filled the slots."""


@dataclass(slots=True)
class _Load:
    tickets: dict[Ticket, None] = field(default_factory=dict)
    """In the order of arrival, in which a pod admits them."""
    tokens: int = 0
    last_pick: int = 0
    failed_at: float = float("-inf")
    slots: int | None = None
    """What the pod reports, of requests like those before."""

    @property
    def in_flight(self) -> int:
        return len(self.tickets)


_IDLE = _Load()


class Balancer:
    """Picks pods by tokens in flight and, where asked to, by the beginnings of prompts that they have cached."""

    def __init__(self) -> None:
        self._loads: dict[str, _Load] = {}
        self._picks = 0
        self._prefixes: OrderedDict[bytes, dict[str, int]] = OrderedDict()
        """By affinity, the least recently used first: the tokens that each pod (uid) has of it."""

    def pick(
        self,
        backends: Sequence[Backend],
        tried: Collection[str],
        now: float,
        demand: Demand = ONE_REQUEST,
        *,
        by_prefix: bool = False,
    ) -> Backend | None:
        """The next pod, or None when all were `tried` (uids). `now` is any monotonic clock, in seconds.

        The least loaded, ties to the least recently picked. `by_prefix`: for a request with an affinity, the pod that
        has most of its prompt, else the first in the order of its affinity; of those whose load stays within its bound,
        and if possible with a free slot: waiting for one costs more than computing a prompt again.
        """
        candidates = [backend for backend in backends if backend.uid not in tried]
        if not candidates:
            return None
        candidates = [backend for backend in candidates if not self._is_avoided(backend, now)] or candidates
        if not by_prefix or demand.affinity is None:
            return min(candidates, key=self._least_loaded)
        affinity, known = demand.affinity, self._prefixes.get(demand.affinity, {})
        total = sum(self.load(backend) for backend in candidates)

        def is_within(backend: Backend) -> bool:
            cached = known.get(backend.uid, 0)
            cost = _cost(demand, cached)
            of_mean = math.ceil((BOUND if cached else 1) * (total + cost) / len(candidates))
            if self.load(backend) <= of_mean:  # the largest request is not smaller than this one
                return True
            largest = max((ticket.tokens for one in candidates for ticket in self._of(one).tickets), default=0)
            return self.load(backend) + cost <= of_mean + (max(largest, cost) + cost) / 2

        def order(backend: Backend) -> tuple[int, bytes]:
            return known.get(backend.uid, 0), _rank(affinity, backend)

        # Rendezvous hashing: each affinity has an order of its own, so that what one pod cannot take spreads over all
        # others. A conversation that had to leave its pod stays where it went, and so loads even out. The least loaded
        # pod is always within the bound.
        ordered = sorted(filter(is_within, candidates), key=order, reverse=True)
        return next((backend for backend in ordered if self._has_free_slot(backend)), ordered[0])

    def _least_loaded(self, backend: Backend) -> tuple[int, int]:
        load = self._of(backend)
        return load.tokens, load.last_pick

    def has_prefix(self, backend: Backend, demand: Demand) -> bool | None:
        """Whether `backend` was last sent requests with this beginning; None: no pod was, or there is none."""
        known = self._prefixes.get(demand.affinity) if demand.affinity is not None else None
        return backend.uid in known if known else None

    def learn(self, backend: Backend, demand: Demand, usage: Usage | None) -> None:
        """A request has ended on `backend`, which now has its prompt and its answer in the cache."""
        if demand.affinity is not None and usage is not None:
            self._remember(demand.affinity, backend, usage.prompt + usage.completion)

    def _remember(self, affinity: bytes, backend: Backend, tokens: int) -> None:
        known = self._prefixes.setdefault(affinity, {})
        known[backend.uid] = tokens
        for uid in [uid for uid in known if uid != backend.uid and uid not in self._loads]:
            del known[uid]
        self._prefixes.move_to_end(affinity)
        if len(self._prefixes) > MOST_PREFIXES:
            self._prefixes.popitem(last=False)

    @contextmanager
    def hold(self, backend: Backend, demand: Demand = ONE_REQUEST) -> Iterator[Ticket]:
        """Count one request in flight on `backend`, or on the pod that it is moved to, while the block runs."""
        cached = 0
        if demand.affinity is not None:
            cached = self._prefixes.get(demand.affinity, {}).get(backend.uid, 0)
            self._remember(demand.affinity, backend, cached)
        ticket = Ticket(backend, _cost(demand, cached))
        self._put(ticket)
        try:
            yield ticket
        finally:
            self._remove(ticket)

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
            self._remove(ticket)
            ticket.backend, ticket.has_waited = target, False
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
        load.tokens += ticket.tokens

    def _remove(self, ticket: Ticket) -> None:
        load = self._loads[ticket.backend.uid]
        del load.tickets[ticket]
        load.tokens -= ticket.tokens

    def mark_failed(self, backend: Backend, now: float) -> None:
        """`backend` refused a connection, or broke one off; called before any of its tickets is given back."""
        load = self._loads.setdefault(backend.uid, _Load())
        load.failed_at = now
        if slots := self.slots(backend):
            for ticket in islice(load.tickets, slots, None):
                ticket.has_waited = True

    def set_slots(self, backend: Backend, slots: int) -> None:
        """`backend` reports how many requests like those before it runs at once."""
        self._loads.setdefault(backend.uid, _Load()).slots = slots

    def forget_all_but(self, uids: Collection[str]) -> None:
        """Drop the state of pods that left the table, once nothing is in flight on them."""
        self._loads = {uid: load for uid, load in self._loads.items() if load.in_flight or uid in uids}

    def in_flight(self, backend: Backend) -> int:
        return self._of(backend).in_flight

    def load(self, backend: Backend) -> int:
        """Tokens of its requests in flight: of prompts what is not cached there, and of answers what is expected."""
        return self._of(backend).tokens

    def _of(self, backend: Backend) -> _Load:
        return self._loads.get(backend.uid, _IDLE)

    def _has_free_slot(self, backend: Backend) -> bool:
        slots = self.slots(backend)
        return not slots or self.in_flight(backend) < slots


def _cost(demand: Demand, cached_tokens: int) -> int:
    """A request's part of the load of a pod that has `cached_tokens` of its prompt."""
    return max(1, max(0, demand.prompt_tokens - cached_tokens) + demand.output_tokens)


def _rank(affinity: bytes, backend: Backend) -> bytes:
    return blake2b(backend.uid.encode(), key=affinity, digest_size=8).digest()
