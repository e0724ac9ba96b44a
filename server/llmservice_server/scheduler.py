"""Continuous batching: who computes how many tokens in the next step."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from dataclasses import dataclass, field
from operator import attrgetter

from llmservice_server.block_pool import BlockPool
from llmservice_server.request import LANES, Request, Status

_PRIORITY = attrgetter("priority")


@dataclass(frozen=True, slots=True)
class Scheduled:
    """One request's share of a step: the tokens [start, start + num_tokens) of its `token_ids`."""

    request: Request
    start: int
    num_tokens: int
    samples: bool  # the share reaches the last known token, so the step yields the next one

    @property
    def block_table(self) -> list[int]:
        return self.request.block_table.blocks


@dataclass(slots=True)
class Plan:
    """One step. The runner computes `scheduled` in this order."""

    scheduled: list[Scheduled] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(share.num_tokens for share in self.scheduled)


class ContinuousScheduler:
    """Knows no phases: every running request chases `num_tokens` under one token budget per step.

    Running requests come first, then admissions, both in order of priority (lane, then arrival). When the blocks run
    out the running request of least priority is preempted: it gives up its blocks, is computed again later
    (recompute) and keeps its place in the queue. A request is admitted only when all the tokens known of it fit
    beside a small reserve, because a request let in too early is soon preempted again.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefill_chunk_tokens: int,
    ) -> None:
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(f"{max_num_batched_tokens} tokens a step cannot give {max_num_seqs} sequences one each")
        self.pool = pool
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.prefill_chunk_tokens = prefill_chunk_tokens
        self.watermark_blocks = pool.num_usable // 100
        self.waiting: list[Request] = []  # sorted by priority
        self.running: list[Request] = []  # sorted by priority
        self.num_waiting = Counter(dict.fromkeys(LANES, 0))
        self.num_preemptions = 0

    def add(self, request: Request) -> None:
        request.status = Status.WAITING
        self._enqueue(request)

    def finish(self, request: Request) -> None:
        """Take a request out of its queue and free its blocks, whatever ended it."""
        if request.status is Status.RUNNING:
            _remove(self.running, request)
        elif request.status is Status.WAITING:
            _remove(self.waiting, request)
            self.num_waiting[request.lane] -= 1
        request.status = Status.FINISHED
        self._release(request)

    def schedule(self) -> Plan:
        """Plan the next step and take the blocks it needs.

        `num_computed_tokens` advances here, not after the step: what is scheduled is computed, in this order.
        """
        plan = Plan()
        budget = self._schedule_running(plan, self.max_num_batched_tokens)
        if not plan.preempted:
            self._admit(plan, budget)
        return plan

    def _schedule_running(self, plan: Plan, budget: int) -> int:
        """Give every running request its share; returns the rest of the budget."""
        position = 0
        while position < len(self.running):
            request = self.running[position]
            behind = len(self.running) - position - 1  # each of them gets a token too: a long prompt stalls nobody
            num_tokens = self._share_of(request, budget - behind)
            if not self._make_room(request, num_tokens, plan):
                break
            self._schedule(request, num_tokens, plan)
            budget -= num_tokens
            position += 1
        return budget

    def _make_room(self, request: Request, num_tokens: int, plan: Plan) -> bool:
        """Give `request` blocks for its share, preempting from the end of `running`; False if that met itself."""
        table = request.block_table
        missing = self._num_blocks(request.num_computed_tokens + num_tokens) - len(table)
        if missing <= 0:
            return True
        while not self.pool.can_allocate(missing):
            victim = self.running.pop()
            self._preempt(victim)
            plan.preempted.append(victim)
            if victim is request:
                return False
        table.extend(self.pool.allocate(missing, after=table.last))
        return True

    def _admit(self, plan: Plan, budget: int) -> None:
        """Let waiting requests in, first come first served: one that does not fit yet holds up those behind it."""
        while self.waiting and len(self.running) < self.max_num_seqs and budget > 0:
            request = self.waiting[0]
            num_blocks = self._num_blocks(request.num_tokens)
            reserve = self.watermark_blocks if self.running else 0  # alone, a request may use the whole pool
            if not self.pool.can_allocate(num_blocks + reserve):
                break
            del self.waiting[0]
            self.num_waiting[request.lane] -= 1
            self._take_first_blocks(request, num_blocks)
            request.status = Status.RUNNING
            insort(self.running, request, key=_PRIORITY)
            num_tokens = self._share_of(request, budget)
            self._schedule(request, num_tokens, plan)
            budget -= num_tokens

    def _take_first_blocks(self, request: Request, num_blocks: int) -> None:
        longest = self._num_blocks(request.num_prompt_tokens + request.sampling.max_tokens)
        # Many requests stop far below max_tokens: setting all of it aside would leave the next ones nothing but scraps.
        room = min(longest - num_blocks, self.pool.num_usable // (2 * self.max_num_seqs))
        request.block_table.extend(self.pool.start(num_blocks, room))

    def _share_of(self, request: Request, budget: int) -> int:
        return min(request.num_tokens - request.num_computed_tokens, self.prefill_chunk_tokens, budget)

    def _schedule(self, request: Request, num_tokens: int, plan: Plan) -> None:
        start = request.num_computed_tokens
        request.num_computed_tokens = start + num_tokens
        samples = request.num_computed_tokens == request.num_tokens
        plan.scheduled.append(Scheduled(request, start, num_tokens, samples))

    def _preempt(self, request: Request) -> None:
        self._release(request)
        request.num_computed_tokens = 0
        request.status = Status.WAITING
        self._enqueue(request)
        self.num_preemptions += 1

    def _enqueue(self, request: Request) -> None:
        insort(self.waiting, request, key=_PRIORITY)
        self.num_waiting[request.lane] += 1

    def _release(self, request: Request) -> None:
        self.pool.free(request.block_table.clear())

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


def _remove(queue: list[Request], request: Request) -> None:
    position = bisect_left(queue, request.priority, key=_PRIORITY)
    if position == len(queue) or queue[position] is not request:
        raise ValueError(f"request {request.request_id} is not in the queue that its status names")
    del queue[position]
