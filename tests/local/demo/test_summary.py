"""The demo's verdict, from made-up observations."""

from __future__ import annotations

from typing import Any

import pytest

from llmservice_bench.record import RequestRecord
from llmservice_local.demo.observation import Observation
from llmservice_local.demo.summary import Outcome, summarise


def seen(time_s: float, ready: int, pieces: int = 0, completed: int = 0, replicas: int | None = None) -> Observation:
    return Observation(
        time_s=time_s,
        replicas=ready if replicas is None else replicas,
        ready=ready,
        desired=ready,
        waiting=0,
        kv_usage=0.0,
        ttft_p99_s=None,
        pieces=pieces,
        in_flight=0,
        completed=completed,
        failed=0,
    )


def record(started_s: float, ttft_s: float, error: str | None = None) -> RequestRecord:
    return RequestRecord(
        started_s=started_s,
        prompt_tokens=1,
        output_tokens=2,
        ttft_s=ttft_s,
        itl_s=[0.1],
        e2e_s=ttft_s + 0.1,
        error=error,
    )


OBSERVED = [
    seen(0, 1, pieces=0),
    seen(10, 1, pieces=1000, completed=50),
    seen(20, 2, pieces=2000, completed=100),
    seen(30, 3, pieces=4000, completed=200),
    seen(60, 3, pieces=13000, completed=650),
    seen(80, 1, pieces=13500, completed=700),
]


def summary(**changed: Any) -> Outcome:
    given: dict[str, Any] = {
        "observations": OBSERVED,
        "records": [record(5, 2.0), record(25, 9.0), record(40, 0.2)],
        "decisions": {},
        "traffic_s": 60,
    }
    return summarise(**(given | changed))


def test_phases_are_split_where_replicas_became_ready() -> None:
    before, after = summary().phases
    assert (before.start_s, before.end_s) == (0, 20)
    assert (after.start_s, after.end_s) == (30, 60)
    assert before.output_tokens_per_s == pytest.approx(100)
    assert after.output_tokens_per_s == pytest.approx(300)
    assert after.requests_per_s == pytest.approx(15)
    assert (before.ttft_s.p99, after.ttft_s.p99) == (pytest.approx(2.0), pytest.approx(0.2))
    assert (before.ttft_s.count, after.ttft_s.count) == (1, 1), "what was sent while scaling is in neither"


@pytest.mark.parametrize(
    ("changed", "succeeded", "last_lines"),
    [
        ({}, True, ["peak replicas:   3", "final replicas:  1", "failed requests: 0"]),
        (
            {"records": [record(5, 1.0, error="HTTP 503")]},
            False,
            ["peak replicas:   3", "final replicas:  1", "failed requests: 1 (0 expected)"],
        ),
        (
            {"failed_elsewhere": 2},
            False,
            ["peak replicas:   3", "final replicas:  1", "failed requests: 2 (0 expected)"],
        ),
        (
            {"observations": OBSERVED[:3]},
            False,
            ["peak replicas:   2 (at least 3 expected)", "final replicas:  2 (1 expected)", "failed requests: 0"],
        ),
        (
            {"observations": [*OBSERVED, seen(81, 1, replicas=2)]},
            False,
            ["peak replicas:   3", "final replicas:  2 (1 expected)", "failed requests: 0"],
        ),
    ],
    ids=["as it should be", "a failed request", "a failure while calibrating", "too few replicas", "a pod still ends"],
)
def test_verdict_needs_three_replicas_one_at_the_end_and_no_failure(
    changed: dict[str, Any], succeeded: bool, last_lines: list[str]
) -> None:
    outcome = summary(**changed)
    assert outcome.succeeded is succeeded
    assert outcome.lines()[-3:] == last_lines


def test_replicas_that_never_became_ready_do_not_count() -> None:
    assert summary(observations=[seen(0, 1), seen(10, 1, replicas=4)]).peak == 1


def test_decisions_are_listed_in_order_with_every_reason() -> None:
    decisions = {
        "2026-01-01T00:00:09Z": {"time": "2026-01-01T00:00:09Z", "replicas": 3, "reasons": ["queue: 9 waiting -> 3"]},
        "2026-01-01T00:00:05Z": {"time": "2026-01-01T00:00:05Z", "replicas": 2, "reasons": ["slots -> 2", "bounds"]},
    }
    lines = [line.strip() for line in summary(decisions=decisions).lines()]
    reported = lines[lines.index("What the operator decided, and why:") + 1 :]
    assert reported[:3] == [
        "2026-01-01T00:00:05Z  2 replicas: slots -> 2",
        "bounds",
        "2026-01-01T00:00:09Z  3 replicas: queue: 9 waiting -> 3",
    ]


def test_decisions_that_changed_nothing_are_left_out() -> None:
    reported = [(1, "min"), (3, "queue"), (3, "stabilization"), (1, "idle")]
    decisions = {f"t{n}": {"time": f"t{n}", "replicas": r, "reasons": [why]} for n, (r, why) in enumerate(reported)}
    assert [decision["reasons"] for decision in summary(decisions=decisions).decisions] == [
        ["min"],
        ["queue"],
        ["idle"],
    ]


def test_nothing_observed_is_no_success() -> None:
    outcome = summary(observations=[], records=[])
    assert (outcome.peak, outcome.final, outcome.succeeded) == (0, 0, False)
    assert outcome.lines()
