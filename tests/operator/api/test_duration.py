from __future__ import annotations

import pytest

from llmservice_operator.api import duration


@pytest.mark.parametrize(
    ("text", "expected"), [("80ms", 0.08), ("2s", 2.0), ("1.5s", 1.5), ("5m", 300.0), ("1h", 3600.0), ("0s", 0.0)]
)
def test_a_duration_is_read_in_seconds(text: str, expected: float) -> None:
    assert duration.seconds(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["", "5", "s", "-1s", "1d", "1e3s", " 2s", "2s\n", "٣s"])
def test_what_is_no_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="such as 80ms"):
        duration.seconds(text)
