"""A sweep of a server that is a formula: latency grows with what is in flight, and without bound past its capacity."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmservice_bench.client import TargetError
from llmservice_bench.drive import Load
from llmservice_bench.goodput import Promises
from llmservice_bench.lengths import Lengths
from llmservice_bench.record import RequestRecord
from llmservice_bench.sweep import Sweep, SweepPlan

CAPACITY = 20.0
PLAN = SweepPlan([Lengths(8, 4)], seconds=10.0, concurrencies=(1, 8), shares=(0.5, 1.5), promises=Promises(ttft_s=0.2))


async def serve(load: Load, name: str) -> list[RequestRecord]:
    """Everybody waits for a tenth of a second below 90 % of the capacity, and ever longer above it."""
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
    sweep = await swept(replace(PLAN, promises=None))
    assert [point.concurrency for point in sweep.points] == [1, 8, None, None]
    assert [point.rate for point in sweep.points][2:] == pytest.approx([10.0, 30.0], rel=0.02)
    assert sweep.highest_rate is None


async def test_highest_rate_is_found_from_what_the_curve_told_already() -> None:
    sweep = await swept(PLAN)
    found = sweep.highest_rate
    assert found is not None
    assert found.is_settled
    assert found.requests_per_s < 0.9 * CAPACITY
    assert found.broken_at is not None
    assert 0.9 * CAPACITY <= found.broken_at <= found.requests_per_s * 1.05
    assert found.runs == len(sweep.points) - 4
    assert all(10.0 < (point.rate or 0) < 30.0 for point in sweep.points[4:]), "the rest was known"
    assert found.line().startswith("highest rate at which 99% keep ttft:200 (ms): 17.")


async def test_search_begins_no_run_once_its_time_is_over() -> None:
    times = iter(range(0, 1000, 10))
    sweep = Sweep(replace(PLAN, limit_s=25.0), serve, clock=lambda: float(next(times)))
    await sweep.run()
    assert sweep.highest_rate is not None
    assert (sweep.highest_rate.runs, sweep.highest_rate.is_settled) == (2, False)
    assert "not settled" in sweep.highest_rate.line()


async def test_promise_that_no_rate_keeps_is_said_so() -> None:
    sweep = await swept(replace(PLAN, promises=Promises(ttft_s=0.01)))
    assert sweep.highest_rate is not None
    assert (sweep.highest_rate.requests_per_s, sweep.highest_rate.is_settled) == (0.0, False)
    assert "none that was tried" in sweep.highest_rate.line()


async def test_row_has_throughput_latency_and_the_share_that_was_served_as_promised() -> None:
    row = (await swept(PLAN)).as_dict()["rows"][1]
    assert (row["load"], row["concurrency"], row["rate"], row["goodput_share"]) == ("8 at once", 8, None, 1.0)
    assert row["ttft_p99_ms"] == pytest.approx(100.0)
    assert row["output_tokens_per_s"] == pytest.approx(80.0, rel=0.02)


async def test_server_that_answers_nobody_ends_the_sweep_with_its_reason() -> None:
    async def refuse(load: Load, name: str) -> list[RequestRecord]:
        return [RequestRecord(0.0, 8, error="HTTP 503")]

    with pytest.raises(TargetError, match="HTTP 503"):
        await Sweep(PLAN, refuse).run()
