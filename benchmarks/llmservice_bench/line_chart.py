"""Lines over a common axis, in panels beside each other, each line named where it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from llmservice_bench import svg
from llmservice_bench.axis import Axis, tick_label

WIDTH, HEIGHT = 500.0, 370.0
"""Of one panel."""
LEFT, RIGHT, TITLE, TOP, BOTTOM = 58.0, 92.0, 74.0, 102.0, 48.0
LABEL_HEIGHT = 14.0


@dataclass(frozen=True, slots=True)
class Series:
    """One line through `points` (x, y) in their order; `marks` stand beside them, one each, where given."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str
    dashed: bool = False
    marks: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Panel:
    """y is logarithmic: what is drawn spans milliseconds to seconds."""

    title: str
    x_label: str
    series: Sequence[Series]
    bounds: Mapping[str, float] = field(default_factory=dict)
    """A dashed line across each, with its label: what was promised."""
    bounds_labelled_at: float = 0.0
    """Where labels begin, as a share of the axis."""


def line_chart(title: str, subtitle: str, panels: Sequence[Panel]) -> str:
    """The SVG; points that are not above 0 have no place on it."""
    shapes = [svg.text(18, 26, title, size=15, bold=True), svg.text(18, 44, subtitle, fill=svg.GREY)]
    for number, panel in enumerate(panels):
        shapes += _panel(panel, number * WIDTH)
    return svg.drawing(WIDTH * len(panels), HEIGHT, title, shapes)


def _panel(panel: Panel, offset: float) -> list[str]:
    drawn = [point for series in panel.series for point in series.points if point[1] > 0]
    if not drawn:
        return [svg.text(offset + LEFT, TITLE, f"{panel.title}: nothing was measured", fill=svg.GREY)]
    x_axis = Axis.around([x for x, _ in drawn], offset + LEFT, offset + WIDTH - RIGHT)
    y_axis = Axis.around([y for _, y in drawn] + [*panel.bounds.values()], HEIGHT - BOTTOM, TOP, log=True)
    shapes = [*_grid(panel, x_axis, y_axis)]
    for label, bound in panel.bounds.items():
        y = y_axis.place(bound)
        shapes.append(svg.line(x_axis.start, y, x_axis.end, y, stroke=svg.INK, dashes="2 4"))
        x = x_axis.start + 6 + panel.bounds_labelled_at * (x_axis.end - x_axis.start)
        shapes.append(svg.text(x, y - 5, label, fill=svg.GREY, size=11))
    ends: list[tuple[float, Series]] = []
    for series in panel.series:
        placed = [(x_axis.place(x), y_axis.place(y)) for x, y in series.points if y > 0]
        shapes.append(svg.path(placed, stroke=series.colour, dashes="5 4" if series.dashed else ""))
        shapes += [svg.dot(x, y, fill=series.colour) for x, y in placed]
        marks = zip(placed, series.marks, strict=False)
        shapes += [svg.text(x, y - 8, mark, fill=svg.GREY, anchor="middle", size=10) for (x, y), mark in marks]
        ends += [(placed[-1][1], series)] if placed else []
    return shapes + _names(ends, offset + WIDTH - RIGHT + 10)


def _grid(panel: Panel, x_axis: Axis, y_axis: Axis) -> list[str]:
    shapes = [svg.text(x_axis.start, TITLE, panel.title, bold=True)]
    for tick in y_axis.ticks():
        y = y_axis.place(tick)
        shapes.append(svg.line(x_axis.start, y, x_axis.end, y))
        shapes.append(svg.text(x_axis.start - 8, y + 4, tick_label(tick), fill=svg.GREY, anchor="end", size=11))
    for tick in x_axis.ticks():
        x = x_axis.place(tick)
        shapes.append(svg.line(x, y_axis.start, x, y_axis.start + 5, stroke=svg.GREY))
        shapes.append(svg.text(x, y_axis.start + 18, tick_label(tick), fill=svg.GREY, anchor="middle", size=11))
    middle = (x_axis.start + x_axis.end) / 2
    shapes.append(svg.text(middle, y_axis.start + 36, panel.x_label, fill=svg.GREY, anchor="middle", size=11))
    return [*shapes, svg.line(x_axis.start, y_axis.start, x_axis.end, y_axis.start, stroke=svg.GREY)]


def _names(ends: list[tuple[float, Series]], x: float) -> list[str]:
    """Each beside the end of its line, moved down as far as the one above it needs."""
    shapes, lowest = [], float("-inf")
    for y, series in sorted(ends, key=lambda end: end[0]):
        lowest = max(y, lowest + LABEL_HEIGHT)
        shapes.append(svg.text(x, lowest + 4, series.name, fill=series.colour, bold=not series.dashed))
    return shapes
