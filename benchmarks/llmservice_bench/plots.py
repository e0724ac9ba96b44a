"""Which benchmark's rows are drawn, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llmservice_bench.bar_chart import Group, bar_chart
from llmservice_bench.curve import draw_curve
from llmservice_bench.goodput import Promises

Content = Mapping[str, Any]
"""Of a results file."""

CAPACITY = ", capacity at p99 TTFT"
"""Between a strategy's name and the bound, in what strategies.py calls a row."""


def draw(content: Content) -> str | None:
    """The SVG of a benchmark's results; None for one that only has tables."""
    plot = PLOTS.get(content["name"])
    return plot(content) if plot and content["rows"] else None


def _where(content: Content) -> str:
    machine = content["machine"]
    return f"{machine['processor']}, {machine['cpus']} CPUs"


def _serve(content: Content) -> str:
    promised = content["settings"].get("goodput")
    promises = Promises.parse(promised.split()) if promised else None
    return draw_curve(content["rows"], f"{content['settings']['model']} over HTTP, {_where(content)}", promises)


def _compare(content: Content) -> str:
    rows: Sequence[Mapping[str, Any]] = content["rows"]
    groups: dict[str, dict[str, float]] = {}
    for row in rows:
        title = f"{row['dtype']}, {row['in_flight']} in flight" if row["in_flight"] > 1 else f"{row['dtype']}, alone"
        groups.setdefault(title, {})[row["peer"]] = row["output_tokens_per_s"]
    title = "Useful output tokens per second, same weights and requests"
    return bar_chart(title, _where(content), [Group(*group) for group in sorted(groups.items())], "ours")


def _strategies(content: Content) -> str | None:
    """Of the rows that tell how much a strategy bears before its p99 TTFT passes the common bound."""
    named = {row["load"]: row["output_tokens_per_s"] for row in content["rows"] if CAPACITY in row["load"]}
    if not named:
        return None
    bound = next(iter(named)).partition(CAPACITY)[2]
    bars = {load.partition(CAPACITY)[0]: tokens for load, tokens in named.items()}
    title = "Output tokens per second at equal p99 TTFT"
    return bar_chart(title, _where(content), [Group(f"p99 TTFT{bound}", bars)], "continuous")


PLOTS: dict[str, Callable[[Content], str | None]] = {"serve": _serve, "compare": _compare, "strategies": _strategies}
