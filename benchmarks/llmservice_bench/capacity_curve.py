"""What a promise costs each strategy in throughput: the most that it was seen to yield within a p99 TTFT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from llmservice_bench import svg
from llmservice_bench.line_chart import Panel, Series, line_chart

Row = Mapping[str, Any]
Point = tuple[float, float]
"""Output tokens per second, p99 TTFT in milliseconds."""
LEGEND = "What lies below a dotted line keeps that promise."


def draw_capacities(rows: Sequence[Row], subtitle: str) -> str:
    """A line a strategy (`load`), through the best of the runs that searched what it bears within `promise_ms`."""
    strategies = dict.fromkeys(row["load"] for row in rows)
    series = [
        Series(name, frontier([_point(row) for row in rows if row["load"] == name]), colour)
        for name, colour in zip(strategies, svg.COLOURS, strict=False)
    ]
    bounds = {f"promised: {bound:.0f} ms": bound for bound in dict.fromkeys(row["promise_ms"] for row in rows)}
    panel = Panel("p99 time to first token, ms", "output tokens per second", series, bounds, bounds_labelled_at=0.4)
    return line_chart("Throughput within a promise", f"{LEGEND} {subtitle}", [panel])


def frontier(points: Sequence[Point]) -> list[Point]:
    """Those that no other one beats in both throughput and latency, from the least of both to the most."""
    by_latency = sorted(points, key=lambda point: (point[1], -point[0]))
    best = accumulate((tokens for tokens, _ in by_latency), max, initial=0.0)
    return [point for point, before in zip(by_latency, best, strict=False) if point[0] > before]


def _point(row: Row) -> Point:
    return row["output_tokens_per_s"], row["ttft_p99_ms"]
