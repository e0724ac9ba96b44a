"""The report of a simulation: text for a terminal, plots, and an HTML page."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from textwrap import wrap
from typing import TYPE_CHECKING

from llmservice_bench.simulation.outcome import DecisionRecord, Outcome, Targets
from llmservice_planner.charts import (
    GREY,
    LINES,
    PALE,
    figure,
    has_matplotlib,
    html_figure,
    html_page,
    html_table,
    html_text,
    style,
    svg_of,
    text_chart,
)
from llmservice_planner.traffic.lengths import percentile
from llmservice_server.engine.config import LANES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SHOWN, _SHOWN_OF_EACH = 25, 6
"""Decisions in the text, of one policy and of each of several; the page and the JSON have all."""
_POINTS = 120
"""Of a line over time."""


@dataclass(frozen=True, slots=True)
class Study:
    """The same traffic under several policies."""

    title: str
    """Service, GPU and traffic in one line."""
    assumptions: Sequence[str]
    """Sentences."""
    targets: Targets
    outcomes: Sequence[Outcome]

    @property
    def duration_s(self) -> float:
        return self.outcomes[0].duration_s


def text(study: Study, *, width: int = 100) -> str:
    """The report for a terminal."""
    wrapped = (wrap(each, width, initial_indent="  ", subsequent_indent="    ") for each in study.assumptions)
    lines = [study.title, *chain.from_iterable(wrapped), ""]
    lines += _aligned([_COLUMNS, *(_row(each, study.targets) for each in study.outcomes)])
    lines += ["", "Waits from arrival until first scheduled, by lane", *_aligned([_WAIT_COLUMNS, *_wait_rows(study)])]
    lines += ["", "Replicas over time (ready)"]
    times = [study.duration_s * point / _POINTS for point in range(_POINTS + 1)]
    series = {each.policy: [ready_at(each, time_s) for time_s in times] for each in study.outcomes}
    lines.append(text_chart([time_s / 60 for time_s in times], series, width=width, height=10, x_label="min"))
    for each in study.outcomes:
        lines += ["", *_decisions(each, _SHOWN if len(study.outcomes) == 1 else _SHOWN_OF_EACH)]
        lines += _failures(each)
    return "\n".join(lines)


_COLUMNS = (
    "policy", "TTFT kept", "ITL kept", "both", "TTFT p50", "p90", "p99", "ITL p50", "p99", "GPU-hours", "replicas",
    "not served",
)  # fmt: skip


def _row(outcome: Outcome, targets: Targets) -> tuple[str, ...]:
    kept, outcomes = outcome.attainment(targets), outcome.outcomes
    low, mean, high = replica_range(outcome)
    lost = len(outcome.requests) - outcomes["finished"]
    return (
        outcome.policy,
        _share(kept.ttft),
        _share(kept.itl),
        _share(kept.both),
        *(_time(outcome.ttft_s(share)) for share in (0.5, 0.9, 0.99)),
        *(_time(outcome.gaps.percentile(share)) for share in (0.5, 0.99)),
        f"{outcome.gpu_hours:.2f}",
        f"{mean:.1f} ({low}-{high})",
        str(lost),
    )


_WAIT_COLUMNS = ("policy", "lane", "requests", "mean", "p50", "p99")


def _wait_rows(study: Study) -> list[tuple[str, ...]]:
    """Of the lanes in which requests were scheduled."""
    found = [(each.policy, lane, each.waits(lane)) for each in study.outcomes for lane in LANES]
    return [
        (policy, lane, f"{waits.requests:,}", _time(waits.mean), _time(waits.p50), _time(waits.p99))
        for policy, lane, waits in found
        if waits.requests
    ]


def replica_range(outcome: Outcome) -> tuple[int, float, int]:
    """The least, the mean and the most replicas that were asked for, after the warm-up."""
    sizes = [size for size in outcome.sizes if size.time_s < outcome.duration_s]
    ends = [*(size.time_s for size in sizes[1:]), outcome.duration_s]
    spans = [
        (size.replicas, end_s - max(outcome.warmup_s, size.time_s))
        for size, end_s in zip(sizes, ends, strict=True)
        if end_s > outcome.warmup_s
    ]
    mean = sum(replicas * span_s for replicas, span_s in spans) / max(sum(span_s for _, span_s in spans), 1e-9)
    return min(spans)[0], mean, max(spans)[0]


def ready_at(outcome: Outcome, time_s: float) -> int:
    at = bisect_right(outcome.sizes, time_s, key=lambda size: size.time_s) - 1
    return outcome.sizes[at].ready if at >= 0 else 0


def _decisions(outcome: Outcome, most: int) -> Iterator[str]:
    changes = outcome.changes
    count = f"{len(outcome.decisions)} decisions, {len(changes)} of which change the replicas"
    yield f"Decisions of {outcome.policy}: {count}"
    shown = notable(outcome)
    for record, why in shown[:most]:
        head = f"  {clock(record.time_s):>8}  {record.before} -> {record.decision.replicas}  "
        for number, reason in enumerate(why):
            yield (head if number == 0 else " " * len(head)) + reason
    if len(shown) > most:
        yield f"  ... {len(shown) - most} more: --html FILE or -o json shows all"


def notable(outcome: Outcome) -> list[tuple[DecisionRecord, tuple[str, ...]]]:
    """The decisions that change the replicas, or find that replicas can or can't help the targets, with reasons."""
    found = []
    helped = True
    for record in outcome.decisions:
        why, slo = record.decision.reasons, record.decision.slo
        helps = slo is None or slo.replicas_help
        if slo is not None and helps != helped:
            why = (f"SLOFeasible={slo.status}: {slo.reason}: {slo.message}", *why)
        if helps != helped or record.decision.replicas != record.before:
            found.append((record, why))
        helped = helps
    return found


def _failures(outcome: Outcome) -> Iterator[str]:
    """Why requests were not served, the most frequent reasons first."""
    found = sorted(reasons(outcome).items(), key=lambda pair: -pair[1])
    if found:
        yield f"Requests that {outcome.policy} did not serve:"
    for (how, example), count in found:
        yield f"  {count:>6} {how.replace('_', ' ')}, such as: {example}"


def reasons(outcome: Outcome) -> dict[tuple[str, str], int]:
    """Of the requests that did not finish, by outcome and the first of its reasons."""
    examples: dict[str, str] = {}
    for request in outcome.requests:
        if request.outcome not in (None, "finished"):
            examples.setdefault(request.outcome, request.reason)
    return {(how, example): outcome.outcomes[how] for how, example in examples.items()}


def draw(study: Study) -> Figure:
    """Arrivals, replicas and p99 TTFT over time, a line a policy."""
    minutes = study.duration_s / 60
    with style():
        drawn, axes = figure(
            "Replicas and latency over time",
            study.title,
            size_inches=(9, 7.2),
            nrows=3,
            sharex=True,
            height_ratios=[1, 1.6, 1.6],
        )
        for each in axes:
            each.set_xlim(0, minutes)
            if study.outcomes[0].warmup_s:
                each.axvspan(0, study.outcomes[0].warmup_s / 60, color=PALE, alpha=0.25, linewidth=0)
        _draw_arrivals(axes[0], study)
        _draw_replicas(axes[1], study)
        _draw_ttft(axes[2], study)
        axes[-1].set_xlabel("minutes")
        handles, labels = axes[1].get_legend_handles_labels()
        drawn.legend(handles, labels, loc="outside lower center", ncols=min(8, len(labels)))
    return drawn


def _bins(study: Study) -> tuple[float, int]:
    """Length and number of the intervals that rates and percentiles are of."""
    length_s = max(5.0, study.duration_s / 60)
    return length_s, max(1, math.ceil(study.duration_s / length_s))


def _draw_arrivals(axes: Axes, study: Study) -> None:
    length_s, count = _bins(study)
    arrivals = [0] * count
    for request in study.outcomes[0].requests:
        arrivals[min(count - 1, int(request.arrival_s / length_s))] += 1
    times = [(number + 0.5) * length_s / 60 for number in range(count)]
    axes.fill_between(times, [each / length_s for each in arrivals], step="mid", color=GREY, alpha=0.35, linewidth=0)
    axes.set_ylim(bottom=0)
    axes.set_title("Requests per second")


def _draw_replicas(axes: Axes, study: Study) -> None:
    for outcome, (colour, pattern) in zip(study.outcomes, LINES, strict=False):
        sizes = [size for size in outcome.sizes if size.time_s <= study.duration_s]
        times = [*(size.time_s / 60 for size in sizes), study.duration_s / 60]
        ready = [size.ready for size in sizes]
        asked = [size.replicas for size in sizes]
        axes.step(
            times, [*ready, ready[-1]], where="post", color=colour, linestyle=pattern, label=outcome.policy, marker=""
        )
        if len(study.outcomes) == 1:
            axes.step(
                times, [*asked, asked[-1]], where="post", color=GREY, label="asked for", marker="", linestyle="--"
            )
    axes.set_ylim(bottom=0)
    axes.set_title("Replicas that are ready")


def _draw_ttft(axes: Axes, study: Study) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    length_s, count = _bins(study)
    for outcome, (colour, pattern) in zip(study.outcomes, LINES, strict=False):
        times: list[list[float]] = [[] for _ in range(count)]
        for request in outcome.requests:
            if request.ttft_s is not None:
                times[min(count - 1, int(request.arrival_s / length_s))].append(request.ttft_s)
        points = [
            ((number + 0.5) * length_s / 60, percentile(sorted(each), 0.99))
            for number, each in enumerate(times)
            if each
        ]
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, linestyle=pattern, marker="", label=outcome.policy)
    if study.targets.ttft_s < math.inf:
        axes.axhline(study.targets.ttft_s, color=GREY, linestyle=":", linewidth=1, marker="")
        at = (0.005, study.targets.ttft_s)
        axes.annotate("target", at, (0, 3), axes.get_yaxis_transform(), "offset points", color=GREY, fontsize=8)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_title("p99 time to first token by time of arrival, seconds")


def html(study: Study) -> str:
    """A page with all decisions; without matplotlib it has no plots."""
    sections: list[tuple[str, Sequence[str]]] = [
        (
            "Promises kept, latencies and cost",
            [html_table(_COLUMNS, [_row(each, study.targets) for each in study.outcomes])],
        ),
        (
            "Waits from arrival until first scheduled, by lane",
            [html_table(_WAIT_COLUMNS, _wait_rows(study), ("lane",))],
        ),
    ]
    if has_matplotlib():
        sections.append(("Over time", [html_figure(svg_of(draw(study)))]))
    for each in study.outcomes:
        rows = [_decision_row(*shown) for shown in notable(each)]
        blocks = [
            html_text(f"{len(each.decisions)} decisions, {len(each.changes)} of which change the replicas."),
            html_table(("time", "from", "to", "reasons"), rows, texts=("reasons",)) if rows else "",
        ]
        lost = [(str(count), how.replace("_", " "), example) for (how, example), count in reasons(each).items()]
        blocks += (
            [html_table(("requests not served", "outcome", "such as"), lost, texts=("outcome", "such as"))]
            if lost
            else []
        )
        sections.append((f"Decisions of {each.policy}", blocks))
    sections.append(("Assumptions", [html_text("\n\n".join(study.assumptions))]))
    return html_page("Simulation", sections, study.title)


def _decision_row(record: DecisionRecord, why: Sequence[str]) -> tuple[str, str, str, str]:
    reasons_text = "\n".join(why).replace("-> ", "→ ")  # a line can be broken within the former
    return clock(record.time_s), str(record.before), str(record.decision.replicas), reasons_text


def clock(time_s: float) -> str:
    """1:02:03 or 2:03."""
    hours, rest = divmod(int(time_s), 3600)
    minutes, seconds = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def duration(time_s: float) -> str:
    hours, minutes = divmod(round(time_s / 60), 60)
    if time_s < 120:
        return f"{time_s:.0f} s"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def _share(value: float) -> str:
    return f"{100 * value:.2f}%" if 0.9 <= value < 1 else f"{100 * value:.0f}%"


def _time(value_s: float | None) -> str:
    if value_s is None:
        return "-"
    return f"{value_s * 1000:.0f} ms" if value_s < 1 else f"{value_s:.2f} s" if value_s < 100 else f"{value_s:.0f} s"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
