"""The roofline says what bounds a step."""

import pytest
import torch

from llmservice_bench.profile.ceilings import Ceilings

CEILINGS = Ceilings(bandwidth_bytes_per_s=40e9, flops=800e9, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("num_bytes", "operations", "expected"),
    [
        (40e9, 1e9, (1.0, "memory")),
        (1e9, 1600e9, (2.0, "compute")),
        (1e9, 19e9, (1 / 40, "memory")),
        (1e9, 21e9, (21 / 800, "compute")),
    ],
)
def test_the_slower_of_reading_and_computing_bounds(
    num_bytes: float, operations: float, expected: tuple[float, str]
) -> None:
    assert CEILINGS.seconds(num_bytes, operations) == (pytest.approx(expected[0]), expected[1])


def test_the_ridge_is_where_both_take_as_long() -> None:
    assert CEILINGS.ridge == pytest.approx(20)
    assert CEILINGS.ridge_rows == pytest.approx(20)  # two operations and two bytes for each weight
    assert CEILINGS.seconds(1e9, CEILINGS.ridge * 1e9)[0] == pytest.approx(1e9 / 40e9)


def test_the_better_of_two_measurements_counts() -> None:
    faster = Ceilings(bandwidth_bytes_per_s=50e9, flops=700e9, dtype=torch.bfloat16)
    assert CEILINGS.or_better(faster) == Ceilings(50e9, 800e9, torch.bfloat16)
