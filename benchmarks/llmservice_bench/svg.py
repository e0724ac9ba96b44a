"""Drawings as SVG text: the few shapes that our plots are made of, and how they look."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

INK, GREY, RULE, PAPER = "#1f2933", "#66727f", "#e4e8ec", "#ffffff"
COLOURS = ("#2563a8", "#d9722b", "#2f8f5b", "#8a4fa3", "#b8a12b", "#6b7785")
"""One a series, in their order; far apart for those who see few colours as well."""
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"


def drawing(width: float, height: float, title: str, shapes: Iterable[str]) -> str:
    """A whole file: a white card, so that it reads the same on a light and on a dark page."""
    size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}" font-size="12" role="img">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{width:g}" height="{height:g}" rx="8" fill="{PAPER}"/>',
            *shapes,
            "</svg>\n",
        ]
    )


def text(
    x: float, y: float, words: str, *, fill: str = INK, anchor: str = "start", size: int = 12, bold: bool = False
) -> str:
    """One line, readable over others; `anchor` is start, middle or end."""
    style = f'fill="{fill}" text-anchor="{anchor}" font-size="{size}"' + (' font-weight="600"' if bold else "")
    halo = f'stroke="{PAPER}" stroke-width="3" stroke-linejoin="round" paint-order="stroke"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style} {halo}>{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, *, stroke: str = RULE, dashes: str = "") -> str:
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}"{dashed}/>'


def path(points: Iterable[tuple[float, float]], *, stroke: str, dashes: str = "") -> str:
    """Straight from point to point."""
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return (
        f'<polyline points="{corners}" fill="none" stroke="{stroke}" stroke-width="2" stroke-linejoin="round"{dashed}/>'
    )


def dot(x: float, y: float, *, fill: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{fill}" stroke="{PAPER}" stroke-width="1"/>'


def bar(x: float, y: float, width: float, height: float, *, fill: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 1):.1f}" height="{height:.1f}" rx="2" fill="{fill}"/>'
