from __future__ import annotations

from collections.abc import Callable

import pytest

from llmservice_operator.pod import Pod
from llmservice_operator.startup import LONGEST_S, SHORTEST_S, UNKNOWN_S, StartupTimes


def started(pod_named: Callable[..., Pod], *times_s: float) -> list[Pod]:
    return [pod_named(f"pod-{n}", created_s=1000, ready_since_s=1000 + time_s) for n, time_s in enumerate(times_s)]


def test_before_the_first_pod_patience_is_long() -> None:
    times = StartupTimes()

    assert (times.p90_s, times.patience_s) == (None, UNKNOWN_S)


def test_nine_in_ten_pods_were_faster_than_what_is_learned(pod_named: Callable[..., Pod]) -> None:
    times = StartupTimes()
    times.observe(started(pod_named, *range(20, 30), 500))

    assert times.p90_s == 29


def test_a_pod_counts_once_and_not_after_a_restart(pod_named: Callable[..., Pod]) -> None:
    times = StartupTimes()
    pod = pod_named(created_s=0, ready_since_s=40)
    times.observe([pod])
    times.observe([pod_named(created_s=0, ready_since_s=4000)])
    times.observe([pod_named("restarted", created_s=0, ready_since_s=4000, restarts=1)])

    assert times.p90_s == 40


@pytest.mark.parametrize(("learned_s", "patience_s"), [(1, SHORTEST_S), (60, 60), (99_999, LONGEST_S)])
def test_patience_is_bounded(learned_s: float, patience_s: float) -> None:
    assert StartupTimes(learned_s).patience_s == patience_s


def test_a_restart_begins_with_what_the_status_kept(pod_named: Callable[..., Pod]) -> None:
    times = StartupTimes(90)
    times.observe(started(pod_named, 30))

    assert times.p90_s == 90
