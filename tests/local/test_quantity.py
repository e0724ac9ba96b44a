from __future__ import annotations

from fractions import Fraction

import pytest

from llmservice_local.quantity import parse


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", 1), (2, 2), ("500m", Fraction(1, 2)), ("1.5", Fraction(3, 2)), (".5", Fraction(1, 2)),
        ("1k", 1000), ("2M", 2_000_000), ("1Ki", 1024), ("1e3", 1000), ("1E", 10**18), ("-1", -1),
        ("4Gi", 4 * 1024**3), ("100n", Fraction(1, 10**7)),
    ],
)  # fmt: skip
def test_quantity_is_exact(text: str | int, expected: Fraction) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize("text", ["", "x", "1 Gi", "1gi", "1KB", "--1", "1e", "0x10"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no quantity"):
        parse(text)
