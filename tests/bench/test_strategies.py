"""The parts of the scheduling benchmark with a tiny model."""

import time

import pytest

from llmservice_bench.trace import Lengths
from llmservice_server.tiny.model import TinyModelSpec, write_tiny_model
from scheduling.findings import AT_ONCE, CONTINUOUS, DYNAMIC, STATIC, Setup
from scheduling.load import Arrival, Run, complete_by_turns, with_long_prompts

LENGTHS = [Lengths(5, 3), Lengths(40, 12), Lengths(9, 1), Lengths(20, 6), Lengths(3, 9)]


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    folder = tmp_path_factory.mktemp("tiny")
    spec = TinyModelSpec(layers=1, hidden_size=32, heads=2, kv_heads=1)
    write_tiny_model(folder, spec)
    return Setup(folder, spec.vocab_size, LENGTHS, max_num_seqs=2, kv_cache_bytes=4 << 20)


def test_every_strategy_serves_the_whole_trace_and_only_static_pads(setup: Setup) -> None:
    waste = {}
    for name in (CONTINUOUS, DYNAMIC, STATIC):
        engine = setup.engine(scheduler=name, max_batch_wait_s=None if name == CONTINUOUS else 0.0)
        run = Run(engine, setup.arrivals(AT_ONCE))
        report, waste[name] = run.complete(), run.waste
        assert (report.completed, report.failed) == (5, 0)
        assert report.output_tokens == sum(each.output_tokens for each in LENGTHS)
        assert report.ttft_s.count == report.e2e_s.count == 5
    assert waste[STATIC].of_padding > 0.2
    assert waste[DYNAMIC].of_padding == waste[CONTINUOUS].of_padding == 0
    assert waste[CONTINUOUS].of_kv_cache < waste[DYNAMIC].of_kv_cache < waste[STATIC].of_kv_cache


def test_all_strategies_see_the_same_requests_at_any_rate(setup: Setup) -> None:
    at_once, slowly = setup.arrivals(AT_ONCE), setup.arrivals(2.0)
    assert [each.prompt_token_ids for each in at_once] == [each.prompt_token_ids for each in slowly]
    assert {each.at_s for each in at_once} == {0.0}
    assert slowly[-1].at_s > 0.5


def test_requests_begin_anew_where_a_run_has_more_than_there_are_lengths(setup: Setup) -> None:
    arrivals = setup.arrivals(AT_ONCE, 7)
    assert [each.output_tokens for each in arrivals] == [3, 12, 1, 6, 9, 3, 12]
    assert arrivals[0].prompt_token_ids != arrivals[5].prompt_token_ids
    assert setup.arrivals(2.0)[:3] == setup.arrivals(2.0, 3)


def test_steps_count_sequences_with_a_token_and_waiting_requests(setup: Setup) -> None:
    run = Run(setup.engine(prefix_caching=False), setup.arrivals(AT_ONCE))
    report = run.complete()
    assert sum(step.num_outputs for step in run.steps) == report.output_tokens
    assert max(step.num_outputs for step in run.steps) == 2
    assert [step.num_waiting for step in run.steps][:1] == [3]
    assert run.steps[-1].num_waiting == 0
    assert 0 < sum(step.took_s for step in run.steps) <= report.duration_s


def test_run_that_breaks_its_bound_is_stopped_and_leaves_the_engine_idle(setup: Setup) -> None:
    engine = setup.engine()
    assert Run(engine, setup.arrivals(AT_ONCE), ttft_bound_s=0.0).run() is None
    assert not engine.has_work
    assert engine.pool.num_held == 0
    assert Run(engine, setup.arrivals(AT_ONCE), ttft_bound_s=60.0).complete().completed == 5


def test_long_prompts_come_at_their_own_pace_and_are_in_no_figure(setup: Setup) -> None:
    short = [Arrival(at_s, [1, 2], 2) for at_s in (0.0, 0.02, 0.05)]
    both = with_long_prompts(short, Lengths(100, 1), 0.02, setup.vocab_size)
    assert [(each.at_s, each.is_measured) for each in both] == [
        (0.0, True), (0.01, False), (0.02, True), (pytest.approx(0.03), False), (0.05, True),
    ]  # fmt: skip
    report = Run(setup.engine(), both).complete()
    assert (report.completed, report.prompt_tokens) == (3, 6)


def test_alternate_runs_are_all_completed_with_their_own_seconds(setup: Setup) -> None:
    engines = [setup.engine(prefix_caching=False) for _ in range(2)]
    runs = [Run(engine, setup.arrivals(AT_ONCE)) for engine in engines]
    began_s = time.monotonic()
    spent_s = complete_by_turns(runs)
    assert 0 < min(spent_s) <= sum(spent_s) <= time.monotonic() - began_s
    assert [run.report().completed for run in runs] == [5, 5]
    assert not any(engine.has_work for engine in engines)


def test_turn_of_many_steps_changes_no_answer(setup: Setup) -> None:
    runs = [Run(setup.engine(prefix_caching=False), setup.arrivals(AT_ONCE)) for _ in range(2)]
    complete_by_turns(runs, turn_s=60.0)
    assert [run.report().output_tokens for run in runs] == [31, 31]


def test_time_in_which_a_run_is_paused_is_in_no_latency(setup: Setup) -> None:
    run = Run(setup.engine(), setup.arrivals(AT_ONCE))
    run.begin()
    run.advance()
    run.stand_still(1000)  # which have not passed, so that it shows
    while not run.is_over:
        run.advance()
    assert run.report().e2e_s.p50 < -900
