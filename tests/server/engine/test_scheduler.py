"""The scheduler alone: no model, tokens are made up, every step's plan is read."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from llmservice_bench.batch_scheduler import AdmitsAll, BatchScheduler
from llmservice_planner.model.block_groups import BlockGroups
from llmservice_server.engine.block_pool import BlockPool, PreemptionCost, SwapSpace
from llmservice_server.engine.config import EngineConfig
from llmservice_server.engine.interfaces import Plan
from llmservice_server.engine.lane import LaneConfig
from llmservice_server.engine.request import Request, Status
from llmservice_server.engine.scheduler import ContinuousScheduler, SchedulerConfig, continuous_config, make_scheduler
from llmservice_server.types.messages import GenerateRequest, SamplingParams

BLOCK_SIZE = 4


@dataclass
class Bench:
    """A scheduler, and requests whose sampled tokens are all 7."""

    num_blocks: int = 40
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 16
    prefill_chunk_tokens: int = 8
    swap: SwapSpace | None = None
    predicts: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    groups: BlockGroups = field(default_factory=lambda: BlockGroups(BLOCK_SIZE, num_layers=1))
    now: float = 0.0
    arrivals: int = 0
    pool: BlockPool = field(init=False)
    scheduler: ContinuousScheduler = field(init=False)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.num_blocks, self.groups)
        config = SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            prefill_chunk_tokens=self.prefill_chunk_tokens,
            **{"prefix_caching": False, "expected_tokens": 16} | self.settings,
        )
        self.scheduler = ContinuousScheduler(self.pool, config, self.swap)
        if not self.predicts:
            self.scheduler.admission = AdmitsAll(self.groups, 16)

    def add(
        self, prompt: int | list[int], max_tokens: int = 8, lane: str = "interactive", salt: str | None = None
    ) -> Request:
        self.arrivals += 1
        message = GenerateRequest(
            request_id=f"r{self.arrivals}",
            prompt_token_ids=[1] * prompt if isinstance(prompt, int) else prompt,
            sampling=SamplingParams(max_tokens=max_tokens),
            arrival_s=self.now,
            lane=lane,
            cache_salt=salt,
        )
        request = Request.of(message, self.arrivals, seed=0, eos_token_ids=frozenset())
        self.scheduler.add(request)
        return request

    def step(self) -> Plan:
        plan = self.scheduler.schedule(self.now)
        self.scheduler.commit(plan)
        for share in plan.scheduled:
            if share.samples and share.request.append(7) is not None:
                self.scheduler.finish(share.request)
        return plan


def shares(plan: Plan) -> dict[str, tuple[int, int]]:
    return {share.request.request_id: (share.start, share.num_tokens) for share in plan.scheduled}


def test_a_long_prompt_is_computed_in_chunks_and_samples_with_the_last() -> None:
    bench = Bench()
    bench.add(prompt=19)
    bench.add(prompt=1)
    plans = [bench.step() for _ in range(4)]
    assert [shares(plan)["r1"] for plan in plans] == [(0, 8), (8, 8), (16, 3), (19, 1)]
    assert [plan.scheduled[0].samples for plan in plans] == [False, False, True, True]


def test_a_long_prompt_that_is_alone_takes_the_whole_step() -> None:
    bench = Bench()
    bench.add(prompt=40)
    assert shares(bench.step()) == {"r1": (0, 16)}
    bench.add(prompt=3)  # from now on it would let another request wait
    assert shares(bench.step()) == {"r1": (16, 8), "r2": (0, 3)}


def test_a_long_prompt_leaves_every_running_request_its_token() -> None:
    bench = Bench(max_num_batched_tokens=6, prefill_chunk_tokens=6)
    bench.add(prompt=30, max_tokens=2)
    assert shares(bench.step()) == {"r1": (0, 6)}  # the budget is used up: no request is admitted
    bench.scheduler.config = replace(bench.scheduler.config, prefill_chunk_tokens=4)
    bench.add(prompt=2)
    assert shares(bench.step()) == {"r1": (6, 4), "r2": (0, 2)}
    bench.scheduler.config = replace(bench.scheduler.config, prefill_chunk_tokens=6)
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
    assert sum(bench.scheduler.num_waiting.values()) == 0


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
    assert bench.scheduler.num_preemptions.total() == 1


def test_a_preempted_request_is_computed_again_with_what_it_had_generated() -> None:
    bench = Bench(num_blocks=5)
    bench.add(prompt=7)
    victim = bench.add(prompt=7)
    while victim.status is not Status.WAITING or not bench.scheduler.num_preemptions.total():
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


def test_admission_leaves_a_reserve_where_requests_run_and_none_where_none_runs() -> None:
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


def test_a_prompt_takes_its_blocks_chunk_by_chunk_and_no_request_is_admitted_to_those_it_will_need() -> None:
    bench = Bench(num_blocks=9)  # eight that can be used
    bench.add(prompt=28, max_tokens=1)
    bench.add(prompt=5, max_tokens=1)
    held = []
    for _ in range(4):
        assert list(shares(bench.step())) == ["r1"]
        held.append(bench.pool.num_held)
    assert held == [2, 4, 6, 0]  # the last chunk brought its token, and with it the end
    assert list(shares(bench.step())) == ["r2"]


def test_a_request_waits_that_the_pool_is_not_predicted_to_hold() -> None:
    bench = Bench(num_blocks=11, predicts=True, settings={"expected_tokens": 100})
    bench.add(prompt=4, max_tokens=20)  # six blocks in the end
    bench.add(prompt=4, max_tokens=20)
    assert list(shares(bench.step())) == ["r1"]
    bench = Bench(num_blocks=14, predicts=True, settings={"expected_tokens": 100})
    bench.add(prompt=4, max_tokens=20)
    bench.add(prompt=4, max_tokens=20)
    assert list(shares(bench.step())) == ["r1", "r2"]


def steps_until_it_runs(bench: Bench, request: Request) -> int:
    for number in range(1, 200):
        bench.step()
        if request.status is Status.RUNNING:
            return number
    raise AssertionError("it never ran")


def test_a_request_that_was_refused_runs_once_a_window_has_freed_blocks() -> None:
    bench = Bench(num_blocks=13, groups=BlockGroups(BLOCK_SIZE, 1, (8,), 16), max_num_batched_tokens=32)
    first = bench.add(prompt=48, max_tokens=40)
    second = bench.add(prompt=36, max_tokens=4)
    assert list(shares(bench.step())) == ["r1"]
    assert steps_until_it_runs(bench, second) <= 5
    assert first.num_output_tokens < 4


def test_a_request_that_was_refused_runs_once_another_has_computed_its_prompt() -> None:
    bench = Bench(num_blocks=13, settings={"prefix_caching": True})
    prompt = [*range(20, 52)]
    first = bench.add(prompt, max_tokens=20)
    second = bench.add(prompt, max_tokens=4)
    assert list(shares(bench.step())) == ["r1"]
    assert steps_until_it_runs(bench, second) <= 4
    assert first.num_output_tokens < 4


def test_a_request_that_was_refused_runs_before_another_ends_that_leaves_room_for_it() -> None:
    bench = Bench(num_blocks=31, predicts=True, settings={"expected_tokens": 200})
    first = bench.add(prompt=4, max_tokens=100)  # 26 blocks in the end
    bench.step()
    second = bench.add(prompt=4, max_tokens=60)  # 16, if it does not end long after the first one
    steps_until_it_runs(bench, second)
    assert first.status is Status.RUNNING
    while bench.scheduler.running:
        bench.step()
    assert bench.scheduler.num_preemptions.total() == 0


def test_answers_that_end_early_admit_more_than_their_max_tokens_would() -> None:
    bench = Bench(num_blocks=42, max_num_seqs=16, max_num_batched_tokens=64, predicts=True)
    bench.scheduler.admission.expected_tokens = 160
    for _ in range(40):
        bench.add(prompt=4, max_tokens=156)  # one alone would fill the pool
    num_running = []
    while bench.scheduler.running or bench.scheduler.waiting:
        bench.step()
        for request in [each for each in bench.scheduler.running if each.num_output_tokens >= 8]:
            bench.scheduler.finish(request)  # as if a stop token had been sampled
        num_running.append(len(bench.scheduler.running))
    assert max(num_running[:60]) == 1  # until eight have ended
    assert max(num_running) > 8
    assert bench.scheduler.num_admissible > 8
    assert bench.scheduler.num_preemptions.total() == 0


def test_batch_work_yields_to_interactive_work_that_the_pool_is_not_predicted_to_hold_beside_it() -> None:
    bench = Bench(num_blocks=21, max_num_batched_tokens=64, predicts=True, settings={"expected_tokens": 100})
    batch = [bench.add(prompt=4, max_tokens=28, lane="batch") for _ in range(2)]  # eight blocks each in the end
    bench.step()
    interactive = bench.add(prompt=4, max_tokens=28)
    assert bench.step().preempted == [batch[1]]
    assert interactive.status is Status.RUNNING


def test_a_prompt_that_begins_like_another_computes_only_the_rest() -> None:
    bench = Bench(settings={"prefix_caching": True}, max_num_batched_tokens=64, prefill_chunk_tokens=64)
    first = bench.add([1, 2, 3, 4, 5, 6, 7, 8, 9], max_tokens=1)
    bench.step()
    assert first.num_cached_tokens == 0
    second = bench.add([1, 2, 3, 4, 5, 6, 7, 8, 30, 31], max_tokens=1)
    assert shares(bench.step()) == {"r2": (8, 2)}
    assert second.num_cached_tokens == 8
    assert (bench.scheduler.prefix_queries, bench.scheduler.prefix_hits) == (19, 8)


def test_of_a_prompt_that_is_cached_whole_the_last_token_is_computed_all_the_same() -> None:
    bench = Bench(settings={"prefix_caching": True})
    bench.add([1, 2, 3, 4, 5, 6, 7, 8], max_tokens=1)
    bench.step()
    bench.add([1, 2, 3, 4, 5, 6, 7, 8], max_tokens=1)
    assert shares(bench.step()) == {"r2": (4, 4)}


def test_what_was_generated_is_found_again_by_the_next_turn_of_a_conversation() -> None:
    bench = Bench(settings={"prefix_caching": True})
    turn = bench.add([1, 2, 3], max_tokens=6)
    while turn.status is not Status.FINISHED:
        bench.step()
    bench.add([*turn.token_ids, 40, 41])
    assert shares(bench.step())["r2"] == (8, 3)


def test_a_salt_keeps_one_tenants_prefixes_from_another() -> None:
    bench = Bench(settings={"prefix_caching": True})
    hits = []
    for salt in (None, "a", "b", "a", None):
        request = bench.add([1] * 9, max_tokens=1, salt=salt)
        bench.step()
        hits.append(request.num_cached_tokens)
    assert hits == [0, 0, 0, 8, 8]


def test_a_failed_step_leaves_nothing_in_the_prefix_cache() -> None:
    bench = Bench(settings={"prefix_caching": True})
    request = bench.add([1] * 8)
    plan = bench.scheduler.schedule(0.0)
    bench.scheduler.commit(plan, failed={request})
    bench.scheduler.finish(request)
    assert bench.pool.num_cached == 0


def swapping(num_blocks: int = 100) -> SwapSpace:
    return SwapSpace(num_blocks, PreemptionCost(copy_block_s=0.0, compute_token_s=1.0))


def test_a_victim_is_swapped_out_and_goes_on_where_it_was() -> None:
    bench = Bench(num_blocks=5, max_num_seqs=2, swap=swapping())
    bench.add(prompt=7)
    victim = bench.add(prompt=7)
    while not (plan := bench.step()).preempted:
        pass
    assert plan.preempted == [victim]
    assert (len(plan.swap_out), victim.num_computed_tokens, sum(map(len, victim.swapped))) == (2, 8, 2)
    assert bench.scheduler.num_preemptions == {"recompute": 0, "swap": 1}
    while not (plan := bench.step()).swap_in:
        pass
    assert [copy.source for copy in plan.swap_in] == [0, 1]
    assert shares(plan)["r2"] == (8, 1)
    while victim.status is not Status.FINISHED:
        bench.step()
    assert victim.token_ids == [1] * 7 + [7] * 8


def test_a_victim_that_fits_not_into_the_swap_space_is_computed_again() -> None:
    bench = Bench(num_blocks=5, max_num_seqs=2, swap=swapping(1))
    bench.add(prompt=7)
    bench.add(prompt=7)
    while not bench.step().preempted:
        pass
    assert bench.scheduler.num_preemptions == {"recompute": 1, "swap": 0}


def test_a_swapped_request_that_is_cancelled_gives_its_swap_blocks_back() -> None:
    bench = Bench(num_blocks=5, max_num_seqs=2, swap=(swap := swapping()))
    bench.add(prompt=7)
    victim = bench.add(prompt=7)
    while not bench.step().preempted:
        pass
    assert swap.num_free == 98
    bench.scheduler.finish(victim)
    assert swap.num_free == 100


def test_batch_work_fills_what_is_idle_and_yields_within_one_step_but_for_its_share() -> None:
    bench = Bench(max_num_seqs=4, settings={"batch": LaneConfig(share=0.25)})
    batch = [bench.add(prompt=2, lane="batch") for _ in range(4)]
    assert len(bench.step().scheduled) == 4
    interactive = [bench.add(prompt=2) for _ in range(4)]
    plan = bench.step()
    assert plan.preempted == batch[:0:-1]  # the latest first, and all but the lane's one
    assert [request.status for request in interactive] == [Status.RUNNING] * 3 + [Status.WAITING]
    assert bench.scheduler.running[-1] is batch[0]


def test_batch_work_gives_its_blocks_to_interactive_work() -> None:
    bench = Bench(num_blocks=11, max_num_batched_tokens=64, prefill_chunk_tokens=64)
    batch = bench.add(prompt=36, lane="batch")
    bench.step()
    interactive = bench.add(prompt=20)
    plan = bench.step()
    assert plan.preempted == [batch]
    assert plan.scheduled[0].request is interactive


@pytest.mark.parametrize("predicts", [False, True])
def test_batch_work_gives_the_blocks_that_were_cached_for_it_too(predicts: bool) -> None:
    settings = {"prefix_caching": True}
    bench = Bench(21, max_num_batched_tokens=96, prefill_chunk_tokens=96, settings=settings, predicts=predicts)
    document = [*range(20, 84)]
    bench.add(document, max_tokens=1, lane="batch")
    bench.step()
    bench.add(prompt=1)
    batch = bench.add([*document, 1], lane="batch")
    bench.step()
    assert batch.num_cached_tokens == 64
    interactive = bench.add(prompt=60)
    assert bench.step().preempted == [batch]
    assert interactive.status is Status.RUNNING


def test_batch_work_gives_the_blocks_that_all_of_it_shares() -> None:
    bench = Bench(num_blocks=31, max_num_batched_tokens=96, prefill_chunk_tokens=96, settings={"prefix_caching": True})
    document = [*range(20, 84)]
    batch = [bench.add([*document, number], lane="batch") for number in range(3)]
    bench.step()
    assert [request.num_cached_tokens for request in batch] == [0, 64, 64]
    interactive = bench.add(prompt=60)
    assert bench.step().preempted == batch[::-1]
    assert interactive.status is Status.RUNNING


def test_batch_work_keeps_a_prompt_that_the_interactive_request_shares() -> None:
    bench = Bench(30, max_num_batched_tokens=128, prefill_chunk_tokens=128, settings={"prefix_caching": True})
    document = [*range(20, 84)]
    bench.add(prompt=33)
    for number in range(2):
        bench.add([*document, number], lane="batch")
    bench.step()
    bench.add([*document, *range(200, 220)])
    assert not bench.step().preempted


def test_batch_work_keeps_blocks_that_stay_held_without_it() -> None:
    bench = Bench(num_blocks=21, max_num_batched_tokens=96, prefill_chunk_tokens=96, settings={"prefix_caching": True})
    document = [*range(20, 84)]
    bench.add(document)
    bench.add([*document, 1], lane="batch")
    bench.step()
    bench.add(prompt=20)
    assert not bench.step().preempted


def test_prompts_found_in_the_cache_make_room_for_others_only_where_requests_share_them() -> None:
    bench = Bench(101, max_num_seqs=64, max_num_batched_tokens=96, predicts=True, settings={"prefix_caching": True})
    conversation = [*range(20, 52)]
    for _ in range(12):
        request = bench.add(conversation, max_tokens=8)
        while bench.scheduler.running or bench.scheduler.waiting:
            bench.step()
        conversation = [*request.token_ids, 9]
    mean_prompt = 32 + 9 * 11 / 2  # no turn shares its beginning with a request that runs beside it
    assert bench.scheduler.num_admissible == int(100 / ((mean_prompt + 8 / 2) / BLOCK_SIZE + 0.5))


def test_batch_work_keeps_its_blocks_where_giving_them_up_would_not_let_anybody_in() -> None:
    bench = Bench(num_blocks=11, max_num_batched_tokens=64, prefill_chunk_tokens=64)
    bench.add(prompt=12)
    batch = bench.add(prompt=4, lane="batch")
    bench.step()
    bench.add(prompt=33)  # nine blocks, of which the first request holds three
    assert not bench.step().preempted
    assert batch.status is Status.RUNNING


def test_the_batch_lane_has_its_share_of_the_sequences_under_constant_interactive_load() -> None:
    bench = Bench(max_num_seqs=4, settings={"batch": LaneConfig(share=0.25)})
    batch = [bench.add(prompt=2, max_tokens=3, lane="batch") for _ in range(5)]
    for _ in range(60):
        while sum(request.status is Status.WAITING for request in bench.scheduler.waiting) < 8:
            bench.add(prompt=2, max_tokens=3)
        bench.step()
    assert all(request.status is Status.FINISHED for request in batch)


def test_the_batch_lane_has_its_share_of_the_tokens_beside_long_interactive_prompts() -> None:
    lanes = {"batch": LaneConfig(share=0.5)}
    bench = Bench(num_blocks=100, max_num_batched_tokens=20, prefill_chunk_tokens=20, settings=lanes)
    for _ in range(2):
        bench.add(prompt=100, lane="batch")
    bench.add(prompt=100)
    plans = [bench.step() for _ in range(4)]
    assert [share.num_tokens for share in plans[-1].scheduled] == [10, 9, 1]  # the interactive one's is the first


def test_where_its_share_is_less_than_a_sequence_an_aged_batch_request_gets_every_tenth_turn() -> None:
    bench = Bench(max_num_seqs=1, settings={"ageing_s": 10.0})
    batch = [bench.add(prompt=2, max_tokens=1, lane="batch") for _ in range(2)]
    interactive = [bench.add(prompt=2, max_tokens=1) for _ in range(40)]
    served = []
    for _ in range(30):
        bench.now += 1
        served += [share.request for share in bench.step().scheduled]
    assert served.index(batch[0]) == 9  # aged after ten seconds: all before it came first
    assert served.index(batch[1]) - served.index(batch[0]) == 10
    assert [request for request in served if request in interactive] == interactive[:28]


def test_an_aged_batch_request_that_is_due_is_overtaken_by_none_and_not_preempted_first() -> None:
    bench = Bench(num_blocks=11, max_num_seqs=4, settings={"ageing_s": 10.0, "batch": LaneConfig(share=0.25)})
    bench.add(prompt=12, max_tokens=4)
    bench.step()
    large = bench.add(prompt=30, max_tokens=2, lane="batch")
    bench.add(prompt=3, max_tokens=30)
    bench.step()
    assert large.status is Status.WAITING  # passed, as it does not fit
    assert len(bench.scheduler.running) == 2
    bench.now = 10.0
    late = [bench.add(prompt=3) for _ in range(3)]
    while large.status is Status.WAITING:
        bench.step()
        assert all(request.status is Status.WAITING for request in late)
    assert large.priority[0] == 0


def test_the_shortest_first_order_counts_what_the_cache_lacks_of_a_prompt() -> None:
    bench = Bench(settings={"interactive": LaneConfig(order="sjf"), "prefix_caching": True})
    beginning = list(range(40))
    bench.add(prompt=[*beginning, 1], max_tokens=1)
    while bench.scheduler.running or bench.scheduler.waiting:
        bench.step()
    waits = bench.add(prompt=20, max_tokens=1)
    short, cached = bench.add(prompt=12, max_tokens=1), bench.add(prompt=[*beginning, 2], max_tokens=1)
    assert bench.scheduler.waiting == [waits, cached, short]


def test_short_prompts_pass_long_ones_that_have_had_their_part_of_the_step() -> None:
    bench = Bench(
        num_blocks=200, max_num_batched_tokens=24, prefill_chunk_tokens=8, settings={"long_prefill_tokens": 16}
    )
    for _ in range(3):
        bench.add(prompt=50)
    short = bench.add(prompt=5)
    plan = bench.step()
    assert shares(plan) == {"r1": (0, 8), "r2": (0, 8), "r4": (0, 5)}
    assert short.status is Status.RUNNING
    assert shares(bench.step()) == {"r1": (8, 8), "r2": (8, 8), "r4": (5, 1)}  # the third still waits for its turn


def test_long_prompts_take_the_tokens_that_no_other_request_needs() -> None:
    bench = Bench(
        num_blocks=200, max_num_batched_tokens=24, prefill_chunk_tokens=8, settings={"long_prefill_tokens": 8}
    )
    for _ in range(3):
        bench.add(prompt=50)
        bench.scheduler.config = replace(bench.scheduler.config, long_prefill_tokens=24)
        bench.step()
    bench.scheduler.config = replace(bench.scheduler.config, long_prefill_tokens=8)
    assert [share.num_tokens for share in bench.step().scheduled] == [8, 8, 8]


def test_a_step_leaves_the_batch_lanes_share_or_what_of_it_batch_requests_and_the_budget_leave() -> None:
    bench = Bench(max_num_batched_tokens=18, settings={"batch": LaneConfig(share=0.5)})
    bench.add(prompt=3)
    assert bench.scheduler.tokens_left(bench.step()) == 9  # the share
    bench.add(prompt=8, lane="batch")
    assert bench.scheduler.tokens_left(bench.step()) == 9  # 9 of the budget are used, 8 of the share
    for _ in range(3):
        bench.add(prompt=8, lane="batch")
    assert bench.scheduler.tokens_left(bench.step()) == 1  # both are used up


@pytest.mark.parametrize(
    ("settings", "on_cpu", "step", "chunk"),
    [
        ({}, False, 2048, 512),  # a GPU needs many rows to be at its best
        ({}, True, 32 + 512, 256),  # a CPU does not, and a long step is a long wait
        ({"max_prefill_tokens": 64}, True, 32 + 64, 32),
        ({"max_prefill_tokens": 64}, False, 32 + 64, 32),
        ({"max_prefill_tokens": 4096}, True, 2048, 512),
        ({"max_num_batched_tokens": 64, "prefill_chunk_tokens": 7}, True, 64, 7),  # both are bounds
        ({"max_prefill_tokens": 1}, True, 33, 1),
    ],
)
def test_step_has_room_for_every_sequence_and_some_prompt_tokens(
    settings: dict[str, Any], on_cpu: bool, step: int, chunk: int
) -> None:
    config = continuous_config(EngineConfig(model=Path("model"), **settings), 32, 512 if on_cpu else None)
    assert (config.max_num_batched_tokens, config.prefill_chunk_tokens) == (step, chunk)


def test_long_prompt_leaves_room_for_others_on_a_cpu() -> None:
    config = continuous_config(EngineConfig(model=Path("model")), 32, 512)
    assert config.max_long_tokens < config.max_num_batched_tokens - config.max_num_seqs


@pytest.mark.parametrize(("name", "padded"), [("static", True), ("dynamic", False)])
def test_request_level_batching_takes_its_whole_budget_on_any_device(name: Any, padded: bool) -> None:
    config = EngineConfig(model=Path("model"), scheduler=name)
    scheduler = make_scheduler(config, 32, BlockPool(10, BlockGroups(16, num_layers=1)), None, 512)
    assert isinstance(scheduler, BatchScheduler)
    assert (scheduler.config.max_num_batched_tokens, scheduler.config.padded) == (2048, padded)
