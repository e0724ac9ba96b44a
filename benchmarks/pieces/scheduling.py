"""The scheduler alone, without model and sampling: its time per step, and the tokens and steps that prompts take."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from llmservice_planner.model.block_groups import BlockGroups
from llmservice_server.engine.block_pool import BlockPool, chain_start, hash_blocks
from llmservice_server.engine.interfaces import Plan
from llmservice_server.engine.request import Request
from llmservice_server.engine.scheduler import ContinuousScheduler, SchedulerConfig
from llmservice_server.types.messages import GenerateRequest, SamplingParams
from pieces.timing import Timing

NUM_RUNNING = 256
BLOCK_SIZE = 16
LONG_TOKENS = 128_000
_PROMPT_TOKENS = 2000
_STEPS = 200
_GROUPS = BlockGroups(BLOCK_SIZE, num_layers=1)
_CONFIG = SchedulerConfig(max_num_seqs=NUM_RUNNING + 1, max_num_batched_tokens=2048, prefill_chunk_tokens=512)


class Load:
    """A scheduler with `NUM_RUNNING` requests that decode, the last `num_batch` of them in the batch lane."""

    def __init__(self, num_batch: int = 0, max_num_seqs: int = NUM_RUNNING + 1, spare_blocks: int = 20_000) -> None:
        blocks = NUM_RUNNING * -(-(_PROMPT_TOKENS + 4 * _STEPS) // BLOCK_SIZE)
        config = replace(_CONFIG, max_num_seqs=max_num_seqs)
        self.scheduler = ContinuousScheduler(BlockPool(1 + blocks + spare_blocks, _GROUPS), config)
        self._arrivals = 0
        for number in range(NUM_RUNNING):
            lane = "batch" if number >= NUM_RUNNING - num_batch else "interactive"
            self.add([number] * _PROMPT_TOKENS, max_tokens=4 * _STEPS, lane=lane)
        while len(self.scheduler.running) < NUM_RUNNING or any(
            each.num_computed_tokens < each.num_prompt_tokens for each in self.scheduler.running
        ):
            self.step()

    def add(self, prompt: list[int], max_tokens: int, lane: str = "interactive") -> Request:
        self._arrivals += 1
        message = GenerateRequest(
            request_id=str(self._arrivals),
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=max_tokens),
            arrival_s=0.0,
            lane=lane,
            block_hashes=hash_blocks(prompt, BLOCK_SIZE, chain_start(None)),
        )
        request = Request.of(message, self._arrivals, 0, frozenset())
        self.scheduler.add(request)
        return request

    def step(self) -> float:
        """Seconds of the scheduler."""
        started_s = time.perf_counter()
        plan = self.scheduler.schedule(0.0)
        self.scheduler.commit(plan)
        took_s = time.perf_counter() - started_s
        for share in plan.scheduled:
            if share.samples and share.request.append(7) is not None:
                self.scheduler.finish(share.request)
        return took_s


def measure_scheduling() -> dict[str, Timing]:
    """The time of a step by situation."""
    steady = Load()
    timings = {"steady decode": Timing.of([steady.step() for _ in range(_STEPS)])}
    full = Load(num_batch=16, max_num_seqs=NUM_RUNNING, spare_blocks=0)  # of the batch lane's own share
    full.add([999] * 5000, max_tokens=100)
    timings["an interactive request waits"] = Timing.of([full.step() for _ in range(_STEPS)])
    for name, tokens in (("a prompt of 128,000 tokens is computed", range(LONG_TOKENS)), ("it arrives again", None)):
        if tokens is not None:
            prompt = list(tokens)
        request = steady.add(prompt, max_tokens=1)
        seconds = []
        while request.num_computed_tokens < request.num_prompt_tokens:
            seconds.append(steady.step())
        timings[name] = Timing.of(seconds)
    return timings


class SchedulerBefore(ContinuousScheduler):
    """With the rules of commit 82f1556 for prompts: blocks are shared from the step after theirs on, by requests that
    are admitted then, and a prompt that is alone is computed in chunks too.
    """

    def _register_ahead(self, request: Request, plan: Plan) -> None: ...

    def _skip_computed(self, request: Request) -> None: ...

    def _give_rest(self, plan: Plan, budget: int) -> None:
        if len(plan.scheduled) > 1:
            super()._give_rest(plan, budget)


@dataclass(frozen=True, slots=True)
class PromptWork:
    steps: int
    tokens: int


def measure_prompts(kind: type[ContinuousScheduler], count: int, prompt_tokens: int) -> PromptWork:
    """What `count` requests with one prompt take until each has its first token."""
    scheduler = kind(BlockPool(1 + count * prompt_tokens // BLOCK_SIZE * 2, _GROUPS), _CONFIG)
    for number in range(count):
        message = GenerateRequest(
            request_id=str(number),
            prompt_token_ids=list(range(prompt_tokens)),
            sampling=SamplingParams(max_tokens=1),
            arrival_s=0.0,
        )
        scheduler.add(Request.of(message, number, 0, frozenset()))
    steps = tokens = 0
    while scheduler.running or scheduler.waiting:
        plan = scheduler.schedule(0.0)
        scheduler.commit(plan)
        steps, tokens = steps + 1, tokens + plan.num_tokens
        for share in plan.scheduled:
            if share.samples:
                scheduler.finish(share.request)
    return PromptWork(steps, tokens)
