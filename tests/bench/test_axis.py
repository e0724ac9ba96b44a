from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmservice_bench.axis import Axis, tick_label

values = st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=20)


@given(values, st.booleans())
def test_every_value_and_every_tick_has_a_place_between_the_ends(given: list[float], log: bool) -> None:
    axis = Axis.around(given, 0.0, 100.0, log=log)
    ticks = axis.ticks()
    assert 2 <= len(ticks) <= 13
    for value in [*given, *ticks]:
        assert -1e-6 <= axis.place(value) <= 100 + 1e-6
    assert ticks == sorted(ticks)


def test_logarithmic_axis_gives_equal_room_to_equal_ratios() -> None:
    axis = Axis(1.0, 100.0, 0.0, 200.0, log=True)
    assert [axis.place(value) for value in (1.0, 10.0, 100.0)] == pytest.approx([0.0, 100.0, 200.0])
    assert axis.ticks() == pytest.approx([1, 2, 5, 10, 20, 50, 100])


def test_axis_downwards_is_what_paper_needs() -> None:
    assert Axis(0.0, 4.0, 300.0, 100.0).place(1.0) == 250.0


@pytest.mark.parametrize(("low", "high", "log"), [(1.0, 1.0, False), (0.0, 5.0, True)])
def test_axis_that_spans_nothing_is_refused(low: float, high: float, log: bool) -> None:
    with pytest.raises(ValueError, match="no axis"):
        Axis(low, high, 0.0, 1.0, log=log)


def test_ticks_are_written_short() -> None:
    assert [tick_label(value) for value in (0.5, 20.0, 5000.0)] == ["0.5", "20", "5k"]
