"""The scheduler alone: no model, tokens are made up, every step's plan is read."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llmservice_server.block_pool import BlockPool
from llmservice_server.messages import Generate, SamplingParams
from llmservice_server.request import Request, Status
from llmservice_server.scheduler import ContinuousScheduler, Plan

BLOCK_SIZE = 4


@dataclass
class Bench:
    """A scheduler, and requests whose sampled tokens are all 7."""

    num_blocks: int = 40
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 16
    prefill_chunk_tokens: int = 8
    arrivals: int = 0
    pool: BlockPool = field(init=False)
    scheduler: ContinuousScheduler = field(init=False)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.num_blocks)
        self.scheduler = ContinuousScheduler(
            self.pool,
            block_size=BLOCK_SIZE,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            prefill_chunk_tokens=self.prefill_chunk_tokens,
        )

    def add(self, prompt: int, max_tokens: int = 8, lane: str = "interactive") -> Request:
        self.arrivals += 1
        message = Generate(
            request_id=f"r{self.arrivals}",
            prompt_token_ids=[1] * prompt,
            sampling=SamplingParams(max_tokens=max_tokens),
            arrival_s=0.0,
            lane=lane,
        )
        request = Request.of(message, self.arrivals, seed=0, eos_token_ids=frozenset())
        self.scheduler.add(request)
        return request

    def step(self) -> Plan:
        plan = self.scheduler.schedule()
        for share in plan.scheduled:
            if share.samples and share.request.append(7) is not None:
                self.scheduler.finish(share.request)
        return plan


def shares(plan: Plan) -> dict[str, tuple[int, int]]:
    return {share.request.request_id: (share.start, share.num_tokens) for share in plan.scheduled}


def test_a_long_prompt_is_computed_in_chunks_and_samples_with_the_last() -> None:
    bench = Bench()
    bench.add(prompt=19)
    plans = [bench.step() for _ in range(4)]
    assert [shares(plan)["r1"] for plan in plans] == [(0, 8), (8, 8), (16, 3), (19, 1)]
    assert [plan.scheduled[0].samples for plan in plans] == [False, False, True, True]


def test_a_long_prompt_leaves_every_running_request_its_token() -> None:
    bench = Bench(max_num_batched_tokens=6, prefill_chunk_tokens=6)
    bench.add(prompt=30, max_tokens=2)
    assert shares(bench.step()) == {"r1": (0, 6)}  # the budget is used up: nobody is admitted
    bench.scheduler.prefill_chunk_tokens = 4
    bench.add(prompt=2)
    assert shares(bench.step()) == {"r1": (6, 4), "r2": (0, 2)}
    bench.scheduler.prefill_chunk_tokens = 6
    assert shares(bench.step()) == {"r1": (10, 5), "r2": (2, 1)}  # 5, not 6: one is kept for the decode behind it


def test_requests_are_admitted_in_order_of_arrival_and_none_overtakes() -> None:
    bench = Bench(num_blocks=6, max_num_batched_tokens=64, prefill_chunk_tokens=64)
    bench.add(prompt=12)
    bench.add(prompt=12)  # three blocks, two are left
    bench.add(prompt=1)
    assert list(shares(bench.step())) == ["r1"]
    assert [request.request_id for request in bench.scheduler.waiting] == ["r2", "r3"]


def test_the_interactive_lane_is_admitted_before_the_batch_lane() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add(prompt=3, max_tokens=1, lane="batch")
    bench.add(prompt=3, max_tokens=1)
    assert bench.scheduler.num_waiting == {"interactive": 1, "batch": 1}
    assert [list(shares(bench.step())) for _ in range(2)] == [["r2"], ["r1"]]
    assert bench.scheduler.num_waiting.total() == 0


def test_the_batch_lane_is_preempted_before_an_older_interactive_request() -> None:
    bench = Bench(num_blocks=5)
    batch = bench.add(prompt=7, lane="batch")
    bench.step()
    interactive = bench.add(prompt=7)
    plans = [bench.step() for _ in range(3)]
    assert [request for plan in plans for request in plan.preempted] == [batch]
    assert interactive.status is Status.RUNNING


def test_the_latest_arrival_is_preempted_and_keeps_its_place_in_the_queue() -> None:
    bench = Bench(num_blocks=5, max_num_seqs=2)
    bench.add(prompt=7)
    bench.add(prompt=7)
    bench.add(prompt=1)
    bench.step()
    plan = bench.step()
    while not plan.preempted:
        plan = bench.step()
    assert [request.request_id for request in plan.preempted] == ["r2"]
    assert [request.request_id for request in bench.scheduler.waiting] == ["r2", "r3"]
    assert plan.preempted[0].num_computed_tokens == 0
    assert len(plan.preempted[0].block_table) == 0
    assert bench.scheduler.num_preemptions == 1


def test_a_preempted_request_is_computed_again_with_what_it_had_generated() -> None:
    bench = Bench(num_blocks=5)
    bench.add(prompt=7)
    victim = bench.add(prompt=7)
    while victim.status is not Status.WAITING or not bench.scheduler.num_preemptions:
        bench.step()
    generated = victim.num_output_tokens
    assert generated > 0
    while victim.status is not Status.FINISHED:
        bench.step()
    assert victim.token_ids == [1] * 7 + [7] * 8


def test_nothing_is_admitted_in_the_step_that_preempts() -> None:
    bench = Bench(num_blocks=6, max_num_seqs=3)
    for prompt in (7, 7, 3):
        bench.add(prompt)
    while not (plan := bench.step()).preempted:
        bench.add(prompt=1)
    assert not [share for share in plan.scheduled if share.start == 0]


def test_admission_leaves_a_reserve_to_those_who_run_but_not_to_nobody() -> None:
    bench = Bench(num_blocks=201, max_num_batched_tokens=2048, prefill_chunk_tokens=2048)
    bench.add(prompt=100 * BLOCK_SIZE)
    bench.add(prompt=99 * BLOCK_SIZE)  # would leave 1 block; the reserve is 2
    assert list(shares(bench.step())) == ["r1"]
    alone = Bench(num_blocks=201, max_num_batched_tokens=2048, prefill_chunk_tokens=2048)
    alone.add(prompt=200 * BLOCK_SIZE - 1, max_tokens=1)
    assert list(shares(alone.step())) == ["r1"]


def test_a_finished_request_frees_its_blocks_at_once() -> None:
    bench = Bench()
    request = bench.add(prompt=9)
    bench.step()
    assert bench.pool.num_held == 3
    bench.scheduler.finish(request)
    assert bench.pool.num_held == 0
    assert not bench.scheduler.running


def test_a_budget_below_one_token_per_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="3 tokens a step cannot give 4 sequences one each"):
        Bench(max_num_batched_tokens=3)


class SchedulerUnderLoad(RuleBasedStateMachine):
    """Requests of any length come, are cancelled at any moment, and compete for few blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(num_blocks=14, max_num_seqs=5, max_num_batched_tokens=11, prefill_chunk_tokens=5)
        self.requests: list[Request] = []

    @rule(prompt=st.integers(1, 30), max_tokens=st.integers(1, 22), lane=st.sampled_from(["interactive", "batch"]))
    def arrive(self, prompt: int, max_tokens: int, lane: str) -> None:
        self.requests.append(self.bench.add(prompt, max_tokens, lane))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.bench.scheduler.finish(data.draw(st.sampled_from(self.alive)))

    @rule()
    def step(self) -> None:
        running_before = list(self.bench.scheduler.running)
        alive_before = self.alive
        plan = self.bench.step()
        assert plan.num_tokens <= self.bench.max_num_batched_tokens
        assert len(plan.scheduled) <= self.bench.max_num_seqs
        assert bool(plan.scheduled) == bool(alive_before)  # work is never left lying
        scheduled = [share.request for share in plan.scheduled]
        assert len(set(map(id, scheduled))) == len(scheduled)
        assert all(request in scheduled or request in plan.preempted for request in running_before)
        for share in plan.scheduled:
            assert 1 <= share.num_tokens <= self.bench.prefill_chunk_tokens

    @property
    def alive(self) -> list[Request]:
        return [request for request in self.requests if request.status is not Status.FINISHED]

    @invariant()
    def every_request_is_in_exactly_one_queue(self) -> None:
        scheduler = self.bench.scheduler
        for request in self.requests:
            assert (request in scheduler.running) == (request.status is Status.RUNNING)
            assert (request in scheduler.waiting) == (request.status is Status.WAITING)
        assert len(scheduler.running) + len(scheduler.waiting) == len(self.alive)
        assert len(scheduler.running) <= self.bench.max_num_seqs
        assert scheduler.num_waiting.total() == len(scheduler.waiting)

    @invariant()
    def blocks_are_held_by_running_requests_only_and_by_one_each(self) -> None:
        pool = self.bench.pool
        held = [block for request in self.requests for block in request.block_table.blocks]
        assert sorted(held + pool.free_blocks()) == list(range(1, pool.num_blocks))
        for request in self.requests:
            assert bool(request.block_table.blocks) == (request.status is Status.RUNNING)
            assert (
                request.num_computed_tokens <= len(request.block_table) * BLOCK_SIZE or not request.block_table.blocks
            )

    @invariant()
    def a_table_that_calls_itself_contiguous_is(self) -> None:
        for request in self.requests:
            blocks = request.block_table.blocks
            run = list(range(blocks[0], blocks[0] + len(blocks))) if blocks else []
            assert request.block_table.contiguous == (blocks == run)

    def teardown(self) -> None:
        """Everything that is left is served in full, and idle means that every block is free."""
        unserved = list(self.alive)
        for _ in range(10_000):
            if not self.alive:
                break
            self.bench.step()
        assert not self.alive
        for request in unserved:
            assert request.num_output_tokens == request.sampling.max_tokens
        assert self.bench.pool.num_free == self.bench.pool.num_usable


SchedulerUnderLoad.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
test_scheduler_under_load = SchedulerUnderLoad.TestCase
