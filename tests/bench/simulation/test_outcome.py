import math

import pytest

from llmservice_bench.simulation.latencies import GapHistogram
from llmservice_bench.simulation.outcome import DecisionRecord, FleetSize, Outcome, Targets, Waits
from llmservice_bench.simulation.report import ready_at, reasons, replica_range
from llmservice_bench.simulation.requests import SimulatedRequest
from llmservice_operator.scaling.decision import Decision
from llmservice_planner.traffic.traces import TraceRequest


def request(number: int, ttft_s: float | None, late_gaps: int = 0, tokens: int = 101) -> SimulatedRequest:
    made = SimulatedRequest.of(number, TraceRequest(1.0, 10, tokens), 1000)
    if ttft_s is None:
        made.end("refused", 1.0, "the queue is full")
    else:
        made.first_token_s, made.num_tokens, made.late_gaps = 1.0 + ttft_s, tokens, late_gaps
        made.end("finished", 9.0)
    return made


def outcome(requests: list[SimulatedRequest], sizes: list[FleetSize], changes: list[tuple[float, int, int]]) -> Outcome:
    decisions = [DecisionRecord(when, before, Decision(after, after, ("why",))) for when, before, after in changes]
    return Outcome(
        policy="some",
        requests=requests,
        gaps=GapHistogram(),
        sizes=sizes,
        decisions=decisions,
        warmup_s=10.0,
        duration_s=100.0,
        gpu_s=3600.0,
        num_steps=1,
        num_preemptions=0,
    )


def test_promises_are_kept_by_request_and_one_that_was_refused_keeps_none() -> None:
    requests = [request(0, 0.5), request(1, 1.5), request(2, 0.5, late_gaps=2), request(3, None)]
    kept = outcome(requests, [], []).attainment(Targets(1.0, 0.05))
    assert (kept.ttft, kept.itl, kept.both) == (0.5, 0.5, 0.25)
    assert reasons(outcome(requests, [], [])) == {("refused", "the queue is full"): 1}


@pytest.mark.parametrize(
    ("tokens", "late", "keeps"),
    [(101, 1, True), (101, 2, False), (11, 0, True), (11, 1, False), (1, 0, True), (501, 5, True)],
)
def test_a_request_keeps_itl_if_its_99th_percentile_does(tokens: int, late: int, keeps: bool) -> None:
    assert request(0, 0.1, late, tokens).keeps_itl == keeps


def test_waits_are_those_of_the_lane_and_of_requests_that_were_scheduled() -> None:
    requests = [request(number, 0.5) for number in range(4)]
    for number, each in enumerate(requests[:3]):
        each.first_scheduled_s = each.arrival_s + number
    found = outcome(requests, [], [])
    assert found.waits("interactive") == Waits(3, 1.0, 1.0, 2.0)
    assert found.waits("batch") == Waits(0, None, None, None)


def test_a_request_ends_once() -> None:
    with pytest.raises(ValueError, match="request 0 has finished already"):
        request(0, 0.1).end("failed", 10.0, "again")


def test_changes_of_direction_are_counted_within_a_window() -> None:
    changes = [(2.0, 9, 8), (10.0, 2, 4), (50.0, 4, 6), (100.0, 6, 3), (150.0, 3, 5), (500.0, 5, 2)]
    found = outcome([], [], changes)
    assert found.turns_within(300.0) == 2  # down at 100, up at 150
    assert found.turns_within(50.0) == 1
    assert outcome([], [], changes[:3]).turns_within(300.0) == 0


def test_the_range_of_replicas_is_that_after_the_warmup() -> None:
    sizes = [FleetSize(0.0, 9, 9, 0, 0), FleetSize(5.0, 2, 2, 0, 0), FleetSize(40.0, 4, 2, 2, 0)]
    found = outcome([], [*sizes, FleetSize(120.0, 7, 7, 0, 0)], [])
    assert replica_range(found) == (2, pytest.approx((30 * 2 + 60 * 4) / 90), 4)
    assert [ready_at(found, time_s) for time_s in (0.0, 6.0, 130.0)] == [9, 2, 7]


def test_without_targets_all_that_finish_keep_them() -> None:
    assert outcome([request(0, 50.0)], [], []).attainment(Targets()).both == 1.0
    assert Targets().ttft_s == math.inf
