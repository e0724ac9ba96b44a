from __future__ import annotations

from fractions import Fraction

import pytest

from llmservice_operator.api import quantity


@pytest.mark.parametrize(
    ("text", "expected"),
    [("500m", Fraction(1, 2)), ("4", 4), ("1.5", Fraction(3, 2)), ("2k", 2000), ("1Ki", 1024), ("32Gi", 32 * 2**30)],
)
def test_a_quantity_is_read_exactly(text: str, expected: Fraction) -> None:
    assert quantity.amount(text) == expected


def test_memory_is_rounded_down_to_whole_bytes() -> None:
    assert quantity.whole_bytes("0.3Ki") == 307


@pytest.mark.parametrize("text", ["", "Gi", "1GiB", "-1", "1 Gi", "1E5"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a quantity"):
        quantity.amount(text)
