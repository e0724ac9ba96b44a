"""Lengths from percentiles: log-normal, and independent of each other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmservice_planner.traffic.lengths import Lengths, LengthsError, pairs, percentile


@given(st.floats(1, 1e5), st.floats(1, 30))
def test_points_have_the_given_percentiles(p50: float, ratio: float) -> None:
    points = Lengths(p50, p50 * ratio).points()
    assert points == sorted(points)
    assert percentile(points, 0.5) == pytest.approx(p50, rel=0.01)
    assert percentile(points, 0.99) == pytest.approx(p50 * ratio, rel=0.05)


def test_prompts_and_outputs_are_independent() -> None:
    found = pairs(Lengths(500, 4000), Lengths(100, 900))
    long = [output for prompt, output in found if prompt > 1000]
    assert sum(long) / len(long) == pytest.approx(sum(output for _, output in found) / len(found), rel=0.1)
    assert len({output for _, output in found}) == len(found)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("p50=512,p99=4096", Lengths(512, 4096)),
        ("p99=4096, p50=512", Lengths(512, 4096)),
        ("512", Lengths(512, 512)),
    ],
)
def test_lengths_are_parsed(text: str, expected: Lengths) -> None:
    assert Lengths.parse(text) == expected


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "expected p50=512,p99=4096"),
        ("p50=512", "expected p50=512,p99=4096"),
        ("p50=512,p99=4096,p95=1", "expected p50=512,p99=4096"),
        ("512,4096", "'512,4096' is no length in tokens"),
        ("p50=512,p99=4096,p99=5000", "expected p50=512,p99=4096"),
        ("many", "'many' is no length in tokens"),
        ("p50=4096,p99=512", "p99 not below it"),
        ("0", "p50 of at least 1"),
        ("nan", "p50 of at least 1"),
        ("p50=1,p99=inf", "p99 not below it"),
        ("1e300", r"at most 10\*\*9"),
    ],
)
def test_other_lengths_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(LengthsError, match=complaint):
        Lengths.parse(text)


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1), (0.1, 1), (0.11, 2), (0.5, 5), (0.99, 10), (1.0, 10)])
def test_percentile_is_the_smallest_that_the_share_does_not_exceed(share: float, expected: int) -> None:
    assert percentile(list(range(1, 11)), share) == expected
