from __future__ import annotations

import pytest

from llmservice_bench.capacity_curve import Point, draw_capacities, frontier

ROWS = [
    {"load": load, "promise_ms": promise_ms, "output_tokens_per_s": tokens, "ttft_p99_ms": ttft}
    for load, promise_ms, tokens, ttft in (
        ("continuous", 90.0, 5000.0, 40.0),
        ("static", 90.0, 80.0, 85.0),
        ("continuous", 450.0, 6000.0, 300.0),
        ("static", 450.0, 2000.0, 440.0),
    )
]


@pytest.mark.parametrize(
    ("points", "best"),
    [
        ([(80.0, 90.0), (20.0, 30.0)], [(20.0, 30.0), (80.0, 90.0)]),
        ([(80.0, 30.0), (20.0, 90.0)], [(80.0, 30.0)]),
        ([(20.0, 30.0), (20.0, 90.0)], [(20.0, 30.0)]),
        ([(20.0, 30.0), (25.0, 30.0)], [(25.0, 30.0)]),
        ([], []),
    ],
    ids=["both", "less at a higher latency", "the same at a higher one", "more at the same one", "none"],
)
def test_line_is_drawn_through_runs_that_none_beats_in_both(points: list[Point], best: list[Point]) -> None:
    assert frontier(points) == best


def test_each_strategy_has_a_line_and_each_promise_a_dotted_one() -> None:
    svg = draw_capacities(ROWS, "a <machine>")
    assert (svg.count("<polyline"), svg.count("<circle"), svg.count('stroke-dasharray="2 4"')) == (2, 4, 2)
    texts = ["continuous", "static", "promised: 90 ms", "promised: 450 ms"]
    assert [text for text in texts if f">{text}</text>" not in svg] == []
    assert "a &lt;machine&gt;" in svg
