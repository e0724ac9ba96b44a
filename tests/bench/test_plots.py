from __future__ import annotations

from typing import Any

import pytest

from llmservice_bench.plots import draw

MACHINE = {"processor": "EPYC", "cpus": 2}


def results(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"name": name, "machine": MACHINE, "settings": {"model": "toy"}, "rows": rows}


PEERS = [
    {"peer": peer, "dtype": dtype, "in_flight": in_flight, "output_tokens_per_s": 10.0 * in_flight}
    for peer in ("ours", "llama.cpp")
    for dtype in ("float32", "bfloat16")
    for in_flight in (32, 1)
]
STRATEGIES = [
    {"load": "continuous, all at once", "output_tokens_per_s": 999.0, "ttft_p99_ms": 1000.0},
    {"load": "continuous", "output_tokens_per_s": 800.0, "ttft_p99_ms": 90.0, "promise_ms": 250.0},
    {"load": "static", "output_tokens_per_s": 150.0, "ttft_p99_ms": 240.0, "promise_ms": 250.0},
]


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        (results("compare", PEERS), ["bfloat16, 32 in flight", "float32, alone", "llama.cpp", "320", "10"]),
        (results("strategies", STRATEGIES), ["promised: 250 ms", "continuous", "static"]),
    ],
    ids=["compare", "strategies"],
)
def test_plot_shows_each_name_with_its_figures(content: dict[str, Any], texts: list[str]) -> None:
    svg = draw(content)
    assert svg is not None
    assert [text for text in texts if f">{text}</text>" not in svg] == []


def test_what_came_all_at_once_is_no_point_of_a_strategys_line() -> None:
    svg = draw(results("strategies", STRATEGIES))
    assert svg is not None
    assert (svg.count("<polyline"), svg.count("<circle")) == (2, 2)


def test_benchmark_without_a_plot_or_without_rows_has_none() -> None:
    assert draw(results("micro_step", [{"a": 1}])) is None
    assert draw(results("compare", [])) is None
    assert draw(results("strategies", STRATEGIES[:1])) is None
