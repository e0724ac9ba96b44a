import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmservice_bench.simulation.latencies import GapHistogram

gaps = st.floats(1e-4, 10.0)


@given(values=st.lists(gaps, min_size=1, max_size=200), share=st.sampled_from([0.5, 0.9, 0.99]))
def test_a_percentile_is_within_half_a_per_cent_of_the_nearest_rank(values: list[float], share: float) -> None:
    histogram = GapHistogram()
    for value in values:
        histogram.add(value)
    exact = sorted(values)[math.ceil(share * len(values)) - 1]
    assert histogram.percentile(share) == pytest.approx(exact, rel=0.005)
    assert histogram.total == len(values)


@given(first=gaps, growth=st.floats(1.0, 1.5), steps=st.integers(1, 60), each=st.integers(1, 9))
def test_a_ramp_is_its_steps(first: float, growth: float, steps: int, each: int) -> None:
    ramp, single = GapHistogram(), GapHistogram()
    last = first * growth if steps > 1 else first
    ramp.add_ramp(first, last, steps, each)
    for step in range(steps):
        single.add(first + step * (last - first) / max(1, steps - 1), each)
    assert ramp.total == single.total
    assert ramp.percentile(0.5) == pytest.approx(single.percentile(0.5), rel=0.01)


def test_there_is_no_percentile_of_nothing() -> None:
    assert GapHistogram().percentile(0.99) is None
