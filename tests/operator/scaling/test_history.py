from __future__ import annotations

import pytest

from llmservice_operator.scaling.history import CAPACITY_KEEP_S, LONGEST_GAP_S, History

NOW = 1_000_000.0


def test_a_change_is_noted_in_the_tick_that_sees_it() -> None:
    history = History().observe(NOW, 2).observe(NOW + 5, 2).observe(NOW + 10, 4).observe(NOW + 15, 1)

    assert history.changes == ((NOW + 10, 2), (NOW + 15, -3))
    assert history.last_up_s == NOW + 10


def test_a_recommendation_that_was_not_set_is_no_change() -> None:
    history = History().observe(NOW, 2).remember(NOW, 4, keep_s=60).observe(NOW + 5, 2)

    assert history.changes == ()


def test_entries_older_than_the_memory_are_dropped() -> None:
    history = History().observe(NOW, 1).observe(NOW + 1, 2).remember(NOW + 1, 2, keep_s=60)

    later = history.remember(NOW + 62, 3, keep_s=60)

    assert (later.recommendations, later.changes) == (((NOW + 62, 3),), ())


def test_readings_of_the_capacity_are_smoothed() -> None:
    history = History().measure(NOW, 1.0)
    for tick in range(1, 4):
        history = history.measure(NOW + 5 * tick, 0.0)

    assert history.capacity_per_s(NOW + 15) == pytest.approx(0.9**3)


def test_the_capacity_is_no_lower_than_what_a_replica_finished() -> None:
    history = History().measure(NOW, None, 0.8)
    assert history.capacity_per_s(NOW) is None  # it may be much higher

    slow = history.measure(NOW + 5, 0.1, 0.7)
    assert slow.capacity_per_s(NOW + 5) == pytest.approx(0.73)
    shown = slow.measure(NOW + 10, None, 0.9)
    assert shown.capacity_per_s(NOW + 10) == pytest.approx(0.9)


def test_the_correction_follows_full_replicas_and_is_no_lower_than_what_one_surely_did() -> None:
    history = History().corrected(NOW, 0.5, 0.3)
    assert history.correction_at(NOW) == pytest.approx(0.95)

    assert history.corrected(NOW, None, 0.9) is history
    assert history.corrected(NOW, None, 1.2).correction_at(NOW) == pytest.approx(1.2)
    assert history.corrected(NOW, None, 9.0).correction_at(NOW) == pytest.approx(5.0)
    assert history.correction_at(NOW + CAPACITY_KEEP_S + 1) == 1.0


def test_a_capacity_is_forgotten_after_an_hour() -> None:
    history = History().measure(NOW, 1.0)

    assert history.capacity_per_s(NOW + CAPACITY_KEEP_S) == 1.0
    assert history.capacity_per_s(NOW + CAPACITY_KEEP_S + 1) is None


def test_a_tick_without_metrics_leaves_no_recommendation() -> None:
    history = History().observe(NOW, 2).remember(NOW, 4, keep_s=60).observe(NOW + 5, 2).remember(NOW + 5, None, 60)

    assert history.recommendations == ((NOW, 4),)


@pytest.mark.parametrize(("gap_s", "unmeasured"), [(LONGEST_GAP_S, False), (LONGEST_GAP_S + 5, True)])
def test_a_long_time_without_metrics_is_noted_when_they_come_back(gap_s: float, unmeasured: bool) -> None:
    history = History().observe(NOW, 2).measure(NOW, None)
    for seconds in range(5, round(gap_s), 5):
        history = history.observe(NOW + seconds, 2)

    back = history.observe(NOW + gap_s, 2).measure(NOW + gap_s, None)

    assert (back.unmeasured_s == NOW + gap_s) == unmeasured


@pytest.mark.parametrize("jump_s", [-86_400.0, -1.0, LONGEST_GAP_S + 1, 86_400.0])
def test_unobserved_time_makes_nothing_older(jump_s: float) -> None:
    """A clock that is set, or a process that stood still."""
    history = History(
        recommendations=((NOW - 10, 4),), changes=((NOW - 20, 1),), capacity=(NOW - 30, 1.5), last_tick=(NOW, 4)
    )

    jumped = history.observe(NOW + jump_s, 4)

    assert jumped.recommendations == ((NOW + jump_s - 10, 4),)
    assert jumped.changes == ((NOW + jump_s - 20, 1),)
    assert jumped.capacity == (NOW + jump_s - 30, 1.5)


def test_a_slow_tick_is_no_jump() -> None:
    history = History(recommendations=((NOW - 10, 4),), last_tick=(NOW, 4))

    assert history.observe(NOW + LONGEST_GAP_S, 4).recommendations == ((NOW - 10, 4),)
