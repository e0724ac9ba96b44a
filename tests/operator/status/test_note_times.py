from __future__ import annotations

import pytest

from llmservice_operator.status.note_times import NoteTimes, Noting

NOW = 1_700_000_000.0
RESUMING = Noting(due=False, whole=False, resuming=True)


def test_a_new_services_figures_are_noted_at_once_and_then_now_and_then() -> None:
    times = NoteTimes(NOW, resumed=False)

    assert [times.noting(NOW + passed_s, window_s=60).due for passed_s in (0, 5, 10, 15, 20, 30)] == [
        True,
        False,
        False,
        True,
        False,
        True,
    ]
    assert times.noting(NOW + 31, window_s=60).whole


@pytest.mark.parametrize(
    ("passed_s", "expected"),
    [
        pytest.param(0, RESUMING, id="the first look"),
        pytest.param(14, RESUMING, id="the second and third"),
        pytest.param(15, Noting(whole=False), id="figures that are there are news"),
        pytest.param(60, Noting(), id="figures that are not there are news as well"),
        pytest.param(-3600, Noting(), id="a clock that is set keeps nothing back for ever"),
    ],
)
def test_a_restart_takes_its_time_before_it_tells_anything_new(passed_s: float, expected: Noting) -> None:
    assert NoteTimes(NOW, resumed=True).noting(NOW + passed_s, window_s=60) == expected
