from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

from llmservice_bench.curve import draw_curve
from llmservice_bench.goodput import Promises


def row(concurrency: int | None, rate: float | None, tokens: float, ttft: float) -> dict[str, Any]:
    latencies = {f"{name}_{p}_ms": ttft * (2 if p == "p99" else 1) for name in ("ttft", "itl") for p in ("p50", "p99")}
    return {"concurrency": concurrency, "rate": rate, "output_tokens_per_s": tokens, **latencies}


ROWS = [row(1, None, 50.0, 5.0), row(64, None, 900.0, 80.0), row(None, 9.0, 800.0, 300.0), row(None, 2.0, 200.0, 6.0)]


def drawn(svg: str) -> tuple[list[str], int]:
    """The texts, and the number of lines with data."""
    root = ElementTree.fromstring(svg)  # noqa: S314 - our own
    space = "{http://www.w3.org/2000/svg}"
    return [element.text or "" for element in root.iter(f"{space}text")], len(list(root.iter(f"{space}polyline")))


def test_curve_shows_both_metrics_both_percentiles_and_both_kinds_of_load() -> None:
    texts, lines = drawn(draw_curve(ROWS, "a <machine> & more", Promises(ttft_s=0.25)))
    assert lines == 8
    assert {"time to first token, ms", "inter-token latency, ms", "promised: 250 ms"} <= set(texts)
    assert any(text.startswith("a <machine> & more. Closed loops") for text in texts)
    assert texts.count("64") == 2, "a closed loop's concurrency stands at its p99, in either panel"


def test_open_loops_are_joined_in_the_order_of_their_rates() -> None:
    svg = draw_curve(ROWS, "")
    paths = [line for line in svg.splitlines() if line.startswith("<polyline")]
    for line in paths:
        xs = [float(corner.split(",")[0]) for corner in line.split('"')[1].split()]
        assert xs == sorted(xs)


def test_metric_that_nobody_measured_is_said_so() -> None:
    silent = [{**each, "itl_p50_ms": 0.0, "itl_p99_ms": 0.0} for each in ROWS]
    texts, lines = drawn(draw_curve(silent, ""))
    assert lines == 4
    assert "inter-token latency, ms: nothing was measured" in texts
