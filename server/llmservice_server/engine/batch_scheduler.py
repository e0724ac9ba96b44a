"""Request-level batching, as servers did it before Orca: a batch is formed, and nobody joins until it has ended.

To measure continuous batching against, and for jobs that do not care when an answer comes.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from llmservice_server.engine.block_pool import BlockPool
from llmservice_server.engine.plan import Plan, Scheduled
from llmservice_server.engine.request import LANES, Request, Status, new_block_table

_PRIORITY = attrgetter("priority")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    block_size: int
    batch_size: int
    max_wait_s: float  # of the oldest request, after which a smaller batch is run
    padded: bool  # all sequences are as long as the longest: in prompt, in answer and in memory
    max_num_batched_tokens: int  # the budget of a step, padding included


class BatchScheduler:
    """`padded` is static batching: prompts are padded to the longest, those who have ended are computed along until the
    slowest has, and everybody holds the blocks of the longest prompt and answer. Without it, it is dynamic batching:
    those who have ended leave, and hold no more than their own longest answer; their places stay empty.
    """

    prefix_queries = 0
    prefix_hits = 0

    def __init__(self, pool: BlockPool, config: BatchConfig) -> None:
        self.pool = pool
        self.config = config
        self.waiting: list[Request] = []  # sorted by priority
        self._batch: list[Request] = []  # the running and, if padded, those who have ended
        self._longest_prompt = 0

    @property
    def running(self) -> Sequence[Request]:
        return [request for request in self._batch if request.status is Status.RUNNING]

    @property
    def num_waiting(self) -> Mapping[str, int]:
        return dict.fromkeys(LANES, 0) | Counter(request.lane for request in self.waiting)

    @property
    def num_preemptions(self) -> Mapping[str, int]:
        """None: whoever runs holds all the blocks that it can ever need."""
        return {"recompute": 0, "swap": 0}

    def add(self, request: Request) -> None:
        request.status = Status.WAITING
        insort(self.waiting, request, key=_PRIORITY)

    def finish(self, request: Request) -> None:
        """End a request. Its blocks are free at once or, if padded, with the batch's last."""
        if request.status is Status.WAITING:
            del self.waiting[bisect_left(self.waiting, request.priority, key=_PRIORITY)]
        request.status = Status.FINISHED
        if not self.config.padded or not self.running:
            for member in self._batch:
                if member.status is Status.FINISHED:
                    self.pool.free(member.block_table)
                    member.block_table = new_block_table()
            self._batch = list(self.running)

    def tokens_left(self, plan: Plan) -> int:
        return max(1, self.config.max_num_batched_tokens - plan.num_tokens - plan.num_padding)

    def wait_s(self, now: float) -> float:
        if self._batch:
            return 0.0
        if not self.waiting:
            return math.inf
        if len(self.waiting) >= self.config.batch_size:
            return 0.0
        oldest_s = min(request.arrival_s for request in self.waiting)
        return max(0.0, oldest_s + self.config.max_wait_s - now)

    def schedule(self, now: float) -> Plan:
        if not self._batch and self.waiting and self.wait_s(now) == 0:
            self._form(now)
        plan = Plan()
        prompts = [request for request in self.running if request.num_output_tokens == 0]
        if prompts:
            self._schedule_prompts(prompts, plan)
        else:
            for request in self._batch:
                self._schedule_decode(request, plan)
        return plan

    def commit(self, plan: Plan, failed: Collection[Request] = ()) -> None:
        """Nothing is shared, so nobody needs to know."""

    def _form(self, now: float) -> None:
        """Take as many of the waiting as the batch and the pool hold, but one at least."""
        longest_prompt = longest_answer = 0
        members: list[Request] = []
        total = 0
        for request in self.waiting[: self.config.batch_size]:
            prompt = max(longest_prompt, request.num_tokens)
            answer = max(longest_answer, request.sampling.max_tokens)
            own = self._num_blocks(request.num_tokens + request.sampling.max_tokens)
            needed = (len(members) + 1) * self._num_blocks(prompt + answer) if self.config.padded else total + own
            if needed > self.pool.num_free:
                break
            longest_prompt, longest_answer, total = prompt, answer, total + own
            members.append(request)
        del self.waiting[: len(members)]
        self._longest_prompt = longest_prompt
        for request in members:
            length = request.num_tokens + request.sampling.max_tokens
            if self.config.padded:
                length = longest_prompt + longest_answer
            request.block_table = new_block_table(self.pool.allocate(self._num_blocks(length)))
            request.status = Status.RUNNING
            request.first_scheduled_s = now
        self._batch = members

    def _schedule_prompts(self, prompts: Sequence[Request], plan: Plan) -> None:
        """Prompts, in their order, as far as the budget goes; answers begin when all prompts are computed."""
        budget = self.config.max_num_batched_tokens
        for request in prompts:
            remaining = request.num_tokens - request.num_computed_tokens
            if remaining == 0:
                continue
            padding = self._longest_prompt - request.num_tokens if self.config.padded else 0
            if remaining + padding > budget and plan.scheduled:
                return
            num_tokens = min(remaining, budget)
            padding = min(padding, budget - num_tokens)
            plan.scheduled.append(
                Scheduled(request, request.num_computed_tokens, num_tokens, num_tokens == remaining, padding)
            )
            request.num_computed_tokens += num_tokens
            budget -= num_tokens + padding

    def _schedule_decode(self, request: Request, plan: Plan) -> None:
        last = request.num_tokens - 1
        if request.status is Status.FINISHED:  # what is written over its last token is never read
            plan.scheduled.append(Scheduled(request, last, 0, samples=False, num_padding=1))
            return
        plan.scheduled.append(Scheduled(request, last, 1, samples=True))
        request.num_computed_tokens += 1

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)
