"""Bars side by side, in groups, with what each of them is written at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmservice_bench import svg
from llmservice_bench.axis import Axis

WIDTH, LEFT, RIGHT, TOP = 760.0, 210.0, 90.0, 70.0
BAR, GAP, GROUP_GAP = 20.0, 6.0, 30.0


@dataclass(frozen=True, slots=True)
class Group:
    """Bars that are to be compared with each other: name → value, longest is best."""

    title: str
    bars: Mapping[str, float]


def bar_chart(title: str, subtitle: str, groups: Sequence[Group], highlight: str) -> str:
    """The SVG; all groups share one scale, and the bars whose name starts with `highlight` have the colour."""
    values = [value for group in groups for value in group.bars.values()]
    axis = Axis.around(values or [1.0], LEFT, WIDTH - RIGHT)
    shapes = [svg.text(18, 26, title, size=15, bold=True), svg.text(18, 44, subtitle, fill=svg.GREY)]
    y = TOP
    for group in groups:
        shapes.append(svg.text(18, y + 4, group.title, bold=True))
        y += 14
        for name, value in group.bars.items():
            ours = name.startswith(highlight)
            shapes.append(svg.text(LEFT - 10, y + 14, name, anchor="end", bold=ours))
            length = axis.place(value) - LEFT
            shapes.append(svg.bar(LEFT, y, length, BAR, fill=svg.COLOURS[0] if ours else "#aebac6"))
            shapes.append(svg.text(LEFT + length + 8, y + 14, f"{value:,.4g}", fill=svg.INK if ours else svg.GREY))
            y += BAR + GAP
        y += GROUP_GAP - GAP
    return svg.drawing(WIDTH, y, title, shapes)
