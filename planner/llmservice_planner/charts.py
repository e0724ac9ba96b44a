"""Charts of the commands' results: SVG and PNG with matplotlib (the extra `plots`), pages of HTML, text for a terminal.

The same data give the same SVG. matplotlib is imported where a figure is drawn, so that all else works without it.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from io import StringIO
from itertools import cycle, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#2563a8", "#d9722b", "#2f8f5b", "#8a4fa3", "#b8a12b", "#6b7785")
"""One a series; distinguishable with colour blindness."""
LINES = tuple((colour, pattern) for pattern in ("-", "--", ":") for colour in COLOURS)
"""Colour and style, for more series than there are colours."""
INK, GREY, RULE, PALE = "#1f2933", "#66727f", "#e4e8ec", "#aebac6"
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "llmservice",  # without it, ids are random
    "svg.fonttype": "none",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": GREY,
    "axes.labelcolor": GREY,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "ytick.left": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 6,
    "lines.markeredgecolor": "white",
    "lines.marker": "o",
    "legend.frameon": False,
    "figure.facecolor": "white",
}
NO_MATPLOTLIB = "plots need matplotlib: pip install 'llmservice[plots]'"
FORMATS = (".svg", ".png")


class ChartError(ValueError):
    """A chart that cannot be written: the message says why."""


def has_matplotlib() -> bool:
    return find_spec("matplotlib") is not None


@contextmanager
def style() -> Iterator[None]:
    """The rc settings of all figures; lines are drawn within it."""
    import matplotlib as mpl

    with mpl.rc_context(STYLE):
        yield


def figure(
    title: str, subtitle: str = "", *, size_inches: tuple[float, float] = (8, 4.4), **subplots: Any
) -> tuple[Figure, list[Axes]]:
    """A titled figure and its axes, in rows from the top; call it within `style()`.

    `subplots`: of `Figure.subplots`, such as `nrows=2, sharex=True`.
    """
    from matplotlib.figure import Figure

    drawn = Figure(size_inches, layout="constrained")
    axes = drawn.subplots(squeeze=False, **subplots)
    entitle(drawn, title, subtitle)
    return drawn, list(axes.flat)


def entitle(drawn: Figure, title: str, subtitle: str) -> None:
    """A bold title above the axes, and a line in grey below it."""
    drawn.suptitle(f"{title}\n\n" if subtitle else title, x=0.01, ha="left", weight="bold", size=12)
    drawn.text(0.01, 1 - 0.36 / drawn.get_figheight(), subtitle, ha="left", va="top", color=GREY, size=8)


def svg_of(drawn: Figure, title: str = "") -> str:
    """The figure as an SVG document."""
    text = StringIO()
    with style():
        metadata = {"Date": None, "Creator": None, "Title": title or drawn.get_suptitle().strip()}
        drawn.savefig(text, format="svg", metadata=metadata)
    return text.getvalue()


def check_path(path: Path) -> None:
    """Raises `ChartError` if no figure can be written there, before anything is computed."""
    if path.suffix not in FORMATS:
        raise ChartError(f"{path} ends in {path.suffix or 'nothing'}, expected {' or '.join(FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise ChartError(f"{path.absolute().parent} is no folder: create it, or give another path")
    if not has_matplotlib():
        raise ChartError(NO_MATPLOTLIB)


def write(drawn: Figure, path: Path) -> None:
    """To a .svg or .png file. Raises `ChartError`."""
    check_path(path)
    try:
        if path.suffix == ".svg":
            path.write_text(svg_of(drawn), encoding="utf-8")
        else:
            with style():
                drawn.savefig(path, dpi=150, metadata={"Software": None})
    except OSError as error:
        raise ChartError(f"{path} cannot be written: {error.strerror or error}") from error


# --- HTML


_CSS = """
:root { color-scheme: light dark; --ink: #1f2933; --grey: #66727f; --rule: #e4e8ec; --page: #ffffff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ec; --grey: #9aa7b3; --rule: #37424d; --page: #161b20; }
  figure { background: #ffffff; border-radius: 6px; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
  max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
p, li { max-width: 46rem; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; display: block;
  overflow-x: auto; }
th, td { text-align: right; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--rule); white-space: nowrap; }
td { vertical-align: top; } th.text, td.text { text-align: left; white-space: pre-line; }
th { color: var(--grey); font-weight: 600; } th:first-child, td:first-child { text-align: left; }
figure { margin: 1rem 0; padding: .5rem; } figure svg { max-width: 100%; height: auto; }
pre { overflow-x: auto; background: var(--rule); padding: .8rem; border-radius: 6px; font-size: 13px; }
"""


def html_page(title: str, sections: Sequence[tuple[str, Sequence[str]]], lead: str = "") -> str:
    """A page without references to other files: `sections` are headings, each with its blocks of HTML.

    Blocks are made by `html_text`, `html_table`, `html_code` and `html_figure`.
    """
    parts = [f"<h1>{html.escape(title)}</h1>", html_text(lead) if lead else ""]
    for heading, blocks in sections:
        parts += [f"<h2>{html.escape(heading)}</h2>" if heading else "", *blocks]
    body = "\n".join(part for part in parts if part)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{html.escape(title)}</title>\n'
        f"<style>{_CSS}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def html_text(text: str) -> str:
    """A paragraph per blank line."""
    return "\n".join(f"<p>{html.escape(part)}</p>" for part in text.split("\n\n"))


def html_code(text: str) -> str:
    return f"<pre>{html.escape(text)}</pre>"


def html_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], texts: Sequence[str] = ()) -> str:
    """Numbers are aligned to the right; the columns `texts` to the left, with their line breaks."""
    marks = [' class="text"' if column in texts else "" for column in columns]
    head = "".join(f"<th{mark}>{html.escape(column)}</th>" for column, mark in zip(columns, marks, strict=True))
    lines = (
        "".join(f"<td{mark}>{html.escape(_cell(cell))}</td>" for cell, mark in zip(row, marks, strict=True))
        for row in rows
    )
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def html_figure(svg: str) -> str:
    """An SVG of `svg_of`, inline."""
    return f"<figure>{svg[svg.index('<svg') :]}</figure>"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


# --- text

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_MARKS = "●○◆◇■□▲△"


def text_chart(
    x: Sequence[float],
    series: Mapping[str, Sequence[float | None]],
    *,
    width: int = 72,
    height: int = 12,
    log_x: bool = False,
    log_y: bool = False,
    x_label: str = "",
    marks: Mapping[str, float] | None = None,
) -> str:
    """Lines over x as text, of at most `width` columns; None is left out. `marks`: names of places on x, below it.

    Raises:
        ValueError: no value is there, or one that a logarithmic axis cannot show.
    """
    values = [y for ys in series.values() for y in ys if y is not None]
    if not x or not values:
        raise ValueError("a chart needs at least one value")
    low, high = (min(values), max(values)) if log_y else (min(0.0, *values), max(0.0, *values))
    ticks = _ticks(low, high, min(height - 1, 4), log=log_y)
    if not log_y:
        low, high = ticks[0], ticks[-1]
    labels = {round(_share(low, high, tick, log=log_y) * (height - 1)): _short(tick) for tick in ticks}
    margin = max(map(len, labels.values())) + 2
    columns = max(8, width - margin)
    rows = [[" "] * columns for _ in range(height)]
    for mark, ys in zip(cycle(_MARKS), series.values(), strict=False):
        places = [
            (round(_share(min(x), max(x), at, log=log_x) * (columns - 1)), _share(low, high, y, log=log_y))
            for at, y in zip(x, ys, strict=True)
            if y is not None
        ]
        for column, share in _joined(places):
            rows[round(share * (height - 1))][column] = mark
    lines = [f"{labels.get(row, ''):>{margin - 2}} │{''.join(rows[row])}".rstrip() for row in reversed(range(height))]
    lines.append(" " * (margin - 1) + "└" + "─" * columns)
    lines += _x_axis(x, margin, columns, log=log_x, label=x_label, marks=marks or {})
    if len(series) > 1:
        lines.append(
            " " * margin + "   ".join(f"{mark} {name}" for mark, name in zip(cycle(_MARKS), series, strict=False))
        )
    return "\n".join(lines)


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """One line of bars from 0 to the largest value, each the mean of its part of `values`."""
    if not values:
        return ""
    size = max(1, math.ceil(len(values) / width))
    means = [sum(values[at : at + size]) / len(values[at : at + size]) for at in range(0, len(values), size)]
    most = max(means)
    return "".join(_EIGHTHS[round(8 * max(0.0, mean) / most)] if most > 0 else " " for mean in means)


def _joined(places: Sequence[tuple[int, float]]) -> Iterator[tuple[int, float]]:
    """With a place in each column between two places."""
    yield from places
    for (left, low), (right, high) in pairwise(places):
        for column in range(left + 1, right):
            yield column, low + (high - low) * (column - left) / (right - left)


def _x_axis(
    x: Sequence[float], margin: int, columns: int, *, log: bool, label: str, marks: Mapping[str, float]
) -> Iterator[str]:
    """The tick labels and the name of the axis, then a line for each mark."""
    line = [" "] * (columns + 8)
    end = -1
    for tick in _ticks(min(x), max(x), 8, log=log):
        share = _share(min(x), max(x), tick, log=log)
        if -0.01 <= share <= 1.01:
            text = _short(tick)
            start = max(0, min(round(share * (columns - 1)) - len(text) // 2, columns - len(text)))
            if start > end:  # with a space between two
                end = start + len(text)
                line[start:end] = text
    yield (" " * margin + "".join(line).rstrip() + (f"  {label}" if label else "")).rstrip()
    for name, at in marks.items():
        if min(x) <= at <= max(x):
            column = round(_share(min(x), max(x), at, log=log) * (columns - 1))
            text = f"▲ {name}" if column + len(name) + 2 <= columns else f"{name} ▲"
            yield " " * (margin + (column if text[0] == "▲" else max(0, column - len(name) - 1))) + text


def _share(low: float, high: float, value: float, *, log: bool) -> float:
    if log:
        if low <= 0:
            raise ValueError(f"a logarithmic axis cannot show {low}")
        low, high, value = math.log(low), math.log(high), math.log(value)
    return (value - low) / (high - low) if high > low else 0.5


def _ticks(low: float, high: float, most: int, *, log: bool) -> list[float]:
    """Round places on an axis, at most `most` and one: multiples of 1, 2 or 5 times a power of ten, around both ends.

    With `log` such numbers themselves, between the ends; equal ratios where none or one is there.
    """
    if log:
        tens = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for leads in ((1, 2, 5), (1, 3), (1,)):
            ticks = [lead * 10.0**ten for ten in tens for lead in leads if low <= lead * 10.0**ten <= high]
            if 2 <= len(ticks) <= most + 1:
                return ticks
        return [low * (high / low) ** (step / most) for step in range(most + 1)]
    if high == low:
        high = low + 1
    size = 10.0 ** math.floor(math.log10((high - low) / most))
    for step in (size, 2 * size, 5 * size, 10 * size):
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if last - first <= most:
            break
    return [count * step for count in range(first, last + 1)]


def _short(value: float) -> str:
    """A number in at most six characters: 1.2k, 35, 0.04."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / min(size, 1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{value:.0f}" if abs(value) >= 100 or value == round(value) else f"{value:.2g}"
