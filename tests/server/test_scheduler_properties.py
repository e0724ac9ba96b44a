"""Invariants of the continuous scheduler that hold at every step, whatever comes, is cancelled or times out."""

import itertools
import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llmservice_planner.model.block_groups import BlockGroups
from llmservice_server.engine.block_pool import NULL_BLOCK, BlockPool, PreemptionCost, SwapSpace
from llmservice_server.engine.interfaces import Plan, Scheduled
from llmservice_server.engine.lane import LaneConfig
from llmservice_server.engine.request import Request, Status
from llmservice_server.engine.scheduler import ContinuousScheduler, SchedulerConfig
from llmservice_server.types.messages import GenerateRequest, SamplingParams

BLOCK_SIZE = 4
STEP_TOKENS = 17
MAX_TOKENS = 13 * BLOCK_SIZE  # prompt and answer: just what the pool holds
SWAP_BLOCKS = 9


class SchedulerUnderLoad(RuleBasedStateMachine):
    """Requests of any length, many of which begin alike, compete for few blocks; what is sampled is random."""

    @initialize(
        caching=st.booleans(),
        swapping=st.booleans(),
        order=st.sampled_from(["fcfs", "sjf"]),
        share=st.sampled_from([0.1, 0.4]),
        expected_tokens=st.sampled_from([1, 1536]),
        windows=st.sampled_from([(None,), (None,), (6,), (None, 6), (None, 9, 9)]),
    )
    def start(
        self,
        caching: bool,
        swapping: bool,
        order: Any,
        share: float,
        expected_tokens: int,
        windows: tuple[int | None, ...],
    ) -> None:
        groups = BlockGroups(BLOCK_SIZE, 1, windows, STEP_TOKENS)
        self.pool = BlockPool(1 + groups.blocks(MAX_TOKENS), groups)
        self.swap = SwapSpace(SWAP_BLOCKS, PreemptionCost(0.0, 1.0)) if swapping else None
        self.config = SchedulerConfig(
            max_num_seqs=5,
            max_num_batched_tokens=STEP_TOKENS,
            prefill_chunk_tokens=5,
            prefix_caching=caching,
            expected_tokens=expected_tokens,  # the smaller, the more are admitted
            interactive=LaneConfig(order=order),
            batch=LaneConfig(share=share, order=order),
        )
        self.scheduler = ContinuousScheduler(self.pool, self.config, self.swap)
        self.requests: list[Request] = []
        self.contents: dict[int, Any] = {}  # by block: its group, and the tokens from the sequence's start to its end
        self.seen: dict[int, tuple[Any, list[int]]] = {}  # block tables by id: the object, and what was in it
        self.now = 0.0
        self.dice = random.Random(0)  # noqa: S311 - traffic, not secrets

    @rule(
        prompt=st.integers(1, 30),
        beginning=st.integers(0, 2),
        max_tokens=st.integers(1, 22),
        lane=st.sampled_from(["interactive", "batch"]),
        salt=st.sampled_from([None, "tenant"]),
        patience_s=st.sampled_from([5.0, 1000.0]),
        client=st.sampled_from([None, "a", "b"]),
        predicted=st.sampled_from([None, 0.5, 20.0]),
    )
    def arrive(
        self,
        prompt: int,
        beginning: int,
        max_tokens: int,
        lane: str,
        salt: str | None,
        patience_s: float,
        client: str | None,
        predicted: float | None,
    ) -> None:
        order = len(self.requests)
        message = GenerateRequest(
            request_id=f"r{order}",
            prompt_token_ids=[beginning] * prompt,
            sampling=SamplingParams(max_tokens=max_tokens),
            arrival_s=self.now,
            deadline_s=self.now + patience_s,
            lane=lane,
            cache_salt=salt,
            client=client,
            predicted_tokens=predicted,
        )
        request = Request.of(message, order, seed=0, eos_token_ids=frozenset())
        self.requests.append(request)
        self.scheduler.add(request)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.scheduler.finish(data.draw(st.sampled_from(self.alive)))

    @rule(seconds=st.floats(0.1, 40.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for request in self.alive:
            if request.deadline_s is not None and request.deadline_s <= self.now:
                self.scheduler.finish(request)

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        self.take_step(data)

    @rule()
    def several_steps(self) -> None:
        for _ in range(10):
            self.take_step()

    def take_step(self, data: st.DataObject | None = None) -> None:
        """With `data`, some of the scheduled requests may fail."""
        had_work = bool(self.alive)
        never_ran = [request for request in self.alive if request.first_scheduled_s is None]
        plan = self.scheduler.schedule(self.now)
        assert bool(plan.scheduled) == had_work  # work is never left lying
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        assert len(plan.scheduled) <= self.config.max_num_seqs
        assert plan.num_decodes <= sum(share.num_tokens == 1 for share in plan.scheduled)
        scheduled = [share.request for share in plan.scheduled]
        assert len(set(map(id, scheduled))) == len(scheduled)
        assert scheduled == list(dict.fromkeys(scheduled))
        assert set(map(id, scheduled)) == set(map(id, self.scheduler.running))  # no running request is left out
        is_alone = len(scheduled) == 1 and not self.scheduler.waiting
        chunk = self.config.max_num_batched_tokens if is_alone else self.config.prefill_chunk_tokens
        assert all(1 <= share.num_tokens <= chunk for share in plan.scheduled)
        self.no_request_is_overtaken(never_ran)
        self.tables_only_grow(scheduled)
        failed = data.draw(st.sets(st.sampled_from(scheduled), max_size=2)) if data and scheduled else set()
        misled = self.compute(plan, failed)
        assert set(self.scheduler.commit(plan, failed)) == misled  # and no other request is computed again
        for share in plan.scheduled:
            if share.request in failed:
                self.scheduler.finish(share.request)
            elif share.request in misled or not share.samples:
                continue
            elif share.request.append(self.dice.randrange(3)) is not None:
                self.scheduler.finish(share.request)

    def tables_only_grow(self, scheduled: list[Request]) -> None:
        """Or they are other objects, because devices send only what is new."""
        for request in scheduled:
            for table in request.block_tables:
                _, before = self.seen.get(id(table), (None, []))
                new = table[: len(before)].tolist()
                assert [block or old for block, old in zip(new, before, strict=True)] == before
                self.seen[id(table)] = table, table.tolist()  # kept, so that no other table gets its id

    def no_request_is_overtaken(self, never_ran: list[Request]) -> None:
        """First come, first served for a client in a lane; only a long prompt may be passed, only by short ones."""
        chunk = self.config.prefill_chunk_tokens
        for lane in self.scheduler.lanes:
            if self.scheduler.lanes[lane].config.order != "fcfs":
                continue
            mine = [request for request in never_ran if request.lane == lane]
            for client, is_long in itertools.product((None, "a", "b"), (True, False)):
                own = [request for request in mine if request.client == client]
                queue = [request for request in own if (request.num_prompt_tokens > chunk) is is_long]
                admitted = [request.first_scheduled_s is not None for request in queue]
                assert admitted == sorted(admitted, reverse=True)

    def compute(self, plan: Plan, failed: set[Request]) -> set[Request]:
        """Keeps a model of what every block holds, and checks that no request reads what is not there.

        Returns the requests that read a block which a failed one should have filled, or another one of them.
        """
        assert not {copy.target for copy in plan.swap_out} & {copy.source for copy in plan.swap_in}
        swapped = {copy.target: self.contents[copy.source] for copy in plan.swap_out}
        self.swapped = {**getattr(self, "swapped", {}), **swapped}
        for copy in plan.swap_in:
            self.contents[copy.target] = self.swapped[copy.source]
        misled: set[Request] = set()
        unfilled: set[int] = set()
        for share in plan.scheduled:
            request = share.request
            read = [block for table in request.block_tables for block in table[: share.start // BLOCK_SIZE]]
            if not unfilled.isdisjoint(read) and request not in failed:
                misled.add(request)
            for group, table in enumerate(request.block_tables):
                unfilled |= self.compute_group(share, group, table.tolist(), plan, request in misled | failed)
        return misled

    def compute_group(self, share: Scheduled, group: int, blocks: list[int], plan: Plan, in_vain: bool) -> set[int]:
        """One request's share in the layers of one group; returns the blocks that it should have filled, if in vain."""
        request, tokens = share.request, share.request.token_ids
        first_seen = self.pool.groups.first_seen(group, share.start)
        if share.start % BLOCK_SIZE == 0 or share.num_tokens > 1:
            assert not any(blocks[:first_seen])  # given back, before another block is taken
        for index in range(first_seen, share.start // BLOCK_SIZE):  # full ones of before
            expected = tuple(tokens[: (index + 1) * BLOCK_SIZE])
            assert self.contents[blocks[index]] == (group, expected) or in_vain
        if share.start % BLOCK_SIZE:
            assert self.contents[blocks[share.start // BLOCK_SIZE]] == (group, tuple(tokens[: share.start]))
        end = share.start + share.num_tokens
        for index in range(share.start // BLOCK_SIZE, -(-end // BLOCK_SIZE)):
            shared = blocks[index] in plan.registered.get(request, ())  # with later shares of this step
            assert shared or self.pool.num_holders[blocks[index]] == 1  # another shared block is not written
            filled = tuple(tokens[: min(end, (index + 1) * BLOCK_SIZE)])
            self.contents[blocks[index]] = () if in_vain else (group, filled)
        return set(blocks[share.start // BLOCK_SIZE : -(-end // BLOCK_SIZE)]) if in_vain else set()

    @property
    def alive(self) -> list[Request]:
        return [request for request in self.requests if request.status is not Status.FINISHED]

    @invariant()
    def every_request_is_in_exactly_one_queue(self) -> None:
        scheduler = self.scheduler
        for request in self.requests:
            assert (request in scheduler.running) == (request.status is Status.RUNNING)
            assert (request in scheduler.waiting) == (request.status is Status.WAITING)
        assert len(scheduler.running) + len(scheduler.waiting) == len(self.alive)
        assert len(scheduler.running) <= self.config.max_num_seqs
        for name, lane in scheduler.lanes.items():
            assert lane.num_running == sum(request.lane == name for request in scheduler.running)

    @invariant()
    def free_held_and_cached_make_the_total(self) -> None:
        pool = self.pool
        tables = [table for request in self.requests for table in request.block_tables]
        held = {block for table in tables for block in table} - {NULL_BLOCK}
        assert sorted([*held, *pool.free_blocks(), *pool.cached_blocks()]) == list(range(1, pool.num_blocks))
        assert (pool.num_held, pool.num_free, pool.num_cached) == (
            len(held),
            len(pool.free_blocks()),
            len(pool.cached_blocks()),
        )
        for request in self.requests:
            assert all(bool(table) == (request.status is Status.RUNNING) for table in request.block_tables)
            assert len({len(table) for table in request.block_tables}) == 1
        for block in held:
            assert pool.num_holders[block] == sum(block in table for table in tables)

    @invariant()
    def swap_blocks_are_held_by_waiting_requests(self) -> None:
        if self.swap is not None:
            swapped = [block for request in self.alive for each in request.swapped for block in each.values()]
            assert len(set(swapped)) == len(swapped)
            assert len(swapped) + self.swap.num_free == SWAP_BLOCKS
            assert all(request.status is Status.WAITING for request in self.alive if any(request.swapped))

    def teardown(self) -> None:
        """Everything that is left is served in full, and idle means that no block is held."""
        if not hasattr(self, "scheduler"):
            return
        unserved = list(self.alive)
        for _ in range(10_000):
            if not self.alive:
                break
            self.take_step()
        assert not self.alive
        for request in unserved:
            assert request.num_output_tokens == request.sampling.max_tokens  # those that failed are not among them
        assert self.pool.num_held == 0


SchedulerUnderLoad.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
test_scheduler_under_load = SchedulerUnderLoad.TestCase


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), max_num_seqs=st.sampled_from([1, 3, 12]), num_blocks=st.sampled_from([14, 40]))
def test_no_batch_request_starves_beyond_the_ageing_bound_under_constant_interactive_load(
    seed: int, max_num_seqs: int, num_blocks: int
) -> None:
    """Once aged and at the head of its lane it runs, and ends, within a bounded number of interactive requests."""
    dice = random.Random(seed)  # noqa: S311 - traffic, not secrets
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=24,
        prefill_chunk_tokens=8,
        ageing_s=30.0,
    )
    scheduler = ContinuousScheduler(BlockPool(num_blocks, BlockGroups(BLOCK_SIZE, num_layers=1)), config)
    order = 0

    def add(lane: str, now: float) -> Request:
        nonlocal order
        order += 1
        message = GenerateRequest(
            request_id=str(order),
            prompt_token_ids=[order] * dice.randint(1, 24),
            sampling=SamplingParams(max_tokens=dice.randint(1, 24)),
            arrival_s=now,
            lane=lane,
        )
        request = Request.of(message, order, seed=0, eos_token_ids=frozenset())
        scheduler.add(request)
        return request

    batch = [add("batch", 0.0) for _ in range(3)]
    num_finished_after_ageing = 0
    for step in range(20_000):
        now = step * 0.1
        while scheduler.num_waiting["interactive"] < 3:
            add("interactive", now)
        plan = scheduler.schedule(now)
        scheduler.commit(plan)
        for share in plan.scheduled:
            if share.samples and share.request.append(7) is not None:
                scheduler.finish(share.request)
                num_finished_after_ageing += share.request.lane == "interactive" and now > config.ageing_s
        if all(request.status is Status.FINISHED for request in batch):
            break
    assert all(request.status is Status.FINISHED for request in batch)
    turns = 1 / config.batch.share + max_num_seqs
    assert num_finished_after_ageing <= len(batch) * (turns + 2)
