from __future__ import annotations

from collections.abc import Callable

import pytest

from llmservice_operator.pods.pod import Pod
from llmservice_operator.scaling.startup import LONGEST_S, SHORTEST_S, UNKNOWN_S, StartupTimes


def started(pod_named: Callable[..., Pod], *times_s: float) -> list[Pod]:
    return [pod_named(f"pod-{n}", created_s=1000, ready_since_s=1000 + time_s) for n, time_s in enumerate(times_s)]


def test_before_the_first_pod_patience_is_long() -> None:
    times = StartupTimes()

    assert (times.p90_s, times.patience_s) == (None, UNKNOWN_S)


def test_nine_in_ten_pods_were_faster_than_what_is_learned(pod_named: Callable[..., Pod]) -> None:
    times = StartupTimes()
    times.observe(started(pod_named, *range(20, 30), 500), 2000, 0)

    assert times.p90_s == 29


def test_a_pod_counts_once_and_not_after_a_restart(pod_named: Callable[..., Pod]) -> None:
    times = StartupTimes()
    pod = pod_named(created_s=0, ready_since_s=40)
    times.observe([pod], 50, 0)
    times.observe([pod_named(created_s=0, ready_since_s=4000)], 4000, 0)
    times.observe([pod_named("restarted", created_s=0, ready_since_s=4000, restarts=1)], 4000, 0)

    assert times.p90_s == 40


@pytest.mark.parametrize(("learned_s", "patience_s"), [(1, SHORTEST_S), (60, 60), (99_999, LONGEST_S)])
def test_patience_is_bounded(learned_s: float, patience_s: float) -> None:
    assert StartupTimes(learned_s).patience_s == patience_s


def test_a_restart_begins_with_what_the_status_kept(pod_named: Callable[..., Pod]) -> None:
    times = StartupTimes(90)
    times.observe(started(pod_named, 30), 2000, 0)

    assert times.p90_s == 90


def coming(pod_named: Callable[..., Pod], created_s: float) -> Pod:
    return pod_named("coming", ready=False, created_s=created_s)


def test_a_pod_is_overdue_once_it_was_watched_for_longer_than_its_like_took(pod_named: Callable[..., Pod]) -> None:
    times, pod = StartupTimes(60), coming(pod_named, created_s=1000)
    times.observe([], 990, 0)
    overdue = []
    for now in (1000, 1030, 1060, 1061):
        times.observe([pod], now, now - 990)
        overdue.append(times.overdue(pod))

    assert overdue == [False, False, False, True]


def test_a_pod_that_was_there_before_the_operator_is_as_old_as_it_says(pod_named: Callable[..., Pod]) -> None:
    times, pod = StartupTimes(60), coming(pod_named, created_s=1000)
    times.observe([pod], 1061, 0)

    assert times.overdue(pod)


@pytest.mark.parametrize("jump_s", [110, 3600, -3600])
def test_a_clock_that_is_set_makes_no_pod_overdue(jump_s: float, pod_named: Callable[..., Pod]) -> None:
    times, pod = StartupTimes(60), coming(pod_named, created_s=1_000_000)
    times.observe([], 1_000_000, 0)
    times.observe([pod], 1_000_005, 5)

    times.observe([pod], 1_000_010 + jump_s, 10)

    assert not times.overdue(pod)
