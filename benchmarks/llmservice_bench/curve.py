"""The throughput-latency curve of a sweep, drawn from its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmservice_bench import svg
from llmservice_bench.goodput import Promises
from llmservice_bench.line_chart import Panel, Series, line_chart

Row = Mapping[str, Any]
METRICS = {"ttft": "time to first token, ms", "itl": "inter-token latency, ms"}
CLOSED, OPEN = svg.COLOURS[0], svg.COLOURS[1]
LEGEND = "Closed loops: as many requests at once as stands there. Open loops: requests at random times."


def draw_curve(rows: Sequence[Row], subtitle: str, promises: Promises | None = None) -> str:
    """Latency over throughput, one panel a metric: closed loops by their concurrency, open ones by their rate."""
    closed = [row for row in rows if row["concurrency"] is not None]
    opened = sorted((row for row in rows if row["rate"] is not None), key=lambda row: float(row["rate"]))
    panels = []
    for metric, title in METRICS.items():
        promised_s: float | None = getattr(promises, f"{metric}_s", None)
        series = [*_lines(closed, metric, "closed", CLOSED), *_lines(opened, metric, "open", OPEN)]
        bounds = {f"promised: {promised_s * 1000:g} ms": promised_s * 1000} if promised_s else {}
        panels.append(Panel(title, "output tokens per second", series, bounds))
    return line_chart("Throughput and latency", f"{subtitle}. {LEGEND}", panels)


def _lines(rows: Sequence[Row], metric: str, name: str, colour: str) -> list[Series]:
    def through(percentile: str) -> list[tuple[float, float]]:
        return [(row["output_tokens_per_s"], row[f"{metric}_{percentile}_ms"]) for row in rows]

    marks = [str(row["concurrency"]) for row in rows if row["concurrency"] is not None]
    return [
        Series(f"{name} p99", through("p99"), colour, marks=marks),
        Series(f"{name} p50", through("p50"), colour, dashed=True),
    ]
