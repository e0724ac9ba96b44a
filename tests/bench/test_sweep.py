"""A sweep of a simulated server, whose latency grows with the requests in flight and without bound above capacity."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmservice_bench.client import TargetError
from llmservice_bench.drive import Load
from llmservice_bench.record import LatencyTargets, RequestRecord
from llmservice_bench.sweep import HighestRate, RateSearch, Sweep, SweepPlan, is_sustained
from llmservice_bench.trace import Lengths

CAPACITY = 20.0
PLAN = SweepPlan(
    [Lengths(8, 4)], seconds=10.0, concurrencies=(1, 8), shares=(0.5, 1.5), targets=LatencyTargets(ttft_s=0.2)
)


async def serve(load: Load, name: str) -> list[RequestRecord]:
    """Requests wait for 0.1 s below 90 % of the capacity, and increasingly longer above it."""
    if load.max_concurrency:
        rate, ttft_s = min(CAPACITY, 5.0 * load.max_concurrency), 0.1
    else:
        rate, ttft_s = load.rate, 0.1 if load.rate < 0.9 * CAPACITY else 3.0
    assert name
    count = round(rate * PLAN.seconds)
    return [RequestRecord(i / rate, 8, output_tokens=4, ttft_s=ttft_s, e2e_s=ttft_s) for i in range(count)]


async def swept(plan: SweepPlan) -> Sweep:
    sweep = Sweep(plan, serve)
    await sweep.run()
    return sweep


async def test_open_loops_are_shares_of_what_the_closed_ones_delivered() -> None:
    sweep = await swept(replace(PLAN, targets=None))
    assert [point.concurrency for point in sweep.points] == [1, 8, None, None]
    assert [point.rate for point in sweep.points][2:] == pytest.approx([10.0, 30.0], rel=0.02)
    assert sweep.highest_rate is None


async def test_search_uses_the_results_of_the_curve() -> None:
    sweep = await swept(PLAN)
    found = sweep.highest_rate
    assert found is not None
    assert found.is_settled
    assert found.requests_per_s < 0.9 * CAPACITY
    assert found.broken_at is not None
    assert 0.9 * CAPACITY <= found.broken_at <= found.requests_per_s * 1.05
    assert found.runs == len(sweep.points) - 4
    assert all(10.0 < (point.rate or 0) < 30.0 for point in sweep.points[4:]), "the rest was known"
    assert found.line().startswith("highest rate at which 99% meet ttft:200 (ms): 17.")


@pytest.mark.parametrize(
    ("targets", "is_sent_late"),
    [(LatencyTargets(itl_s=0.05), False), (LatencyTargets(ttft_s=30.0), False), (LatencyTargets(ttft_s=0.2), True)],
    ids=["gaps do not grow with the queue", "longer than a run", "the load generator falls behind"],
)
async def test_a_rate_that_is_not_sustained_is_not_the_highest_though_it_meets_the_targets(
    targets: LatencyTargets, is_sent_late: bool
) -> None:
    async def fall_behind(load: Load, name: str) -> list[RequestRecord]:
        behind = 0.0 if load.max_concurrency else max(0.0, load.rate / CAPACITY - 1)
        waits = [(each, behind * each.started_s) for each in await serve(load, name)]
        if is_sent_late:
            return [replace(each, late_s=wait_s, ttft_s=0.1) for each, wait_s in waits]
        return [replace(each, ttft_s=0.1 + wait_s, itl_s=[0.02]) for each, wait_s in waits]

    sweep = Sweep(replace(PLAN, targets=targets), fall_behind)
    await sweep.run()
    assert sweep.highest_rate is not None
    assert sweep.highest_rate.is_settled
    assert 0.95 * CAPACITY < sweep.highest_rate.requests_per_s < 1.1 * CAPACITY
    assert [row["sustained"] for row in sweep.as_dict()["rows"][:4]] == [True, True, True, False]


def test_a_long_prompt_in_the_second_half_is_no_rate_that_is_not_sustained() -> None:
    short = [RequestRecord(float(at_s), 10, ttft_s=0.2) for at_s in range(10)]
    assert is_sustained([replace(each, ttft_s=4.0) if each.started_s == 7 else each for each in short], 10)
    assert not is_sustained([replace(each, ttft_s=0.2 * each.started_s) for each in short], 10)


@pytest.mark.parametrize(("share", "shown"), [(0.29, "29%"), (0.99, "99%"), (0.995, "99.5%"), (1.0, "100%")])
def test_the_share_that_met_the_targets_is_not_rounded(share: float, shown: str) -> None:
    found = HighestRate("ttft:200", share, 5.0, 6.0, 0.05, is_settled=True, runs=3)
    assert found.line() == f"highest rate at which {shown} meet ttft:200 (ms): 5.00 req/s; 6.00 is too many"


async def test_search_starts_no_run_after_its_time_limit() -> None:
    times = iter(range(0, 1000, 10))
    sweep = Sweep(replace(PLAN, limit_s=25.0), serve, clock=lambda: float(next(times)))
    await sweep.run()
    assert sweep.highest_rate is not None
    assert (sweep.highest_rate.runs, sweep.highest_rate.is_settled) == (2, False)
    assert "not settled" in sweep.highest_rate.line()


async def test_target_that_no_rate_meets_is_reported() -> None:
    sweep = await swept(replace(PLAN, targets=LatencyTargets(ttft_s=0.01)))
    assert sweep.highest_rate is not None
    assert (sweep.highest_rate.requests_per_s, sweep.highest_rate.is_settled) == (0.0, False)
    assert "none that was tried" in sweep.highest_rate.line()


async def test_row_has_throughput_latency_and_the_share_that_met_the_targets() -> None:
    row = (await swept(PLAN)).as_dict()["rows"][1]
    assert (row["load"], row["concurrency"], row["rate"], row["goodput_share"]) == ("8 at once", 8, None, 1.0)
    assert row["ttft_p99_ms"] == pytest.approx(100.0)
    assert row["output_tokens_per_s"] == pytest.approx(80.0, rel=0.02)


async def test_server_without_responses_ends_the_sweep_with_the_reason() -> None:
    async def refuse(load: Load, name: str) -> list[RequestRecord]:
        return [RequestRecord(0.0, 8, error="HTTP 503")]

    with pytest.raises(TargetError, match="HTTP 503"):
        await Sweep(PLAN, refuse).run()


def found(search: RateSearch, capacity: float) -> tuple[RateSearch, list[float]]:
    """Run the search against a server that meets its target up to `capacity`."""
    tried = []
    while (rate := search.next_rate) is not None:
        tried.append(rate)
        search = search.with_result(rate, rate <= capacity)
    return search, tried


@given(capacity=st.floats(0.1, 1000.0), start=st.floats(0.1, 1000.0), tolerance=st.floats(0.01, 0.5))
def test_search_ends_within_its_tolerance_of_the_truth(capacity: float, start: float, tolerance: float) -> None:
    search, tried = found(RateSearch(start, tolerance), capacity)
    assert search.is_settled
    assert search.kept <= capacity < search.broken
    assert search.broken <= search.kept * (1 + tolerance) * (1 + 1e-9)
    assert len(tried) < 40


@given(capacity=st.floats(0.1, 1000.0), start=st.floats(0.1, 1000.0))
def test_no_rate_with_a_known_result_is_tried(capacity: float, start: float) -> None:
    search = RateSearch(start)
    while (rate := search.next_rate) is not None:
        assert search.kept < rate < search.broken
        search = search.with_result(rate, rate <= capacity)


@given(runs=st.lists(st.tuples(st.floats(0.1, 100.0), st.booleans()), max_size=8), answers=st.randoms())
def test_search_ends_however_runs_contradict_each_other(runs: list[tuple[float, bool]], answers: random.Random) -> None:
    search = RateSearch(5.0, floor=0.01)
    for rate, kept in runs:
        search = search.with_result(rate, kept)
        assert 0 <= search.kept < search.broken
    for _ in range(60):
        if (rate := search.next_rate) is None or rate > 1e6:
            break
        search = search.with_result(rate, answers.random() < 0.5)
    else:
        pytest.fail(f"still searching: {search}")


def test_good_guess_is_quickly_confirmed() -> None:
    assert found(RateSearch(10.0, 0.1), 10.5)[1] == [10.0, 15.0, 12.5, 11.25, 10.625]


def test_server_that_meets_no_target_ends_the_search_at_the_floor() -> None:
    search, tried = found(RateSearch(8.0, floor=1.0), capacity=0.0)
    assert tried == [8.0, 4.0, 2.0, 1.0]
    assert (search.kept, search.is_settled) == (0.0, False)


@pytest.mark.parametrize("fields", [{"start": 0.0}, {"start": 1.0, "tolerance": 0.0}])
def test_search_that_cannot_end_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="above 0"):
        RateSearch(**fields)
