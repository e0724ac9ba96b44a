from __future__ import annotations

from fractions import Fraction

import pytest

from llmservice_operator.api.units import amount, seconds, whole_bytes


@pytest.mark.parametrize(
    ("text", "expected"), [("80ms", 0.08), ("2s", 2.0), ("1.5s", 1.5), ("5m", 300.0), ("1h", 3600.0), ("0s", 0.0)]
)
def test_a_duration_is_parsed_in_seconds(text: str, expected: float) -> None:
    assert seconds(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["", "5", "s", "-1s", "1d", "1e3s", " 2s", "2s\n", "٣s"])
def test_an_invalid_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="such as 80ms"):
        seconds(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", 1), (2, 2), ("500m", Fraction(1, 2)), ("1.5", Fraction(3, 2)), (".5", Fraction(1, 2)),
        ("1k", 1000), ("2M", 2_000_000), ("1Ki", 1024), ("1e3", 1000), ("1E", 10**18), ("-1", -1),
        ("4Gi", 4 * 1024**3), ("100n", Fraction(1, 10**7)),
    ],
)  # fmt: skip
def test_a_quantity_is_parsed_exactly(text: str | int, expected: Fraction) -> None:
    assert amount(text) == expected


def test_memory_is_rounded_down_to_whole_bytes() -> None:
    assert whole_bytes("0.3Ki") == 307


@pytest.mark.parametrize("text", ["", "x", "Gi", "1 Gi", "1gi", "1GiB", "--1", "1e", "0x10", "1\n", "٣"])
def test_an_invalid_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        amount(text)
