"""The report of recorded traffic as a page of HTML, with plots where matplotlib is installed."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from llmservice_planner import charts
from llmservice_planner.capacity.recommendations import Recommendation
from llmservice_planner.traffic.summary import Statistics

_STEPS = 200


def html_report(
    names: str, statistics: Statistics, findings: Sequence[tuple[str, str]], recommended: Sequence[Recommendation]
) -> str:
    """`names`: of the files; `findings`: names and sentences."""
    windows = statistics.windows
    lengths = [
        (name, each.mean, each.p50, each.p90, each.p95, each.p99, each.longest)
        for name, each in (("prompt", statistics.prompt), ("output", statistics.output), ("together", statistics.total))
    ]
    plotted = charts.has_matplotlib()
    without = [] if plotted else [charts.html_text(f"Without plots: {charts.NO_MATPLOTLIB}")]
    lead = (
        f"{statistics.requests} requests in {statistics.duration_s:,.0f} s: {statistics.requests_per_s:.2f} a second "
        f"on average, {windows.peak:.2f} in the busiest {windows.window_s:g} s."
    )
    return charts.html_page(
        f"Traffic of {names}",
        [
            (
                "Recommended",
                [
                    charts.html_table(
                        ("field", "value", "reason"),
                        [(each.field, each.value, each.reason) for each in recommended],
                        texts=("reason",),
                    )
                ],
            ),
            (
                "Arrivals",
                [
                    *([_arrivals(statistics)] if plotted else []),
                    charts.html_table(("property", "value"), findings, texts=("value",)),
                    *without,
                ],
            ),
            (
                "Lengths in tokens",
                [
                    charts.html_table(("", "mean", "p50", "p90", "p95", "p99", "longest"), lengths),
                    *([_lengths(statistics)] if plotted else []),
                ],
            ),
        ],
        lead,
    )


def _arrivals(statistics: Statistics) -> str:
    windows = statistics.windows
    times = [(place + 0.5) * windows.window_s / 60 for place in range(len(windows.requests_per_s))]
    with charts.style():
        drawn, (above, below) = charts.figure(
            "Arrivals",
            f"means of {windows.window_s:g} s",
            size_inches=(8, 5.4),
            nrows=2,
            sharex=True,
        )
        above.plot(times, windows.requests_per_s, marker="", color=charts.COLOURS[0])
        above.axhline(statistics.requests_per_s, color=charts.GREY, linewidth=1, linestyle="--", marker="")
        above.set_title("requests/s (dashed: the mean)")
        above.set_ylim(bottom=0)
        below.plot(times, windows.prompt_tokens_per_s, marker="", color=charts.COLOURS[0], label="prompt")
        below.plot(times, windows.output_tokens_per_s, marker="", color=charts.COLOURS[1], label="output")
        below.set_title("tokens/s")
        below.set_ylim(bottom=0)
        below.set_xlabel("minutes")
        below.legend()
    return charts.html_figure(charts.svg_of(drawn))


def _lengths(statistics: Statistics) -> str:
    prompts, outputs = statistics.lengths
    with charts.style():
        drawn, (axes,) = charts.figure("Lengths", "share of requests that are at most so long", size_inches=(8, 3.6))
        for values, name, colour in ((prompts, "prompt", charts.COLOURS[0]), (outputs, "output", charts.COLOURS[1])):
            x, y = _cumulative(values)
            axes.plot(x, y, marker="", color=colour, label=name, drawstyle="steps-post")
        axes.set_xscale("log")
        axes.set_xlabel("tokens")
        axes.set_ylim(0, 1.02)
        axes.legend(loc="lower right")
    return charts.html_figure(charts.svg_of(drawn))


def _cumulative(values: Iterable[int]) -> tuple[list[float], list[float]]:
    """The distribution function at logarithmic steps."""
    ordered = sorted(values)
    low, high = math.log(ordered[0]), math.log(ordered[-1])
    x = [math.exp(low + (high - low) * step / _STEPS) for step in range(_STEPS + 1)]
    return x, [bisect_left(ordered, at + 1e-6) / len(ordered) for at in x]
