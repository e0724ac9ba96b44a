"""Charts of a service's last hour: text for a terminal, figures for files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from llmservice_operator.explain.timeline import Series, Timeline
from llmservice_planner.charts import (
    COLOURS,
    FORMATS,
    ChartError,
    check_path,
    figure,
    html_code,
    html_figure,
    html_page,
    html_text,
    style,
    svg_of,
    text_chart,
    write,
)

_HEIGHT = 8
_WIDTH = 84


def check(path: Path) -> None:
    """Whether a plot can be written there, before anything is read; raises ChartError."""
    if path.suffix not in (*FORMATS, ".html"):
        raise ChartError(f"{path} ends in {path.suffix or 'nothing'}, expected .svg, .png or .html")
    if path.suffix != ".html":
        check_path(path)
    elif not path.absolute().parent.is_dir():
        raise ChartError(f"{path.absolute().parent} is no folder: create it, or give another --plot FILE")


def text_plot(timeline: Timeline) -> Iterator[str]:
    """Lines of text; none without a figure."""
    if timeline.is_empty:
        return
    yield f"Last hour, from {timeline.source}"
    for title, series in _panels(timeline):
        yield f"  {title}"
        chart = text_chart(timeline.minutes, series, width=_WIDTH, height=_HEIGHT, x_label="min from now")
        yield from (f"  {line}" for line in chart.splitlines())


def write_plot(timeline: Timeline, title: str, text: str, path: Path) -> None:
    """To a .svg, .png or .html file, which has the whole explanation as well; raises ChartError."""
    panels = list(_panels(timeline))
    if not panels:
        raise ChartError("there is nothing to plot yet: no decision is in the status, and no series in Prometheus")
    with style():
        drawn, axes = figure(
            title,
            f"the last hour, from {timeline.source}",
            size_inches=(9, 2.4 * len(panels) + 0.8),
            nrows=len(panels),
            sharex=True,
        )
        for axis, (name, series) in zip(axes, panels, strict=True):
            for colour, (label, values) in zip(COLOURS, series.items(), strict=False):
                known = [(x, y) for x, y in zip(timeline.minutes, values, strict=True) if y is not None]
                line = "--" if label in {"replicas ready", "target"} else "-"
                drawn_as = "steps-post" if label.startswith("replicas") else "default"
                axis.plot(*zip(*known, strict=True), line, color=colour, label=label, marker="", drawstyle=drawn_as)
            axis.set_title(name, loc="left", fontsize="medium")
            axis.set_xlim(min(timeline.minutes), 0)
            axis.set_ylim(0, 1.05 * axis.get_ylim()[1])
            axis.legend(loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0, ncols=len(series))
        axes[-1].set_xlabel("min from now")
        if path.suffix == ".html":
            blocks = [html_figure(svg_of(drawn, title)), html_text(f"From {timeline.source}.")]
            page = html_page(title, [("Last hour", blocks), ("State", [html_code(text)])])
            try:
                path.write_text(page, encoding="utf-8")
            except OSError as error:
                raise ChartError(f"{path} cannot be written: {error.strerror or error}") from error
        else:
            write(drawn, path)


def _panels(timeline: Timeline) -> Iterator[tuple[str, Mapping[str, Series]]]:
    """Of what is known: demand against capacity, load against replicas, p99 TTFT against its target."""
    replicas = {
        "load (busy replicas)": timeline.load,
        "replicas asked for": timeline.asked,
        "replicas ready": timeline.ready,
    }
    tokens = {"demand": timeline.demand, "capacity of the ready replicas": timeline.capacity}
    ttft: dict[str, Series] = {"p99": timeline.ttft_p99_s}
    if timeline.ttft_target_s is not None:
        ttft["target"] = (timeline.ttft_target_s,) * len(timeline.minutes)
    for title, series in (("tokens per second", tokens), ("replicas", replicas), ("TTFT, seconds", ttft)):
        known = {name: values for name, values in series.items() if any(value is not None for value in values)}
        if known and set(known) != {"target"}:
            yield title, known
