from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmservice_bench.rate_search import RateSearch


def found(search: RateSearch, capacity: float) -> tuple[RateSearch, list[float]]:
    """Run the search against a server that keeps its promise up to `capacity`."""
    tried = []
    while (rate := search.next_rate) is not None:
        tried.append(rate)
        search = search.told(rate, rate <= capacity)
    return search, tried


@given(capacity=st.floats(0.1, 1000.0), start=st.floats(0.1, 1000.0), tolerance=st.floats(0.01, 0.5))
def test_search_ends_within_its_tolerance_of_the_truth(capacity: float, start: float, tolerance: float) -> None:
    search, tried = found(RateSearch(start, tolerance), capacity)
    assert search.is_settled
    assert search.kept <= capacity < search.broken
    assert search.broken <= search.kept * (1 + tolerance) * (1 + 1e-9)
    assert len(tried) < 40


@given(capacity=st.floats(0.1, 1000.0), start=st.floats(0.1, 1000.0))
def test_no_rate_is_tried_whose_fate_is_known(capacity: float, start: float) -> None:
    search = RateSearch(start)
    while (rate := search.next_rate) is not None:
        assert search.kept < rate < search.broken
        search = search.told(rate, rate <= capacity)


@given(runs=st.lists(st.tuples(st.floats(0.1, 100.0), st.booleans()), max_size=8), answers=st.randoms())
def test_search_ends_however_runs_contradict_each_other(runs: list[tuple[float, bool]], answers: random.Random) -> None:
    search = RateSearch(5.0, floor=0.01)
    for rate, kept in runs:
        search = search.told(rate, kept)
        assert 0 <= search.kept < search.broken
    for _ in range(60):
        if (rate := search.next_rate) is None or rate > 1e6:
            break
        search = search.told(rate, answers.random() < 0.5)
    else:
        pytest.fail(f"still searching: {search}")


def test_good_guess_is_quickly_confirmed() -> None:
    assert found(RateSearch(10.0, 0.1), 10.5)[1] == [10.0, 15.0, 12.5, 11.25, 10.625]


def test_server_that_keeps_no_promise_ends_the_search_at_the_floor() -> None:
    search, tried = found(RateSearch(8.0, floor=1.0), capacity=0.0)
    assert tried == [8.0, 4.0, 2.0, 1.0]
    assert (search.kept, search.is_settled) == (0.0, False)


@pytest.mark.parametrize("fields", [{"start": 0.0}, {"start": 1.0, "tolerance": 0.0}])
def test_search_that_cannot_end_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="above 0"):
        RateSearch(**fields)
