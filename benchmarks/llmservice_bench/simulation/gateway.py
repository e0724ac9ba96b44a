"""The gateway of a simulation: where each request goes, what is held, and what is sent again.

It mirrors the rules of `llmservice_gateway` (balancer, holding, proxy), which this package may not import: the replica
that has most of the prompt, else the first in an order of the prompt's own, within a bound of the load; or the replica
with the fewest tokens in flight, ties to the least recently picked; waiting requests move to replicas with a free slot;
requests are held while no replica is ready.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from itertools import islice
from typing import Generic, Protocol, TypeVar

from llmservice_bench.simulation.requests import OWN, SimulatedRequest

BOUND = 1.25
MOST_ATTEMPTS, MOST_LOST = 3, 2
AHEAD = 2
HOLD_TIMEOUT_S = 600.0
MOST_HELD = 1000
FIRST_ESTIMATE, MEMORY = 256.0, 300
"""Tokens of an answer until some have ended, and how many of these the mean covers."""


class Backend(Protocol):
    """A replica that is ready."""

    @property
    def uid(self) -> str: ...
    @property
    def slots(self) -> int:
        """Requests that it runs at once."""


B = TypeVar("B", bound=Backend)


@dataclass(slots=True, eq=False)
class Ticket(Generic[B]):
    """A request in flight on a backend."""

    request: SimulatedRequest
    backend: B
    tokens: int
    has_begun: bool = False
    """Whether the client has received a token: it is not moved or sent again any more."""


@dataclass(slots=True)
class _Load(Generic[B]):
    tickets: dict[SimulatedRequest, Ticket[B]] = field(default_factory=dict)
    tokens: int = 0
    last_pick: int = 0


class Balancer(Generic[B]):
    """Tokens in flight on each backend, and which has the beginning of which prompts."""

    def __init__(self, *, by_prefix: bool = True) -> None:
        """`by_prefix`: as `spec.routing.strategy`."""
        self._is_by_prefix = by_prefix
        self._loads: dict[str, _Load[B]] = {}
        self._idle = _Load[B]()
        self._picks = 0
        self.output_tokens, self._count = FIRST_ESTIMATE, 0
        self._prefixes: OrderedDict[int, dict[str, int]] = OrderedDict()

    def pick(self, backends: Sequence[B], tried: Collection[str], request: SimulatedRequest) -> B | None:
        """The backend for a request; None when all were `tried` (uids)."""
        candidates = [each for each in backends if each.uid not in tried]
        if not candidates:
            return None
        if not self._is_by_prefix:
            return min(candidates, key=self._least_loaded)
        return self._by_prefix(candidates, request)

    def _least_loaded(self, backend: B) -> tuple[int, int]:
        load = self._of(backend)
        return load.tokens, load.last_pick

    def _by_prefix(self, candidates: Sequence[B], request: SimulatedRequest) -> B:
        """The one that has most of the prompt, whose load stays near the mean, and if possible with a free slot."""
        affinity = affinity_of(request)
        known = self._prefixes.get(affinity, {})
        total = sum(self._of(each).tokens for each in candidates)

        @cache
        def largest() -> int:
            return max((one.tokens for each in candidates for one in self._of(each).tickets.values()), default=0)

        def is_within(backend: B) -> bool:
            cost, tokens = self._cost(request, backend), self._of(backend).tokens
            of_mean = math.ceil((BOUND if known.get(backend.uid) else 1) * (total + cost) / len(candidates))
            if tokens <= of_mean:
                return True
            return tokens + cost <= of_mean + (max(largest(), cost) + cost) / 2

        def order(backend: B) -> tuple[int, bytes]:
            rank = blake2b(backend.uid.encode(), key=affinity.to_bytes(8, "little"), digest_size=8).digest()
            return known.get(backend.uid, 0), rank

        ordered = sorted(filter(is_within, candidates), key=order, reverse=True)
        return next((each for each in ordered if self.in_flight(each) < each.slots), ordered[0])

    def put(self, request: SimulatedRequest, backend: B) -> Ticket[B]:
        ticket = Ticket(request, backend, self._cost(request, backend))
        if request.trace.hash_ids:
            self._remember(request, backend, self._cached(request, backend))
        self._put(ticket)
        return ticket

    def remove(self, ticket: Ticket[B]) -> None:
        load = self._loads[ticket.backend.uid]
        del load.tickets[ticket.request]
        load.tokens -= ticket.tokens

    def learn(self, ticket: Ticket[B]) -> None:
        """A request has finished: its backend has its prompt, and its answer counts for the estimate."""
        request = ticket.request
        self._count = min(self._count + 1, MEMORY)
        self.output_tokens += (request.num_tokens - self.output_tokens) / self._count
        if request.trace.hash_ids:
            self._remember(request, ticket.backend, request.prompt_tokens + request.num_tokens)

    def forget(self, backend: B) -> None:
        """It has left, and nothing is in flight on it."""
        self._loads.pop(backend.uid, None)

    def in_flight(self, backend: B) -> int:
        return len(self._of(backend).tickets)

    def movable(self, backends: Sequence[B]) -> tuple[Ticket[B], B] | None:
        """A waiting request, and the backend with a free slot, or a queue shorter by more than its slots, for it."""
        sources = [each for each in backends if each.slots]
        while sources:  # the emptiest of all is a target, whether or not something can be taken from it
            source, target = min(sources, key=self._free), max(backends, key=self._free)
            free = self._free(target)
            if self._free(source) >= 0 or (free <= 0 and free - self._free(source) <= target.slots):
                return None
            waiting = islice(self._of(source).tickets.values(), source.slots + max(0, -free), None)
            ticket = next((each for each in waiting if not each.has_begun), None)
            if ticket is not None:
                return ticket, target
            sources.remove(source)
        return None

    def has_room(self, backends: Sequence[B]) -> bool:
        """Whether a held request may go."""
        return any(self.in_flight(each) < AHEAD * each.slots for each in backends)

    def _free(self, backend: B) -> int:
        return backend.slots - self.in_flight(backend)

    def _put(self, ticket: Ticket[B]) -> None:
        load = self._loads.setdefault(ticket.backend.uid, _Load())
        self._picks += 1
        load.last_pick = self._picks
        load.tickets[ticket.request] = ticket
        load.tokens += ticket.tokens

    def _cached(self, request: SimulatedRequest, backend: B) -> int:
        return self._prefixes.get(request.trace.hash_ids[0], {}).get(backend.uid, 0) if request.trace.hash_ids else 0

    def _cost(self, request: SimulatedRequest, backend: B) -> int:
        expected = max(1, round(self.output_tokens))
        if request.trace.max_tokens is not None:
            expected = min(expected, request.trace.max_tokens)
        return max(1, max(0, request.prompt_tokens - self._cached(request, backend)) + expected)

    def _remember(self, request: SimulatedRequest, backend: B, tokens: int) -> None:
        known = self._prefixes.setdefault(request.trace.hash_ids[0], {})
        known[backend.uid] = tokens
        for uid in [uid for uid in known if uid != backend.uid and uid not in self._loads]:
            del known[uid]

    def _of(self, backend: B) -> _Load[B]:
        return self._loads.get(backend.uid, self._idle)


def affinity_of(request: SimulatedRequest) -> int:
    """Equal for requests that share the beginning of their prompts, which those without hash ids do not."""
    return request.trace.hash_ids[0] if request.trace.hash_ids else request.number | OWN
