from __future__ import annotations

from typing import Any

import pytest

from llmservice_operator.api.status import AutoscalingStatus, DecisionStatus
from llmservice_operator.pods.cold_start import cold_start, first_ready, woken_since


@pytest.mark.parametrize(
    ("times", "compile_s", "expected"),
    [
        pytest.param((110.0, 130.0, 160.0), 20.0, (10.0, 20.0, 10.0, 20.0), id="with a download"),
        pytest.param((None, 105.0, 160.0), 0.0, (5.0, 0.0, 55.0, 0.0), id="without one"),
        pytest.param((None, 99.0, 100.0), 0.0, (0.0, 0.0, 0.0, 0.0), id="whole seconds are no time travel"),
        pytest.param((None, 105.0, 106.0), 9.0, (5.0, 0.0, 0.0, 1.0), id="no part is longer than the whole"),
    ],
)
def test_the_parts_add_up_to_the_time_from_the_request_to_ready(
    times: tuple[float | None, float, float], compile_s: float, expected: tuple[float, ...], pod_named: Any
) -> None:
    fetch_s, server_s, ready_s = times
    pod = pod_named(fetch_began_s=fetch_s, server_began_s=server_s, ready_since_s=ready_s)

    start = cold_start(pod, 100.0, compile_s)

    assert start is not None
    assert (start.scheduling, start.fetching, start.loading, start.compiling) == expected
    assert start.seconds == ready_s - 100.0


def test_a_pod_whose_container_has_no_time_has_no_parts(pod_named: Any) -> None:
    assert cold_start(pod_named(ready_since_s=5.0), 1.0, 0.0) is None


def test_the_first_pod_that_serves_counts(pod_named: Any) -> None:
    pods = [
        pod_named("late", ready_since_s=9.0),
        pod_named("first", ready_since_s=5.0),
        pod_named("leaves", ready_since_s=1.0, terminating=True),
        pod_named("starts", ready=False),
    ]

    assert first_ready(pods) == pods[1]
    assert first_ready(pods[2:]) is None


@pytest.mark.parametrize(
    ("replicas", "expected"),
    [((2, 2, 0, 1), 180.0), ((2, 1, 0), None), ((1,), None), ((), None), ((0, 1), None)],
)
def test_a_restarted_operator_reads_the_wake_up_from_the_decisions(
    replicas: tuple[int, ...], expected: float | None
) -> None:
    log = [
        DecisionStatus(time=f"1970-01-01T00:0{4 - n}:00Z", wanted=number, replicas=number)
        for n, number in enumerate(replicas)
    ]

    assert woken_since(AutoscalingStatus(desired_replicas=1, decisions=log)) == expected
