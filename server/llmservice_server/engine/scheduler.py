"""Continuous batching: how many tokens each request computes in the next step."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from operator import attrgetter

import msgspec

from llmservice_server.engine.admission import Admission
from llmservice_server.engine.block_pool import HASH_BYTES, NULL_BLOCK, BlockHashes, BlockPool, SwapSpace
from llmservice_server.engine.config import LANES, EngineConfig
from llmservice_server.engine.interfaces import Plan, Scheduled, Scheduler
from llmservice_server.engine.lane import Lane, LaneConfig
from llmservice_server.engine.request import Request, Status
from llmservice_server.engine.sequence_blocks import SequenceBlocks
from llmservice_server.types.errors import ConfigError

INTERACTIVE, BATCH = LANES
_PRIORITY = attrgetter("priority")
ASK_AGAIN_STEPS = 16
"""For so many steps a request that did not fit is not considered again, where no blocks have come free for it: the most
that the others will hold falls as they go on, but working it out takes a good part of a step's time on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    max_num_seqs: int  # at most `max_num_batched_tokens`, as `EngineConfig` checks
    max_num_batched_tokens: int  # the budget of a step
    prefill_chunk_tokens: int  # of a step, at most for one prompt; a prompt that needs more is a long one
    long_prefill_tokens: int | None = None  # of a step, at most for all long prompts while others wait; None: 3/4
    prefix_caching: bool = True
    interactive: LaneConfig = field(default_factory=LaneConfig)
    expected_tokens: int = 1536  # of a request, prompt and answer, until enough have ended
    batch: LaneConfig = field(default_factory=lambda: LaneConfig(share=0.1))
    ageing_s: float = 30.0  # after it a batch request that is due its lane's share is overtaken by none

    @property
    def max_long_tokens(self) -> int:
        if self.long_prefill_tokens is not None:
            return self.long_prefill_tokens
        return max(self.prefill_chunk_tokens, self.max_num_batched_tokens * 3 // 4)


class ContinuousScheduler:
    """There are no phases: every running request computes tokens up to `num_tokens`, under one token budget per step.

    Running requests come first, then admissions. Interactive requests go before batch requests, which use idle
    capacity and yield it within a step, except for their lane's share of sequences and tokens. When the blocks run out
    the running request of least priority (lowest lane, then latest arrival) is preempted: its blocks are copied to the
    swap space where that is cheaper than computing them again, and it keeps its place in the queue. A request is
    admitted only when all its known tokens fit beside a small reserve and beside the blocks that are reserved for
    prompts that are being computed, and when the cache is predicted to hold it and the running ones until they end,
    because a request that is admitted too early is preempted again. It takes its blocks chunk by chunk, and gives those
    back that its layers' windows have left.

    The blocks that a chunk of a prompt fills are findable in the prefix cache from its planning on, so that requests
    with one beginning compute it once even if they arrive together: in each layer, keys and values of all tokens of a
    step are stored before any of them are read. A single token's block is not, because steps of decodes alone are
    computed by kernels that store and read in one pass.
    """

    def __init__(self, pool: BlockPool, config: SchedulerConfig, swap: SwapSpace | None = None) -> None:
        self.pool = pool
        self.config = config
        self.swap = swap
        self.blocks = SequenceBlocks(pool, swap)
        self.watermark_blocks = pool.num_usable // 100
        self.lanes = {
            name: Lane(lane, config.max_num_seqs, config.max_num_batched_tokens)
            for name, lane in ((INTERACTIVE, config.interactive), (BATCH, config.batch))
        }
        self.running: list[Request] = []  # sorted by priority
        self.admission = Admission(pool.groups, config.expected_tokens)
        self.num_preemptions = Counter({"recompute": 0, "swap": 0})
        self.prefix_queries = 0  # prompt tokens
        self.prefix_hits = 0
        self._cut_short: list[int] = []  # places in this step's plan of prompts that are not computed to their end
        self._long_left = 0  # tokens of this step that long prompts may still take
        self._reserved_blocks = 0  # to running prompts, which take them chunk by chunk
        self._admitted_since_batch = 1 << 30  # interactive requests, since the last admission of a batch request
        self._refused: dict[Request, int] = {}  # did not fit into so many blocks, and no request has ended since
        self.num_steps = 0
        self._block_size = pool.groups.block_size

    @property
    def waiting(self) -> list[Request]:
        """Lane by lane, in the order in which each is served."""
        return [request for lane in self.lanes.values() for request in lane.in_order()]

    @property
    def num_waiting(self) -> dict[str, int]:
        return {name: lane.num_waiting for name, lane in self.lanes.items()}

    @property
    def num_admissible(self) -> int:
        return min(self.config.max_num_seqs, self.admission.capacity(self.pool.num_usable))

    def add(self, request: Request) -> None:
        request.status = Status.WAITING
        if self.config.prefix_caching and request.sampling.prompt_logprobs is None:  # these need the whole prompt
            request.block_hashes = BlockHashes(
                self._block_size,
                request.cache_salt,
                request.prompt_hashes,
                None if request.adapter is None else request.adapter.key,
            )
        lane = self._lane(request)
        num_cached = len(self.blocks.find(request)[0]) * self._block_size if lane.config.order == "sjf" else 0
        lane.enter(request, num_cached)

    def finish(self, request: Request) -> None:
        """Take a request out of its queue and free its blocks, whatever ended it."""
        if request.status is not Status.FINISHED and request.num_output_tokens:
            self.admission.observe(request, self.blocks.shared_tokens(request))
            self._lane(request).serve_answer(request)
        if request.status is Status.RUNNING:
            self._stop_running(request)
        elif request.status is Status.WAITING:
            self._lane(request).remove(request)
        request.status = Status.FINISHED
        self.blocks.release(request)
        self.blocks.drop_swapped(request)

    def tokens_left(self, plan: Plan) -> int:
        """Of the batch lane's share what its requests leave, or what the step's budget leaves; at least a token."""
        own = self.lanes[BATCH].own_tokens
        used = sum(each.num_tokens for each in plan.scheduled if each.request.lane == BATCH)
        return max(1, min(own, max(own - used, self.config.max_num_batched_tokens - plan.num_tokens)))

    def wait_s(self, now: float) -> float:  # other schedulers wait for a full batch
        return 0.0 if self.running or any(lane.num_waiting for lane in self.lanes.values()) else math.inf

    def schedule(self, now: float) -> Plan:
        """Plan the next step and take the blocks it needs.

        `num_computed_tokens` advances here, not after the step: what is scheduled is computed, in this order.
        """
        plan = Plan()
        self.num_steps += 1
        if self.num_steps % ASK_AGAIN_STEPS == 0:
            self._refused.clear()
        self._long_left = self.config.max_long_tokens
        self._cut_short = []
        self._yield_to_interactive(plan)
        num_yielded = len(plan.preempted)
        budget = self._schedule_running(plan)
        self._reserved_blocks = sum(self.blocks.to_come(plan.scheduled[index].request) for index in self._cut_short)
        if len(plan.preempted) == num_yielded:
            while budget > 0 and len(self.running) < self.config.max_num_seqs:
                admitted = self._admit_next(plan, budget, now)
                if admitted == 0:
                    break
                budget -= admitted
        self._give_rest(plan, budget)
        return plan

    def commit(self, plan: Plan, failed: Collection[Request] = ()) -> Collection[Request]:
        """Register the blocks that the step has filled in the prefix cache; but for the `failed` and those that shared
        a block which a failed one should have filled: these are returned, and computed again from their beginning.
        """
        void = self._revoke(plan, failed) if failed else ()
        block_size = self._block_size
        for request in [
            each.request for each in plan.scheduled if each.start % block_size + each.num_tokens >= block_size
        ]:
            if request.status is Status.RUNNING and request not in failed:
                self._register(request, request.num_computed_tokens)
        return void

    def _register(self, request: Request, num_tokens: int) -> list[int]:
        """Make the full blocks of its first `num_tokens` findable; returns those that were not."""
        num_full = num_tokens // self._block_size
        first = request.num_committed_blocks
        if request.block_hashes is None or num_full <= first:
            return []
        request.num_committed_blocks = num_full
        hashes = request.block_hashes.first(num_full, request.token_ids)[first * HASH_BYTES :]
        registered = []
        for group, table in enumerate(request.block_tables):
            registered += self.pool.register(table[first:num_full], hashes, group)
        return registered

    def _revoke(self, plan: Plan, failed: Collection[Request]) -> list[Request]:
        """Unregister what `failed` should have computed, and what was computed from it by the requests returned."""
        invalid: set[int] = set()
        void = []
        for share in plan.scheduled:
            request = share.request
            if request not in failed and all(map(invalid.isdisjoint, request.block_tables)):
                continue
            for block in plan.registered.get(request, ()):
                self.pool.unregister(block)
                invalid.add(block)
            if request not in failed:
                void.append(request)
        for request in void:
            self._stop_running(request)
            self._wait_again(request, num_computed_tokens=0)
        return void

    def _yield_to_interactive(self, plan: Plan) -> None:
        """Preempt batch requests beyond their lane's share, the latest first, for interactive ones that could run."""
        interactive, batch = self.lanes[INTERACTIVE], self.lanes[BATCH]
        spare = batch.num_running - batch.own_seqs
        seats = self.config.max_num_seqs - len(self.running)
        head = interactive.head
        if head is None or spare <= 0 or (seats > 0 and self._fits(head)):
            return
        first = max(len(self.running) - spare, bisect_left(self.running, 1, key=lambda request: request.priority[0]))
        for victim in reversed(self._victims(self.running[first:], interactive.in_order(), seats)):
            self._preempt(victim, plan)

    def _victims(self, running: Sequence[Request], waiting: Iterable[Request], seats: int) -> Sequence[Request]:
        """The last of `running`, in whose place the first of `waiting` can run.

        Together they hold, and are predicted to hold in the end, at least as many blocks as the requests that replace
        them, so that the most that will be held at once does not grow.
        """
        now = self.pool.num_available - self._reserved_blocks - self.watermark_blocks
        later = 0.0  # what is predicted to be held less, in the end
        tokens = self.config.max_num_batched_tokens - len(self.running)
        in_the_end = self.admission.predicted_blocks(running).tolist()
        num_victims = num_enough = 0
        holds = Counter[int]()  # of the victims, by block: one that they alone share is free without them
        for request in waiting:
            if tokens < 1:
                break
            hits = [block for blocks in self.blocks.find(request) for block in blocks if block != NULL_BLOCK]
            num_hits = self.blocks.num_held_by_others(hits, holds)
            holds.subtract(hits)  # it will hold them
            now, seats = now - self.pool.groups.blocks(request.num_tokens) + num_hits, seats - 1
            later += num_hits - float(self.admission.predicted_blocks([request])[0])
            while now < 0 or later < 0 or seats < 0:
                if num_victims == len(self.running) and now + self.watermark_blocks >= 0:
                    now, later = max(0, now), 0.0  # alone, a request may use the whole pool
                    break
                if num_victims == len(running):
                    return running[len(running) - num_enough :]
                num_victims += 1
                victim = running[-num_victims]
                blocks = [block for table in victim.block_tables for block in table]
                holds.update(blocks)
                kept = self.blocks.num_held_by_others(blocks, holds)
                now, seats = now + self.blocks.held(victim) - kept, seats + 1
                later += in_the_end[-num_victims] - kept
            num_enough = num_victims
            tokens -= min(request.num_tokens - request.num_computed_tokens, self.config.prefill_chunk_tokens)
        return running[len(running) - num_enough :]

    def _schedule_running(self, plan: Plan) -> int:
        """Give every running request its share; returns the rest of the budget."""
        budget = self.config.max_num_batched_tokens
        num_first = bisect_left(self.running, 1, key=lambda request: request.priority[0])
        behind = self.running[num_first:]
        demand = sum(request.num_tokens - request.num_computed_tokens for request in behind)
        own = max(len(behind), min(demand, self.lanes[BATCH].own_tokens, budget - num_first))
        position = for_admissions = 0
        while position < len(self.running):
            if position == num_first and self.lanes[INTERACTIVE].num_waiting:
                budget, for_admissions = min(budget, own), budget - min(budget, own)
            decodes = self._decode(position, num_first if position < num_first else len(self.running), plan)
            if decodes:
                budget -= decodes
                position += decodes
                continue
            # The requests behind get a token each, and the batch lane its share: a long prompt stalls no other request.
            kept = num_first - position - 1 + own if position < num_first else len(self.running) - position - 1
            request = self.running[position]
            self._skip_computed(request)
            num_tokens = self._share_of(request, budget - kept)
            if not self._make_room(request, num_tokens, plan):
                break
            self._schedule(request, num_tokens, plan)
            budget -= num_tokens
            position += 1
        return budget + for_admissions

    def _decode(self, position: int, end: int, plan: Plan) -> int:
        """Schedule one token for each request that needs only one, from `position` on; returns how many there were.

        Ends before the first of `running[position:end]` that needs more, or for which another must be preempted.
        Does what `_share_of`, `_make_room` and `_schedule` would do, at a fraction of their cost.
        """
        scheduled, block_size = plan.scheduled, self._block_size
        num_before = len(scheduled)
        for request in self.running[position:end]:
            start = request.num_computed_tokens
            if len(request.token_ids) - start != 1:
                break
            if start == len(request.block_table) * block_size:
                self.blocks.slide(request)
                if not self.blocks.extend(request, start + 1):
                    break
            request.num_computed_tokens = start + 1
            scheduled.append(Scheduled(request, start, 1, True))  # by name it would cost twice as much
        num_decodes = len(scheduled) - num_before
        plan.num_decodes += num_decodes
        return num_decodes

    def _make_room(self, request: Request, num_tokens: int, plan: Plan) -> bool:
        """Give `request` blocks for its share, preempting from the end of `running`; False if it is preempted."""
        self.blocks.slide(request)
        while not self.blocks.extend(request, request.num_computed_tokens + num_tokens):
            victim = self.running[-1]
            self._preempt(victim, plan)
            self.admission.observe_preemption()
            if victim is request:
                return False
        return True

    def _admit_next(self, plan: Plan, budget: int, now: float) -> int:
        """Admit the next request; returns the tokens that it takes of the step, 0 where none can be admitted.

        One that does not fit yet blocks those behind it; otherwise the queue's tail would starve its head.
        """
        batch_head, head = self._head(self.lanes[BATCH]), self._head(self.lanes[INTERACTIVE])
        if batch_head in plan.preempted:  # it has just been preempted for another request
            batch_head = None
        if batch_head is not None and head is not None:
            has_aged = now - batch_head.arrival_s >= self.config.ageing_s
            if self._batch_is_due(has_aged):
                if self._fits(batch_head):
                    if has_aged:  # from now on it is not the first to be preempted
                        batch_head.priority = (0, *batch_head.priority[1:])
                    self._admitted_since_batch = 0
                    return self._admit(batch_head, plan, budget, now)
                if has_aged:
                    return 0
        head = head or batch_head
        if head is None or not self._fits(head):
            return 0
        self._admitted_since_batch += head.lane != BATCH
        return self._admit(head, plan, budget, now)

    def _batch_is_due(self, has_aged: bool) -> bool:
        """Whether a batch request goes before an interactive one: while its lane has less than its share of sequences.

        Where the share is less than one sequence, aged batch requests get that share of the admissions instead.
        """
        lane = self.lanes[BATCH]
        if lane.own_seqs > 0 or lane.config.share == 0:
            return lane.num_running < lane.own_seqs
        return has_aged and lane.num_running == 0 and self._admitted_since_batch >= 1 / lane.config.share - 1

    def _head(self, lane: Lane) -> Request | None:
        """The next request of a lane. Once long prompts have used their part of the step, short ones overtake them."""
        if self._long_left > 0:
            return lane.head
        return next((request for request in lane.in_order() if not self._is_long(request)), None)

    def _fits(self, request: Request) -> bool:
        available = self.pool.num_available - self._reserved_blocks
        refused_at = self._refused.get(request)
        if refused_at is not None and available <= refused_at and not self.blocks.finds_more(request):
            return False
        missing, num_unheld = self.blocks.consider(request)
        if not self.running:  # alone, a request may use the whole pool
            return missing <= self.pool.num_available
        if missing + self.watermark_blocks > available or self._peak(request, num_unheld) > self.pool.num_usable:
            self._refused[request] = available
            return False
        return True

    def _peak(self, request: Request, num_unheld: int) -> float:
        """The most blocks that will be held at once if the request is admitted."""
        own = sum(map(self.blocks.own, self.running))
        shared = max(0, self.pool.num_held - own + num_unheld)
        return shared + self.admission.peak_blocks([*self.running, request])

    def _admit(self, request: Request, plan: Plan, budget: int, now: float) -> int:
        """It fits, as `_fits` has just found."""
        self._lane(request).remove(request)
        request.num_committed_blocks = request.num_shared_blocks
        num_hit_tokens = request.num_shared_blocks * self._block_size
        request.num_computed_tokens = max(request.num_computed_tokens, num_hit_tokens)
        num_tokens = self._share_of(request, budget)
        plan.swap_in += self.blocks.admit(request, request.num_computed_tokens + num_tokens)
        self._reserved_blocks += self.blocks.to_come(request)
        if request.first_scheduled_s is None:
            request.first_scheduled_s = now
            request.num_cached_tokens = num_hit_tokens
            self._lane(request).serve_prompt(request, request.num_prompt_tokens - num_hit_tokens)
            if request.block_hashes is not None:
                self.prefix_queries += request.num_prompt_tokens
                self.prefix_hits += num_hit_tokens
        request.status = Status.RUNNING
        insort(self.running, request, key=_PRIORITY)
        self._lane(request).num_running += 1
        self._schedule(request, num_tokens, plan)
        return num_tokens

    def _skip_computed(self, request: Request) -> None:
        """Share the next blocks of a prompt where another request has computed them since this one was admitted."""
        before = request.num_computed_tokens
        first = before // self._block_size
        found = self.blocks.find(request, first)
        if not found[0]:
            return
        self.blocks.skip(request, first, found)
        self.prefix_hits += request.num_computed_tokens - before
        request.num_committed_blocks = len(request.block_table)

    def _share_of(self, request: Request, budget: int) -> int:
        num_tokens = min(
            request.num_tokens - request.num_computed_tokens, self.config.prefill_chunk_tokens, max(1, budget)
        )
        return min(num_tokens, max(1, self._long_left)) if self._is_long(request) else num_tokens

    def _is_long(self, request: Request) -> bool:
        return request.num_tokens - request.num_computed_tokens > self.config.prefill_chunk_tokens

    def _schedule(self, request: Request, num_tokens: int, plan: Plan) -> None:
        if self._is_long(request):
            self._long_left -= num_tokens
        start = request.num_computed_tokens
        request.num_computed_tokens = start + num_tokens
        samples = request.num_computed_tokens == request.num_tokens
        if not samples:
            self._cut_short.append(len(plan.scheduled))
        plan.scheduled.append(Scheduled(request, start, num_tokens, samples))
        if num_tokens > 1:
            self._register_ahead(request, plan)

    def _register_ahead(self, request: Request, plan: Plan) -> None:
        """Make what the step computes of a prompt findable; its last token may not be known yet."""
        blocks = self._register(request, min(request.num_computed_tokens, request.num_tokens - 1))
        if blocks:
            plan.registered.setdefault(request, []).extend(blocks)

    def _give_rest(self, plan: Plan, budget: int) -> None:
        """Unused tokens of the budget go to the prompts that were cut short, as far as there are blocks.

        A prompt that is alone takes all of them, since its chunks let no other request wait.
        """
        if budget <= 0:
            return
        is_alone = len(plan.scheduled) == 1 and not any(lane.num_waiting for lane in self.lanes.values())
        chunk_tokens = self.config.max_num_batched_tokens if is_alone else self.config.prefill_chunk_tokens
        for index in self._cut_short:
            share = plan.scheduled[index]
            request, start = share.request, share.request.num_computed_tokens
            room = chunk_tokens - share.num_tokens
            extra = min(budget, room, request.num_tokens - start)
            if extra <= 0:
                continue
            extra = min(extra, self.blocks.extend_at_most(request, start + extra) - start)
            request.num_computed_tokens = start + extra
            samples = request.num_computed_tokens == request.num_tokens
            plan.scheduled[index] = msgspec.structs.replace(share, num_tokens=share.num_tokens + extra, samples=samples)
            budget -= extra
            self._register_ahead(request, plan)

    def _preempt(self, request: Request, plan: Plan) -> None:
        self._stop_running(request)
        copies = self.blocks.swap_out(request)
        plan.swap_out += copies
        self.num_preemptions["swap" if copies else "recompute"] += 1
        self._wait_again(request, request.num_computed_tokens if copies else 0)
        plan.preempted.append(request)

    def _wait_again(self, request: Request, num_computed_tokens: int) -> None:
        self.blocks.release(request)
        request.num_computed_tokens = num_computed_tokens
        request.status = Status.WAITING
        request.priority = (LANES.index(request.lane), *request.priority[1:])
        self._lane(request).enqueue(request)

    def _stop_running(self, request: Request) -> None:
        position = bisect_left(self.running, request.priority, key=_PRIORITY)
        if position == len(self.running) or self.running[position] is not request:
            raise ValueError(f"request {request.request_id} is not in the queue that its status names")
        del self.running[position]
        self._lane(request).num_running -= 1
        self._refused.clear()

    def _lane(self, request: Request) -> Lane:
        return self.lanes[request.lane]


def make_scheduler(
    config: EngineConfig, max_num_seqs: int, pool: BlockPool, swap: SwapSpace | None, prefill_tokens: int | None
) -> Scheduler:
    """Raises ConfigError where the scheduler that `config` names is not installed.

    Others than the continuous one are found through the entry points `llmservice.schedulers`.
    """
    if config.scheduler == "continuous":
        return ContinuousScheduler(pool, continuous_config(config, max_num_seqs, prefill_tokens), swap)
    found = entry_points(group="llmservice.schedulers", name=config.scheduler)
    if not found:
        raise ConfigError(f"the scheduler {config.scheduler} is not installed: use --scheduler continuous")
    scheduler: Scheduler = next(iter(found)).load()(config, max_num_seqs, pool)
    return scheduler


def continuous_config(config: EngineConfig, max_num_seqs: int, prefill_tokens: int | None) -> SchedulerConfig:
    """A step has room for a token of every sequence and for `max_prefill_tokens` more, else for the device's
    `prefill_tokens`. A chunk takes half of these at most, so that a long prompt never delays all the others.
    """
    most = config.max_prefill_tokens or prefill_tokens or config.step_tokens
    return SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=min(config.step_tokens, max_num_seqs + most),
        prefill_chunk_tokens=min(config.chunk_tokens, max(1, most // 2)),
        long_prefill_tokens=config.long_prefill_tokens,
        prefix_caching=config.prefix_caching,
        expected_tokens=config.expected_tokens,
        interactive=LaneConfig(order=config.interactive_order),
        batch=LaneConfig(share=config.batch_share, order=config.batch_order),
    )
