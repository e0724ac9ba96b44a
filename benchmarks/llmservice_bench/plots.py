"""The plots of benchmark results as SVG, drawn with matplotlib. The same rows give the same file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from llmservice_bench.record import LatencyTargets
from llmservice_bench.results import figure as number
from llmservice_planner.charts import COLOURS, GREY, INK, PALE, entitle, style, svg_of

Row = Mapping[str, Any]
Content = Mapping[str, Any]
"""A results file."""
Point = tuple[float, float]
"""Output tokens per second, p99 TTFT in milliseconds."""

METRICS = {"ttft": "Time to first token, ms", "itl": "Inter-token latency, ms"}


def draw(content: Content) -> str | None:
    """The SVG of a benchmark's results; None for one that only has tables."""
    plot = PLOTS.get(content["name"])
    return plot(content) if plot and content["rows"] else None


def draw_sweep(rows: Sequence[Row], subtitle: str, targets: LatencyTargets | None = None) -> str:
    """Latency over throughput, a panel per metric: closed loops by their concurrency, open loops by their rate."""
    closed = [row for row in rows if row["concurrency"] is not None]
    opened = sorted((row for row in rows if row["rate"] is not None), key=lambda row: float(row["rate"]))
    with style():
        figure = Figure((10, 4.4), layout="constrained")
        for axes, (metric, title) in zip(figure.subplots(1, 2), METRICS.items(), strict=True):
            axes.set_title(title)
            for loops, name, colour in ((closed, "closed loops", COLOURS[0]), (opened, "open loops", COLOURS[1])):
                _sweep_lines(axes, loops, metric, name, colour)
            bound_s: float | None = getattr(targets, f"{metric}_s", None)
            _latency_over_throughput(axes, [bound_s * 1000] if bound_s else [])
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4)
        legend = "Closed loops are labelled with their concurrency; open loops are Poisson arrivals."
        return _svg(figure, "Throughput and latency", f"{subtitle}. {legend}")


def _sweep_lines(axes: Axes, rows: Sequence[Row], metric: str, name: str, colour: str) -> None:
    throughput = [row["output_tokens_per_s"] for row in rows]
    for percentile, line in (("p99", "-"), ("p50", "--")):
        latencies = [row[f"{metric}_{percentile}_ms"] for row in rows]
        axes.plot(throughput, latencies, linestyle=line, color=colour, label=f"{name}, {percentile}")
    for row in rows:
        if row["concurrency"] is not None:
            at = (row["output_tokens_per_s"], row[f"{metric}_p99_ms"])
            axes.annotate(str(row["concurrency"]), at, (0, 6), textcoords="offset points", ha="center", color=colour)


def draw_capacities(rows: Sequence[Row], subtitle: str) -> str:
    """A line per strategy (`load`) through the best of the runs that searched its capacity within `target_ms`."""
    with style():
        figure = Figure((7.5, 4.4), layout="constrained")
        axes = figure.subplots()
        for name, colour in zip(dict.fromkeys(row["load"] for row in rows), COLOURS, strict=False):
            points = frontier([(row["output_tokens_per_s"], row["ttft_p99_ms"]) for row in rows if row["load"] == name])
            axes.plot(*zip(*points, strict=True), color=colour, label=name)
        axes.set_title("p99 time to first token, ms")
        _latency_over_throughput(axes, list(dict.fromkeys(row["target_ms"] for row in rows)), 0.55)
        figure.legend(loc="outside lower center", ncols=len(COLOURS))
        return _svg(figure, "Throughput within a latency target", subtitle)


def frontier(points: Sequence[Point]) -> list[Point]:
    """The points that no other one beats in both throughput and latency, sorted by latency."""
    by_latency = sorted(points, key=lambda point: (point[1], -point[0]))
    best = accumulate((tokens for tokens, _ in by_latency), max, initial=0.0)
    return [point for point, before in zip(by_latency, best, strict=False) if point[0] > before]


def _latency_over_throughput(axes: Axes, targets_ms: Sequence[float], labels_at: float = 0.01) -> None:
    """The scales, the labels, and a dotted line at each latency target with its label at that share of the axis."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel("output tokens per second")
    axes.grid(axis="x", visible=False)
    for bound in targets_ms:
        axes.axhline(bound, color=INK, linestyle=":", linewidth=1, marker="")
        label, at = f"target: {bound:.0f} ms", (labels_at, bound)
        axes.annotate(label, at, (0, 3), axes.get_yaxis_transform(), "offset points", color=GREY, fontsize=8)


def draw_bars(title: str, subtitle: str, groups: Mapping[str, Mapping[str, float]], highlight: str) -> str:
    """Groups of bars (name → value) on one scale; bars whose name starts with `highlight` are coloured."""
    height = sum(len(bars) + 1 for bars in groups.values())
    with style():
        figure = Figure((8, 0.9 + 0.27 * height), layout="constrained")
        panels = figure.subplots(len(groups), sharex=True, height_ratios=[len(bars) + 1 for bars in groups.values()])
        for axes, (name, bars) in zip(panels if len(groups) > 1 else [panels], groups.items(), strict=True):
            colours = [COLOURS[0] if bar.startswith(highlight) else PALE for bar in bars]
            drawn = axes.barh(list(bars), list(bars.values()), 0.78, color=colours)
            axes.bar_label(drawn, [number(value) for value in bars.values()], padding=4)
            axes.invert_yaxis()
            axes.set_title(name)
            axes.grid(visible=False)
            axes.tick_params(bottom=False, labelbottom=False)
            axes.spines["bottom"].set_visible(False)
        axes.margins(x=0.1)
        return _svg(figure, title, subtitle)


def _svg(figure: Figure, title: str, subtitle: str) -> str:
    entitle(figure, title, subtitle)
    return svg_of(figure, title)


def _machine(content: Content) -> str:
    machine = content["machine"]
    return f"{machine['processor']}, {machine['cpus']} CPUs"


def _serve(content: Content) -> str:
    goodput = content["settings"].get("goodput")
    targets = LatencyTargets.parse(goodput.split()) if goodput else None
    return draw_sweep(content["rows"], f"{content['settings']['model']} over HTTP, {_machine(content)}", targets)


def _compare(content: Content) -> str:
    groups: dict[str, dict[str, float]] = {}
    for row in content["rows"]:
        title = f"{row['dtype']}, {row['in_flight']} in flight" if row["in_flight"] > 1 else f"{row['dtype']}, alone"
        groups.setdefault(title, {})[row["peer"]] = row["output_tokens_per_s"]
    title = "Useful output tokens per second, same weights and requests"
    return draw_bars(title, _machine(content), dict(sorted(groups.items())), "ours")


def _strategies(content: Content) -> str | None:
    rows = [row for row in content["rows"] if "target_ms" in row]
    return draw_capacities(rows, f"{content['settings']['model']}, {_machine(content)}") if rows else None


def _autoscaling(content: Content) -> str:
    """A panel per start-up time: promises kept over GPU-hours, a point per traffic and policy."""
    rows = content["rows"]
    names = [name.removesuffix("_gpu") for name in rows[0] if name.endswith("_gpu")]
    startups = sorted({row["startup_s"] for row in rows})
    with style():
        figure = Figure((5 * len(startups), 4.4), layout="constrained")
        for axes, startup_s in zip(figure.subplots(1, len(startups), squeeze=False)[0], startups, strict=True):
            own = [row for row in rows if row["startup_s"] == startup_s]
            for name, colour in zip(names, COLOURS, strict=False):
                points = [(row[f"{name}_gpu"], row[f"{name}_kept"]) for row in own]
                axes.plot(*zip(*points, strict=True), linestyle="", color=colour, label=name, alpha=0.8)
            axes.axhline(99, color=INK, linestyle=":", linewidth=1, marker="")
            axes.axvline(1.3, color=INK, linestyle=":", linewidth=1, marker="")
            axes.set_title(f"% within the target, start-up {startup_s:g} s")
            axes.set_xlabel("GPU-hours, as a multiple of the clairvoyant schedule's")
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(names))
        subtitle = "A point is one traffic. The goal of the built-in policy is above and left of the dotted lines."
        return _svg(figure, "Promises kept against GPU-hours", subtitle)


PLOTS: dict[str, Callable[[Content], str | None]] = {
    "serve": _serve,
    **{f"compare_{cpu}": _compare for cpu in ("amx", "avx512", "avx2")},
    "strategies": _strategies,
    "autoscaling": _autoscaling,
    "autoscaling_full": _autoscaling,
    "autoscaling_mispredicted": _autoscaling,
}
