from __future__ import annotations

from collections.abc import Callable

import pytest

from llmservice_operator.pods.pod import Pod, Trouble
from llmservice_operator.scaling.supply import LONGEST_S, SHORTEST_S, UNKNOWN_S, OverloadTimer, StartupTimes, supply_of


def started(pod_named: Callable[..., Pod], *times_s: float) -> list[Pod]:
    return [pod_named(f"pod-{n}", created_s=1000, ready_since_s=1000 + time_s) for n, time_s in enumerate(times_s)]


def test_before_the_first_pod_the_time_is_unknown_and_patience_long() -> None:
    times = StartupTimes()

    assert (times.p90_s, times.patience_s) == (None, UNKNOWN_S)


def test_the_learned_time_is_the_90th_percentile(pod_named: Callable[..., Pod]) -> None:
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


def test_a_restart_resumes_the_time_in_the_status_and_measures_what_came_after_it(
    pod_named: Callable[..., Pod],
) -> None:
    times = StartupTimes(90, measured=1)
    times.observe(started(pod_named, 30), 2000, 0)
    assert (times.p90_s, times.last_s) == (90, None)  # nothing new was measured

    times = StartupTimes(90, measured=1)
    times.observe(started(pod_named, 200, 30), 2000, 0)
    assert (times.p90_s, times.last_s) == (200, (90, 200))


def test_a_slow_start_is_no_news_after_an_hour(pod_named: Callable[..., Pod]) -> None:
    times = StartupTimes(90, measured=1)
    pods = started(pod_named, 200, 30)
    times.observe(pods, 2000, 0)
    times.observe(pods, 5590, 3590)
    assert times.last_s == (90, 200)
    times.observe(pods, 5610, 3610)
    assert (times.p90_s, times.last_s) == (200, None)


def test_a_node_that_an_autoscaler_makes_is_part_of_a_start(pod_named: Callable[..., Pod]) -> None:
    times = StartupTimes()
    times.observe([], 900, 0)
    times.observe([pod_named("new", created_s=1000, scheduled_s=1240, ready_since_s=1330)], 1330, 430)
    assert times.p90_s == 330


def test_an_hour_without_a_node_is_no_part_of_a_start(pod_named: Callable[..., Pod]) -> None:
    """An hour until a GPU is free, then the 90 seconds that a start takes."""
    times = StartupTimes(90)
    waiting = pod_named("late", ready=False, created_s=1000, trouble=Trouble("Unschedulable", "no GPU is free"))
    for second in range(0, 3600, 5):
        times.observe([waiting], 1000 + second, second)
    assert (times.lead_s([waiting]), times.patience_s, times.overdue(waiting)) == (90, 90, False)

    placed = pod_named("late", ready=False, created_s=1000, scheduled_s=4600)
    times.observe([placed], 4600, 3600)
    times.observe([placed], 4660, 3660)
    assert (times.age_s(placed), times.overdue(placed)) == (60, False)

    times.observe([pod_named("late", created_s=1000, scheduled_s=4600, ready_since_s=4690)], 4690, 3690)
    assert (times.p90_s, times.last_s) == (90, (90, 90))


def test_a_restarted_operator_counts_from_the_node_as_well(pod_named: Callable[..., Pod]) -> None:
    times, pod = StartupTimes(90), pod_named("late", ready=False, created_s=1000, scheduled_s=4600)
    times.observe([pod], 4620, 0)

    assert times.age_s(pod) == 20


def test_the_time_that_a_replica_takes_is_bounded(pod_named: Callable[..., Pod]) -> None:
    times, pod = StartupTimes(), pod_named("hangs", ready=False, created_s=0)
    times.observe([pod], 99_999, 0)

    assert times.lead_s([pod]) == StartupTimes(99_999).lead_s([]) == LONGEST_S


def coming(pod_named: Callable[..., Pod], created_s: float) -> Pod:
    return pod_named("coming", ready=False, created_s=created_s)


def test_a_pod_is_overdue_once_it_takes_longer_than_others(pod_named: Callable[..., Pod]) -> None:
    times, pod = StartupTimes(60), coming(pod_named, created_s=1000)
    times.observe([], 990, 0)
    overdue = []
    for now in (1000, 1030, 1060, 1061):
        times.observe([pod], now, now - 990)
        overdue.append(times.overdue(pod))

    assert overdue == [False, False, False, True]


def test_the_age_of_an_earlier_pod_is_that_of_its_timestamp(pod_named: Callable[..., Pod]) -> None:
    times, pod = StartupTimes(60), coming(pod_named, created_s=1000)
    times.observe([pod], 1061, 0)

    assert times.overdue(pod)


@pytest.mark.parametrize(("startup_s", "serves_s"), [(60, 60 + 20), (600, 600 + 540 + 540)])
def test_what_serves_until_a_new_pod_does_includes_what_is_starting(
    startup_s: float, serves_s: float, pod_named: Callable[..., Pod]
) -> None:
    """One pod serves, one has been starting for 20 s, another for none; of each at most a minute is missing."""
    ready = pod_named("ready", ready_since_s=900)
    pods = [ready, *(pod_named(f"at-{created_s}", ready=False, created_s=created_s) for created_s in (980, 1000))]
    times = StartupTimes(startup_s, measured=1)
    times.observe(pods, 1000, 0)

    supply = supply_of({"spec": {"replicas": 3}}, pods, times)

    assert (supply.lead_s, supply.starting) == (startup_s, 2)
    assert supply.serves_s == serves_s


def test_overdue_pods_are_not_counted_on(pod_named: Callable[..., Pod]) -> None:
    pods = [pod_named("ready", ready_since_s=900), coming(pod_named, created_s=930)]
    times = StartupTimes(60, measured=1)
    times.observe(pods, 1000, 0)

    supply = supply_of({"spec": {"replicas": 2}}, pods, times)

    assert (supply.overdue, supply.serves_s) == (1, 70)


@pytest.mark.parametrize("jump_s", [110, 3600, -3600])
def test_a_clock_that_is_set_makes_no_pod_overdue(jump_s: float, pod_named: Callable[..., Pod]) -> None:
    times, pod = StartupTimes(60), coming(pod_named, created_s=1_000_000)
    times.observe([], 1_000_000, 0)
    times.observe([pod], 1_000_005, 5)

    times.observe([pod], 1_000_010 + jump_s, 10)

    assert not times.overdue(pod)


@pytest.mark.parametrize(
    ("history", "lasted"),
    [
        ([(1, 1, 0), (3, 1, 10), (3, 1, 40), (3, 2, 70)], [60.0]),
        ([(3, 1, 10), (3, 2, 70), (3, 3, 75)], [60.0, 5.0]),  # the second new pod, from where the first one left it
        ([(3, 1, 10), (1, 1, 20), (3, 1, 50), (2, 2, 60)], [10.0]),  # it went by itself, and came again
        ([(2, 0, 0), (2, 1, 30)], []),  # a service that starts has no overload
        ([(2, 2, 0), (2, 2, 30)], []),
    ],
)
def test_an_overload_lasts_until_one_more_pod_serves(
    history: list[tuple[int, int, float]], lasted: list[float]
) -> None:
    timer, seen = OverloadTimer(), []
    for wanted, serving, now_s in history:
        timer, lasted_s = timer.observe(wanted, serving, now_s)
        seen += [] if lasted_s is None else [lasted_s]

    assert seen == lasted
