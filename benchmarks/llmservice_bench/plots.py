"""Which benchmark's rows are drawn, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llmservice_bench.bar_chart import Group, bar_chart
from llmservice_bench.capacity_curve import draw_capacities
from llmservice_bench.curve import draw_curve
from llmservice_bench.goodput import Promises

Content = Mapping[str, Any]
"""Of a results file."""


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
    rows = [row for row in content["rows"] if "promise_ms" in row]
    return draw_capacities(rows, f"{content['settings']['model']}, {_where(content)}") if rows else None


PLOTS: dict[str, Callable[[Content], str | None]] = {"serve": _serve, "compare": _compare, "strategies": _strategies}
