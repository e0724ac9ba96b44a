"""The queue of a lane: which of its waiting requests is served next."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from operator import attrgetter

from llmservice_server.engine.config import QueueOrder
from llmservice_server.engine.request import Request

_PLACE = attrgetter("place")
_MEMORY = 300  # requests; older ones count ever less
_ANSWER_WORK = 8  # of a token of an answer: it takes a step of its own; those of a prompt share one


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneConfig:
    """`sjf` serves the shortest predicted first, with ageing: see `Lane.enter`."""

    share: float = 0.0  # of sequences and tokens, reserved for the lane whatever the load of the others
    order: QueueOrder = "fcfs"
    patience: float = 1.5  # of the longest requests under sjf, as a multiple of the work before them


@dataclass(slots=True)
class _Client:
    """The waiting requests of one client of a lane, by place, and the tokens that it has been served."""

    served: int
    begun_work: float  # of its requests so far
    waiting: list[Request] = field(default_factory=list)
    waiting_work: float = 0.0  # of those that have not begun


class Lane:
    """Waiting requests in the order in which they are to be served. A preempted one returns to its previous place.

    Clients are served in turn: the next request is of the client that has been served the fewest tokens, so that a
    thousand requests of one delay no other's (the virtual token counter of Sheng et al., "Fairness in Serving Large
    Language Models", OSDI 2024). One that had nothing to be served begins with as many as the client that was served
    last. Preempted requests go first, whoever they are of. Order and priorities are among the requests of a client.
    """

    def __init__(self, config: LaneConfig, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.config = config
        self.own_seqs = int(config.share * max_num_seqs)
        self.own_tokens = int(config.share * max_num_batched_tokens)
        self.num_waiting = 0
        self.num_running = 0
        self._clients: dict[str | None, _Client] = {}
        self._last_served = 0  # tokens of the client that was served last, before it was
        self._begun_work = 0.0
        self._usual_work = 0.0  # the mean of a request
        self._num_usual = 0  # requests that it is of

    @property
    def head(self) -> Request | None:
        """The next request."""
        if len(self._clients) == 1:
            (client,) = self._clients.values()
            return client.waiting[0] if client.waiting else None
        waiting = [client for client in self._clients.values() if client.waiting]
        return min(waiting, key=_turn).waiting[0] if waiting else None

    def in_order(self) -> Iterator[Request]:
        """All requests, as they would be served if each cost the tokens of its prompt."""
        if len(self._clients) == 1:
            (client,) = self._clients.values()
            yield from client.waiting
            return
        turns = [(_turn(client), client, 0, 0) for client in self._clients.values() if client.waiting]
        heapify(turns)
        while turns:
            _, client, position, cost = turns[0]
            request = client.waiting[position]
            yield request
            position, cost = position + 1, cost + request.num_prompt_tokens
            if position < len(client.waiting):
                heapreplace(turns, (_turn(client, position, cost), client, position, cost))
            else:
                heappop(turns)

    def enter(self, request: Request, num_cached_tokens: int = 0) -> None:
        """A new request, of whose prompt the prefix cache has so many tokens: its place is decided once.

        Under sjf it is due when its client has begun so much work from now on: the work that waits before it, times the
        square of its own as a multiple of the usual, at most `patience`. The earliest due is served first. Requests
        that come when all of that has begun are due later, so none of them goes before it. Work is counted in tokens:
        those of the prompt that are not cached, and those predicted of the answer, times `_ANSWER_WORK`.
        """
        _, priority, order = request.priority
        client = self._client(request)
        due = 0.0
        if self.config.order == "sjf":
            request.work = request.num_prompt_tokens - num_cached_tokens + _ANSWER_WORK * request.predicted_tokens
            self._num_usual = min(self._num_usual + 1, _MEMORY)
            self._usual_work += (request.work - self._usual_work) / self._num_usual
            share = min(self.config.patience, (request.work / self._usual_work) ** 2)
            due = client.begun_work + client.waiting_work * share
            client.waiting_work += request.work
        request.place = (priority, due, order)
        if not client.waiting:
            client.served = max(client.served, self._last_served)
        self.enqueue(request)

    def enqueue(self, request: Request) -> None:
        insort(self._client(request).waiting, request, key=_PLACE)
        self.num_waiting += 1

    def remove(self, request: Request) -> None:
        waiting = self._client(request).waiting
        position = bisect_left(waiting, request.place, key=_PLACE)
        if position == len(waiting) or waiting[position] is not request:
            raise ValueError(f"request {request.request_id} is not in the queue that its status names")
        del waiting[position]
        self.num_waiting -= 1
        if request.first_scheduled_s is None:
            self._client(request).waiting_work -= request.work

    def serve_prompt(self, request: Request, num_tokens: int) -> None:
        """Its turn has come: `num_tokens` of its prompt are to be computed."""
        client = self._client(request)
        self._last_served = max(self._last_served, client.served)
        client.served += num_tokens
        client.begun_work += request.work
        self._begun_work += request.work

    def serve_answer(self, request: Request) -> None:
        """Its answer has ended."""
        self._client(request).served += request.num_output_tokens

    def _client(self, request: Request) -> _Client:
        client = self._clients.get(request.client)
        if client is None:
            for name, other in list(self._clients.items()):  # those that differ in nothing from new ones
                if not other.waiting and other.served <= self._last_served:
                    del self._clients[name]
            client = self._clients[request.client] = _Client(self._last_served, self._begun_work)
        return client


def _turn(client: _Client, position: int = 0, cost: int = 0) -> tuple[bool, int, int]:
    """When the client's request at `position` is served; the smallest is next. No two are equal."""
    request = client.waiting[position]
    return request.first_scheduled_s is None, client.served + cost, request.place[2]
