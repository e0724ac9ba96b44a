"""One lane's queue: who of the waiting comes next."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from operator import attrgetter

from llmservice_server.engine.config import QueuePolicy
from llmservice_server.engine.request import Request

_PLACE = attrgetter("place")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneConfig:
    """`sjf` serves the shortest first, with ageing: a request gains on later ones as if it shrank while it waits."""

    share: float = 0.0  # of sequences and tokens, which is the lane's own whatever the other lanes want
    policy: QueuePolicy = "fcfs"
    ageing_tokens_per_s: float = 100.0  # under sjf none is overtaken by one that arrives tokens/ageing s later


class Lane:
    """Waiting requests in the order in which they are to be served. A preempted one comes back to its old place."""

    def __init__(self, config: LaneConfig, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.config = config
        self.own_seqs = int(config.share * max_num_seqs)
        self.own_tokens = int(config.share * max_num_batched_tokens)
        self.waiting: list[Request] = []
        self.num_running = 0

    def enter(self, request: Request) -> None:
        """A new request: its place is decided once. All requests age alike, so their order never changes."""
        _, priority, order = request.priority
        if self.config.policy == "sjf":
            tokens = request.num_prompt_tokens + request.sampling.max_tokens
            request.place = (priority, tokens + request.arrival_s * self.config.ageing_tokens_per_s, order)
        else:
            request.place = (priority, 0.0, order)
        self.enqueue(request)

    def enqueue(self, request: Request) -> None:
        insort(self.waiting, request, key=_PLACE)

    def remove(self, request: Request) -> None:
        position = bisect_left(self.waiting, request.place, key=_PLACE)
        if position == len(self.waiting) or self.waiting[position] is not request:
            raise ValueError(f"request {request.request_id} is not in the queue that its status names")
        del self.waiting[position]
