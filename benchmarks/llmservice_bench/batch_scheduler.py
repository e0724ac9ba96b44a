"""Request-level batching, as servers did it before Orca: a batch is formed, and no request joins until it has ended.

What continuous batching is measured against. `llmservice serve --scheduler dynamic` and `static` find it through the
entry points `llmservice.schedulers`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from llmservice_server.engine.admission import Admission
from llmservice_server.engine.block_pool import BlockPool
from llmservice_server.engine.config import LANES, EngineConfig
from llmservice_server.engine.interfaces import Plan, Scheduled
from llmservice_server.engine.request import Request, Status, new_block_table
from llmservice_server.types.errors import ConfigError

_PRIORITY = attrgetter("priority")
PADDING = "padding"  # the id of what is computed for no request


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    batch_size: int
    max_wait_s: float  # of the oldest request, after which a smaller batch is run
    padded: bool  # all sequences are as long as the longest: in prompt, in answer and in memory
    max_num_batched_tokens: int  # the budget of a step, padding included


class AdmitsAll(Admission):
    """For the continuous scheduler: predicts nothing, so that a request is admitted when its known tokens fit."""

    def peak_blocks(self, requests: Sequence[Request]) -> float:
        return 0.0


class BatchScheduler:
    """`padded` is static batching: prompts are padded to the longest, requests that have ended are computed until the
    slowest has ended, and each holds the blocks of the longest prompt and answer. Without it, it is dynamic batching:
    requests that have ended leave, and hold no more than their own longest answer; their places stay empty.
    """

    prefix_queries = 0
    prefix_hits = 0

    def __init__(self, pool: BlockPool, config: BatchConfig) -> None:
        """Raises ConfigError for a model whose layers need several block tables."""
        if len(pool.groups) > 1:
            raise ConfigError("this scheduler runs no model with windows in some of its layers: use continuous")
        self.pool = pool
        self.config = config
        self.waiting: list[Request] = []  # sorted by priority
        self._batch: list[Request] = []  # the running and, if padded, those that have ended
        self._longest_prompt = 0

    @property
    def running(self) -> Sequence[Request]:
        return [request for request in self._batch if request.status is Status.RUNNING]

    @property
    def num_waiting(self) -> Mapping[str, int]:
        return dict.fromkeys(LANES, 0) | Counter(request.lane for request in self.waiting)

    @property
    def num_preemptions(self) -> Mapping[str, int]:
        """None: a running request holds all the blocks that it can ever need."""
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
        return max(1, self.config.max_num_batched_tokens - plan.num_tokens)

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

    @property
    def num_admissible(self) -> int:
        return self.config.batch_size

    def commit(self, plan: Plan, failed: Collection[Request] = ()) -> Collection[Request]:
        """Nothing is shared between requests."""
        return ()

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
            plan.scheduled.append(Scheduled(request, request.num_computed_tokens, num_tokens, num_tokens == remaining))
            if padding:
                plan.scheduled.append(_padding(request, padding))
            request.num_computed_tokens += num_tokens
            budget -= num_tokens + padding

    def _schedule_decode(self, request: Request, plan: Plan) -> None:
        last = request.num_tokens - 1
        runs = request.status is Status.RUNNING
        plan.scheduled.append(Scheduled(request, last, 1, samples=runs))  # where it has ended: computed again in vain
        request.num_computed_tokens += runs

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.groups.block_size)


def _padding(request: Request, num_tokens: int) -> Scheduled:
    """Tokens of no meaning behind a prompt, in the blocks of its answer, which overwrites them."""
    behind = replace(request, request_id=PADDING, token_ids=request.token_ids + [0] * num_tokens)
    return Scheduled(behind, request.num_tokens, num_tokens, samples=False)


def padding_tokens(plan: Plan) -> int:
    """Those of a step that are computed for no request."""
    return sum(
        share.num_tokens
        for share in plan.scheduled
        if share.request.request_id == PADDING or (share.request.status is Status.FINISHED and not share.samples)
    )


def dynamic(config: EngineConfig, max_num_seqs: int, pool: BlockPool) -> BatchScheduler:
    return _scheduler(config, max_num_seqs, pool, max_wait_s=0.05, padded=False)


def static(config: EngineConfig, max_num_seqs: int, pool: BlockPool) -> BatchScheduler:
    return _scheduler(config, max_num_seqs, pool, max_wait_s=10.0, padded=True)


def _scheduler(
    config: EngineConfig, max_num_seqs: int, pool: BlockPool, *, max_wait_s: float, padded: bool
) -> BatchScheduler:
    """Raises ConfigError where the pool holds the longest request only without what its layers' window has left."""
    num_blocks = -(-(config.max_model_len or 1) // pool.groups.block_size)
    if num_blocks > pool.num_usable:
        raise ConfigError(
            f"{config.scheduler} batches keep what the model's window has left: max_model_len {config.max_model_len} "
            f"needs {num_blocks} blocks, the KV cache has {pool.num_usable}: lower it to "
            f"{pool.num_usable * pool.groups.block_size}, enlarge the cache, or use --scheduler continuous"
        )
    batch = BatchConfig(
        batch_size=max_num_seqs,
        max_wait_s=max_wait_s if config.max_batch_wait_s is None else config.max_batch_wait_s,
        padded=padded,
        max_num_batched_tokens=config.step_tokens,
    )
    return BatchScheduler(pool, batch)
