from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest

from llmservice_bench.plots import Point, draw, draw_sweep, frontier
from llmservice_bench.record import LatencyTargets

MACHINE = {"processor": "EPYC", "cpus": 2}


def results(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"name": name, "machine": MACHINE, "settings": {"model": "toy"}, "rows": rows}


def sweep_row(concurrency: int | None, rate: float | None, tokens: float, ttft: float) -> dict[str, Any]:
    latencies = {f"{name}_{p}_ms": ttft * (2 if p == "p99" else 1) for name in ("ttft", "itl") for p in ("p50", "p99")}
    return {"concurrency": concurrency, "rate": rate, "output_tokens_per_s": tokens, **latencies}


PEERS = [
    {"peer": peer, "dtype": dtype, "in_flight": in_flight, "output_tokens_per_s": 10.0 * in_flight}
    for peer in ("ours", "llama.cpp")
    for dtype in ("float32", "bfloat16")
    for in_flight in (32, 1)
]
STRATEGIES = [
    {"load": "continuous, all at once", "output_tokens_per_s": 999.0, "ttft_p99_ms": 1000.0},
    {"load": "continuous", "output_tokens_per_s": 800.0, "ttft_p99_ms": 90.0, "target_ms": 250.0},
    {"load": "static", "output_tokens_per_s": 150.0, "ttft_p99_ms": 240.0, "target_ms": 250.0},
]
SWEEP = [sweep_row(1, None, 50.0, 5.0), sweep_row(64, None, 900.0, 80.0), sweep_row(None, 9.0, 800.0, 300.0)]


def texts(svg: str) -> list[str]:
    root = ElementTree.fromstring(svg)  # noqa: S314 - our own
    return [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (results("compare_amx", PEERS), {"bfloat16, 32 in flight", "float32, alone", "llama.cpp", "320", "10"}),
        (results("strategies", STRATEGIES), {"target: 250 ms", "continuous", "static"}),
    ],
    ids=["compare", "strategies"],
)
def test_plot_shows_names_and_figures(content: dict[str, Any], expected: set[str]) -> None:
    svg = draw(content)
    assert svg is not None
    assert expected <= set(texts(svg))


def test_runs_without_a_target_are_no_series_of_the_capacity_plot() -> None:
    svg = draw(results("strategies", STRATEGIES))
    assert svg is not None
    assert "continuous, all at once" not in texts(svg)


def test_sweep_has_both_metrics_percentiles_and_kinds_of_load() -> None:
    shown = texts(draw_sweep(SWEEP, "a <machine> & more", LatencyTargets(ttft_s=0.25)))
    series = {f"{loops} loops, {percentile}" for loops in ("closed", "open") for percentile in ("p50", "p99")}
    assert {"Time to first token, ms", "Inter-token latency, ms", "target: 250 ms", *series} <= set(shown)
    assert any(text.startswith("a <machine> & more.") for text in shown)
    assert shown.count("64") == 2, "each panel labels the closed loops with their concurrency"


def test_same_rows_give_the_same_file() -> None:
    assert draw(results("compare_amx", PEERS)) == draw(results("compare_amx", PEERS))


def test_benchmark_without_a_plot_or_without_rows_has_none() -> None:
    assert draw(results("micro_step", [{"a": 1}])) is None
    assert draw(results("compare_amx", [])) is None
    assert draw(results("strategies", STRATEGIES[:1])) is None


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
def test_capacity_line_has_the_runs_that_no_other_beats_in_both(points: list[Point], best: list[Point]) -> None:
    assert frontier(points) == best


def test_autoscaling_has_a_panel_for_each_startup_time_and_a_colour_for_each_policy() -> None:
    rows = [
        {
            "traffic": "step",
            "startup_s": startup_s,
            "builtin_kept": 99.0,
            "builtin_gpu": 1.2,
            "kpa_kept": 90.0,
            "kpa_gpu": 1.1,
        }
        for startup_s in (30.0, 600.0)
    ]
    svg = draw(results("autoscaling", rows))
    assert svg is not None
    shown = texts(svg)
    assert {"% within the target, start-up 30 s", "% within the target, start-up 600 s", "builtin", "kpa"} <= set(shown)
