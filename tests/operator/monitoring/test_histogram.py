from __future__ import annotations

import math

import pytest

from llmservice_operator.monitoring.histogram import increase, quantile


@pytest.mark.parametrize(
    ("values", "expected"), [([], 0), ([5], 0), ([1, 4, 9], 8), ([7, 9, 2, 3], 2 + 2 + 1), ([3, 0], 0)]
)
def test_a_counter_that_drops_was_restarted_at_zero(values: list[float], expected: float) -> None:
    assert increase(values) == expected


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.5, 0.1), (0.25, 0.05), (0.75, 0.1 + 0.9 * 0.5), (1.0, 1.0)],
)
def test_a_quantile_is_linear_within_its_bucket(share: float, expected: float) -> None:
    assert quantile(share, {0.1: 10, 1.0: 20, math.inf: 20}) == pytest.approx(expected)


def test_beyond_the_last_bound_the_quantile_is_that_bound() -> None:
    assert quantile(0.99, {0.1: 1, 1.0: 2, math.inf: 100}) == 1.0


@pytest.mark.parametrize("buckets", [{}, {0.1: 0.0, math.inf: 0.0}])
def test_without_observations_there_is_no_quantile(buckets: dict[float, float]) -> None:
    assert quantile(0.99, buckets) is None
