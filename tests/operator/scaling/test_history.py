from __future__ import annotations

import pytest

from llmservice_operator.scaling.history import LONGEST_GAP_S, History

NOW = 1_000_000.0


def test_a_change_is_noted_in_the_tick_that_sees_it() -> None:
    history = History().observe(NOW, 2).observe(NOW + 5, 2).observe(NOW + 10, 4).observe(NOW + 15, 1)

    assert history.changes == ((NOW + 10, 2), (NOW + 15, -3))
    assert (history.last_up_s, history.last_change_s) == (NOW + 10, NOW + 15)


def test_a_replica_that_was_asked_for_and_never_set_is_no_change() -> None:
    history = History().observe(NOW, 2).remember(NOW, 4, keep_s=60).observe(NOW + 5, 2)

    assert history.changes == ()


def test_what_is_older_than_anybody_looks_back_is_forgotten() -> None:
    history = History().observe(NOW, 1).observe(NOW + 1, 2).remember(NOW + 1, 2, keep_s=60)

    later = history.remember(NOW + 62, 3, keep_s=60)

    assert (later.wishes, later.changes) == (((NOW + 62, 3),), ())


@pytest.mark.parametrize("jump_s", [-86_400.0, -1.0, LONGEST_GAP_S + 1, 86_400.0])
def test_time_that_nobody_watched_makes_nothing_older(jump_s: float) -> None:
    """A clock that is set, or a process that stood still."""
    history = History(wishes=((NOW - 10, 4),), changes=((NOW - 20, 1),), drain=(NOW - 30, 1.5), seen=(NOW, 4))

    jumped = history.observe(NOW + jump_s, 4)

    assert jumped.wishes == ((NOW + jump_s - 10, 4),)
    assert jumped.changes == ((NOW + jump_s - 20, 1),)
    assert jumped.drain == (NOW + jump_s - 30, 1.5)


def test_a_slow_tick_is_no_jump() -> None:
    history = History(wishes=((NOW - 10, 4),), seen=(NOW, 4))

    assert history.observe(NOW + LONGEST_GAP_S, 4).wishes == ((NOW - 10, 4),)
