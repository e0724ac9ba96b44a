"""What a user sees of a chart: an SVG's texts, a page that stands alone, text that fits a terminal."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmservice_planner.charts import (
    LINES,
    ChartError,
    figure,
    html_code,
    html_figure,
    html_page,
    html_table,
    html_text,
    sparkline,
    style,
    svg_of,
    text_chart,
    write,
)

numbers = st.floats(0.001, 1e9)


def _drawn() -> str:
    with style():
        drawn, (axes,) = figure("Tokens", "of a test")
        axes.plot([1, 2], [3, 4], label="line")
    return svg_of(drawn)


def test_the_same_data_give_the_same_svg_with_title_and_subtitle() -> None:
    svg = _drawn()
    assert svg == _drawn()
    texts = {each.text for each in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")}  # noqa: S314
    assert {"Tokens", "of a test"} <= texts


@pytest.mark.parametrize(("suffix", "magic"), [(".svg", b"<?xml"), (".png", b"\x89PNG")])
def test_a_file_has_the_format_of_its_name(tmp_path: Path, suffix: str, magic: bytes) -> None:
    with style():
        drawn, _ = figure("Tokens")
    path = tmp_path / f"chart{suffix}"
    write(drawn, path)
    assert path.read_bytes().startswith(magic)


@pytest.mark.parametrize(("name", "message"), [("chart.gif", "expected .svg or .png"), ("no/chart.svg", "no folder")])
def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path, name: str, message: str) -> None:
    with style():
        drawn, _ = figure("Tokens")
    with pytest.raises(ChartError, match=message):
        write(drawn, tmp_path / name)


def test_without_matplotlib_text_works_and_a_plot_says_how_to_get_one() -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from pathlib import Path; from llmservice_planner import charts\n"
        "assert charts.text_chart([1, 2], {'a': [1, 2]})\n"
        "try: charts.check_path(Path('a.svg'))\n"
        "except (charts.ChartError, ValueError) as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'llmservice[plots]'" in done.stdout


def test_a_page_stands_alone_and_escapes_what_it_shows() -> None:
    blocks = [html_text("a < b\n\nc"), html_table(["k", "v"], [["<x>", 1234.5], ["y", None]]), html_code("if a < b")]
    page = html_page("A & B", [("Part", [*blocks, html_figure(_drawn())])])
    assert "<title>A &amp; B</title>" in page
    assert "<p>a &lt; b</p>\n<p>c</p>" in page
    assert "<td>&lt;x&gt;</td><td>1,234</td>" in page
    assert page.count("<svg") == 1
    assert not re.search(r'(src|href)="(?!#)', page)
    assert "<?xml" not in page


def test_a_text_chart_shows_where_values_are() -> None:
    chart = text_chart([1, 10, 100], {"up": [0, 5, 10]}, width=40, height=5, log_x=True, marks={"knee": 10})
    lines = chart.splitlines()
    bottom, middle, top = lines[4].index("●"), lines[2], lines[0].rindex("●")
    (mark,) = [line for line in lines if "knee" in line]
    assert abs(mark.index("▲") - (bottom + top) / 2) <= 1
    assert middle.index("●") <= mark.index("▲") <= middle.rindex("●")
    assert sum(line.count("●") for line in lines[:5]) == top - bottom + 1, "a line without gaps"


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([1, 4], ["4", "3", "2", "1", "0"]),
        ([0, 1], ["1", "0.5", "0"]),
        ([3.9, 4.5], ["6", "4", "2", "0"]),
        ([-7, 5650], ["6000", "4000", "2000", "0", "-2000"]),
        ([0, 0], ["1", "0.5", "0"]),
        ([2e-6], ["2e-06", "1.5e-06", "1e-06", "5e-07", "0"]),
    ],
)
def test_the_values_beside_a_text_chart_are_round(values: list[float], labels: list[str]) -> None:
    chart = text_chart(range(-len(values), 0), {"up": values}, width=60, height=9)
    assert [line.split("│")[0].strip() for line in chart.splitlines() if re.match(r" *[-\d].*│", line)] == labels


def test_the_values_below_a_text_chart_are_round() -> None:
    chart = text_chart([1, 315], {"up": [1, 2]}, width=60, height=5, log_x=True)
    assert chart.splitlines()[-1].split() == ["1", "2", "5", "10", "20", "50", "100", "200"]
    narrow = text_chart([0, 80000], {"up": [1, 2]}, width=30, height=5).splitlines()[-1]
    assert all(float(label.rstrip("k")) % 10 == 0 for label in narrow.split()), "no label runs into the next"
    line = text_chart([-4.1, -2, -6.2e-06], {"up": [1, 2, 3]}, width=60, height=5, x_label="minutes").splitlines()[-1]
    assert line.split() == ["-4", "-3", "-2", "-1", "0", "minutes"]


@given(
    st.lists(st.tuples(numbers, st.none() | numbers), min_size=1, max_size=30).filter(
        lambda points: any(y is not None for _, y in points)
    ),
    st.integers(30, 120),
    st.booleans(),
    st.booleans(),
)
def test_a_text_chart_fits_its_width(
    points: list[tuple[float, float | None]], width: int, log_x: bool, log_y: bool
) -> None:
    series = {"one": [y for _, y in points], "two": [y for _, y in points]}
    chart = text_chart([x for x, _ in points], series, width=width, log_x=log_x, log_y=log_y)
    assert max(map(len, chart.splitlines())) <= width
    assert "◇" not in chart


def test_a_sparkline_is_highest_where_the_values_are() -> None:
    assert sparkline([0, 1, 2, 4]) == " ▂▄█"
    assert len(sparkline([1.0] * 1000)) <= 60
    assert sparkline([]) == ""


def test_a_chart_of_all_policies_names_and_tells_apart_each() -> None:
    names = ["builtin", "hpa", "keda", "kpa", "llmd", "static:6", "clairvoyant"]

    legend = text_chart([0, 1], {name: [number, number] for number, name in enumerate(names)}).splitlines()[-1]

    marks = [entry.split()[0] for entry in legend.strip().split("   ")]
    assert [entry.split()[1] for entry in legend.strip().split("   ")] == names
    assert len(set(marks)) == len(set(LINES[: len(names)])) == len(names)
