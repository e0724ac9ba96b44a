"""Writes docs/benchmarks.md and its plots from benchmarks/results/*.json.

python benchmarks/report.py
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from pathlib import Path
from statistics import fmean
from typing import Any

from llmservice_bench.plots import draw
from llmservice_bench.results import FOLDER, Row, cell, figure, rows_tables


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A script <name>.py that writes results/<name>.json or several <name>_<part>.json."""

    name: str
    title: str
    minutes: float
    """Expected time on two cores; the script is stopped after twice that."""
    in_make_bench: bool = True

    @property
    def script(self) -> Path:
        return Path(__file__).resolve().parent / f"{self.name}.py"

    def wrote(self, results_name: str) -> bool:
        return results_name == self.name or results_name.startswith(f"{self.name}_")


BENCHMARKS = (
    Benchmark("compare", "Compared with other engines", 8),
    Benchmark("strategies", "Static, dynamic and continuous batching", 5.4),
    Benchmark("roofline", "Roofline of this machine", 1.5),
    Benchmark("serve", "Throughput and latency over HTTP", 2),
    Benchmark("micro", "Components around the model", 3),
    Benchmark("gateway", "The gateway", 6, in_make_bench=False),
    Benchmark("reality", "The simulator against reality", 36, in_make_bench=False),
    Benchmark("operator_scale", "The operator with 1,000 services", 8, in_make_bench=False),
    Benchmark("autoscaling", "Autoscaling policies", 15, in_make_bench=False),
    Benchmark("gpu", "On a GPU", 9, in_make_bench=False),
    Benchmark("soak", "Soak test", 10, in_make_bench=False),
)
"""In the order of the report."""


DOCS = Path(__file__).resolve().parents[1] / "docs"
PLOT_FOLDER = "benchmarks"
INTRODUCTION = """\
Written by `make bench`; every figure is in a file in `benchmarks/results/`. Ratios are of one run.
Request lengths are those of the Azure LLM inference trace 2023, conversation (Microsoft, CC-BY 4.0; Patel et al.,
"Splitwise", ISCA 2024), scaled to the model."""

Content = Mapping[str, Any]
"""A results file."""


@dataclass(frozen=True, slots=True)
class Section:
    """A benchmark and its results files."""

    benchmark: Benchmark
    contents: Sequence[Content]

    def text(self) -> str:
        parts = [f"## {self.benchmark.title}", about(self.benchmark.script)]
        for content in self.contents:
            parts += _content(content, with_name=len(self.contents) > 1)
        return "\n\n".join(parts)


def about(script: Path) -> str:
    """The docstring of a benchmark, without indented examples."""
    docstring = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
    paragraphs = docstring.split("\n\n")
    texts = [" ".join(paragraph.split()) for paragraph in paragraphs if not paragraph.startswith("    ")]
    return "\n\n".join([*texts, f"`python benchmarks/{script.name}`"])


def read_sections(results: Path) -> list[Section]:
    """The sections in the order of `BENCHMARKS`, without benchmarks that have no results."""
    contents = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("*.json"))}
    for name in [name for name, content in contents.items() if "rows" not in content]:
        print(
            f"{results / name}.json is ignored: an earlier version wrote it, run its benchmark again", file=sys.stderr
        )
        del contents[name]
    sections = [Section(each, [contents[name] for name in contents if each.wrote(name)]) for each in BENCHMARKS]
    return [section for section in sections if section.contents]


def report(sections: Sequence[Section]) -> str:
    """The whole document."""
    contents = [content for section in sections for content in section.contents]
    checks = [check for content in contents for check in content["checks"]]
    met = sum(check["met"] for check in checks)
    parts = [
        "# Benchmarks",
        INTRODUCTION,
        "\n".join(_environments(contents)),
        "## Targets",
        f"{met} of {len(checks)} are met.",
        targets(checks),
        *(section.text() for section in sections),
    ]
    return "\n\n".join(parts) + "\n"


def _environments(contents: Sequence[Content]) -> list[str]:
    """A line per machine, commit and versions, with the benchmarks that ran there."""
    names: dict[str, list[str]] = {}
    for content in contents:
        names.setdefault(where(content), []).append(content["name"])
    return [f"- {', '.join(benchmarks)}: {place}" for place, benchmarks in names.items()]


def where(content: Content) -> str:
    """The machine, the commit and the versions of the figures."""
    machine = content["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items() if name != "llmservice")
    place = f"{machine['processor']}, {machine['cpus']} CPUs, {machine['platform']}, Python {machine['python']}"
    return f"{place}; commit `{content['commit'] or 'unknown'}`; {versions}"


def targets(checks: Sequence[Content]) -> str:
    """The table of targets."""
    lines = ["| what | target | measured | |", "| --- | ---: | ---: | --- |"]
    for check in checks:
        measured = f"{figure(check['measured'])} {check['unit']}".rstrip()
        bound = check["bound"].replace(">=", "≥").replace("<=", "≤")
        lines.append(f"| {check['what']} | {bound} | {measured} | {'met' if check['met'] else '**MISSED**'} |")
    return "\n".join(lines)


def _content(content: Content, *, with_name: bool) -> list[str]:
    heading = [f"### {content['name']}"] if with_name else []
    settings = ", ".join(f"{name.replace('_', ' ')} {cell(value)}" for name, value in content["settings"].items())
    plot = [f"![{content['name']}]({PLOT_FOLDER}/{content['name']}.svg)"] if draw(content) else []
    notes = ["\n".join(f"- {note}" for note in content["notes"])] if content.get("notes") else []
    return [
        *heading,
        *([f"Settings: {settings}."] if settings else []),
        *plot,
        *notes,
        rows_tables(over_seeds(content["rows"])),
    ]


def over_seeds(rows: Sequence[Row]) -> list[Row]:
    """Rows that differ in their seed alone become one: the mean of measured figures, the most of whole numbers."""
    merged: list[Row] = []
    for _, alike in groupby(rows, key=_before_seed):
        first, *others = alike
        if not others or "seed" not in first:
            merged += [first, *others]
            continue
        one: dict[str, Any] = {}
        for name, value in first.items():
            if name == "seed":
                one["seeds"] = 1 + len(others)
            elif isinstance(value, float):
                one[name] = fmean([value, *(other[name] for other in others)])
            else:
                one[name] = value if value is None or isinstance(value, str) else max(value, *(o[name] for o in others))
        merged.append(one)
    return merged


def _before_seed(row: Row) -> tuple[Any, ...]:
    """What the columns before that of the seed tell apart; of a row without one, all columns."""
    return tuple(takewhile(lambda column: column[0] != "seed", row.items()))


def write(results: Path = FOLDER, docs: Path = DOCS) -> Path:
    """Write benchmarks.md and the plots; plots of earlier runs are deleted."""
    sections = read_sections(results)
    plots = docs / PLOT_FOLDER
    plots.mkdir(parents=True, exist_ok=True)
    for stale in plots.glob("*.svg"):
        stale.unlink()
    for content in (content for section in sections for content in section.contents):
        if drawn := draw(content):
            (plots / f"{content['name']}.svg").write_text(drawn, encoding="utf-8")
    written = docs / "benchmarks.md"
    written.write_text(report(sections), encoding="utf-8")
    print(f"written: {written}")
    return written


if __name__ == "__main__":
    write()
