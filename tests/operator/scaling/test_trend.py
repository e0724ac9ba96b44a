from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmservice_operator.scaling.demand import SAMPLE_S, Cost, Demand, mean
from llmservice_operator.scaling.trend import is_burst, is_growing, remembered, trend

NOW = 10_000.0
COST = Cost(request_s=0.0, prompt_token_s=1e-4, output_token_s=1e-3)
"""0.2 seconds of a replica for a request of 1000 prompt and 100 output tokens."""


def demand(requests: float) -> Demand:
    return Demand(requests, 1000 * requests, 100 * requests)


def history(*rates: float) -> list[tuple[float, Demand]]:
    """One sample for each rate, the last one now."""
    return [(NOW - SAMPLE_S * back, demand(rate)) for back, rate in enumerate(reversed(rates))][::-1]


@pytest.mark.parametrize(
    ("rates", "grows"),
    [
        pytest.param([20] * 8, False, id="constant"),
        pytest.param([20, 21, 19, 20, 21, 20, 22, 20], False, id="chance"),
        pytest.param([40, 40, 40, 40, 20, 20, 20, 20], False, id="falling"),
        pytest.param([20, 22, 24, 26, 28, 30, 32, 34], True, id="growing"),
        pytest.param([20, 22, 24], False, id="too short a history"),
    ],
)
def test_growth_beyond_chance_is_a_trend(rates: list[float], grows: bool) -> None:
    assert (trend(history(*rates), COST, 30.0, NOW) is not None) == grows


def test_a_trend_extrapolates_less_the_farther_it_reaches_and_never_beyond_twice_the_load() -> None:
    found = trend(history(20, 24, 28, 32, 36, 40, 44, 48), COST, 30.0, NOW)

    assert found is not None
    linear = 0.2 * 4 / SAMPLE_S
    assert 0.5 * linear < found.per_s <= linear  # what chance may explain is not counted
    near, far = found.after(10) - found.level, found.after(60) - found.level
    assert near < far < 6 * near
    assert found.after(10_000) <= 2 * found.level
    assert found.after(10, found.level + 1) == pytest.approx(found.after(10) + 1)
    assert found.after(10, found.level - 1) == found.after(10)
    assert found.after(10, 9 * found.level) == 2 * found.level


def test_slow_growth_shows_over_a_longer_time() -> None:
    rates = [20 + 0.2 * number for number in range(40)]

    found = trend(history(*rates), COST, 60.0, NOW)

    assert found is not None
    assert found.over_s == 300
    assert trend(history(*rates[-16:]), COST, 60.0, NOW) is None


def test_a_trend_starts_from_no_more_than_the_last_minute_and_chance() -> None:
    rates = [10] * 20 + [40] * 20

    found = trend(history(*rates), COST, 60.0, NOW)

    assert found is not None
    assert found.over_s == 300
    last = history(40)[0][1]
    assert found.level == pytest.approx(COST.replicas(last) + COST.deviation(last, 60))


@pytest.mark.parametrize(
    ("rates", "horizon_s"),
    [
        pytest.param([10] * 20 + [40] * 16 + [15] * 4, 60.0, id="it has ended: the last minute is far below"),
        pytest.param([0.05] * 4 + [0.45] * 4, 60.0, id="27 requests"),
        pytest.param([20] * 4 + [40] * 4, 600.0, id="of one minute, for ten"),
    ],
)
def test_a_growth_that_is_no_trend(rates: list[float], horizon_s: float) -> None:
    assert trend(history(*rates), COST, horizon_s, NOW) is None


def test_a_likely_growth_is_less_than_a_trend() -> None:
    samples = history(*[20] * 4, *[22] * 4)

    assert is_growing(samples, COST, NOW)
    assert trend(samples, COST, 60.0, NOW) is None
    assert not is_growing(history(*[20] * 8), COST, NOW)
    assert not is_growing(samples, COST, NOW, since_s=NOW - 50)


def test_a_burst_is_no_trend() -> None:
    rates = [20] * 4 + [40] * 4

    assert trend(history(*rates), COST, 60.0, NOW) is not None
    assert trend(history(*rates), COST, 60.0, NOW, since_s=NOW - 50) is None


@pytest.mark.parametrize(
    ("before", "recent", "is_one"),
    [
        pytest.param([20, 20, 20, 20], 40, True, id="twice the load"),
        pytest.param([20, 20, 20, 20], 24, False, id="a little more"),
        pytest.param([1, 1, 1, 1], 2, False, id="a few requests more than a few"),
        pytest.param([0, 0, 0, 0], 2, True, id="thirty after none"),
        pytest.param([0.1, 0.1, 0.1, 0.1], 1, True, id="fifteen after one or two"),
        pytest.param([0, 0, 0, 0], 0.2, False, id="three after none"),
        pytest.param([1], 40, False, id="too little to compare with"),
    ],
)
def test_a_burst_is_a_jump_beyond_chance(before: list[float], recent: float, is_one: bool) -> None:
    samples = [(when - SAMPLE_S, one) for when, one in history(*before)]

    assert is_burst(demand(recent), samples, COST, 60.0, NOW) == is_one


@given(rates=st.lists(st.floats(0, 100), min_size=2, max_size=24), more=st.floats(0, 100))
def test_more_demand_now_never_predicts_less(rates: list[float], more: float) -> None:
    def predicted(last: float) -> float:
        samples = history(*rates[:-1], last)
        found = trend(samples, COST, 60.0, NOW)
        level = COST.replicas(mean([one for when, one in samples if when > NOW - 60]))
        return max(level, found.after(60.0) if found else 0.0)

    assert predicted(rates[-1] + more) >= predicted(rates[-1]) - 1e-9


@given(rates=st.lists(st.floats(0, 100), min_size=1, max_size=5), recent=st.floats(0, 100), more=st.floats(0, 100))
def test_more_demand_is_no_less_a_burst(rates: list[float], recent: float, more: float) -> None:
    samples = [(when - SAMPLE_S, one) for when, one in history(*rates)]

    if is_burst(demand(recent), samples, COST, 60.0, NOW):
        assert is_burst(demand(recent + more), samples, COST, 60.0, NOW)


def test_samples_are_kept_for_ten_minutes_at_most_one_for_each_quarter_of_a_minute() -> None:
    samples: tuple[tuple[float, Demand], ...] = ()
    for tick in range(400):
        samples = remembered(samples, demand(tick), tick * 5.0)

    times = [when for when, _ in samples]
    assert 570 <= times[-1] - times[0] <= 600
    assert {later - earlier for earlier, later in pairwise(times)} == {SAMPLE_S}
