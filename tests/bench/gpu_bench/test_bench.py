"""The environment of the sections."""

import math

import pytest

from gpu_bench.bench import larger_error


@pytest.mark.parametrize(
    ("one", "other", "larger"),
    [(0.1, 0.2, 0.2), (0.2, 0.1, 0.2), (0.1, math.nan, math.inf), (math.nan, 0.1, math.inf), (math.inf, 0.1, math.inf)],
)
def test_an_error_that_is_no_number_is_the_largest(one: float, other: float, larger: float) -> None:
    assert larger_error(one, other) == larger
