"""docs/benchmarks.md, from results files made by hand."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MACHINE = {"platform": "Linux-6", "processor": "EPYC", "cpus": 2, "python": "3.11.7"}
LATENCIES = {f"{name}_{p}_ms": 12.5 for name in ("ttft", "itl", "e2e") for p in ("p50", "p99")}


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield importlib.import_module("report")
    for name in ("report", "run"):
        sys.modules.pop(name, None)


def results(name: str, rows: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    common = {"machine": MACHINE, "commit": "abc123", "versions": {"llmservice": "0", "torch": "2.13"}, "checks": []}
    return {"name": name, **common, "settings": {}, "notes": [], "rows": rows, **fields}


def written(report: ModuleType, folder: Path, *contents: dict[str, Any]) -> str:
    (folder / "results").mkdir()
    for content in contents:
        (folder / "results" / f"{content['name']}.json").write_text(json.dumps(content), encoding="utf-8")
    text: str = report.write(folder / "results", folder / "docs").read_text(encoding="utf-8")
    return text


SERVE = results(
    "serve",
    [{"load": "4 at once", "concurrency": 4, "rate": None, "output_tokens_per_s": 997.25, **LATENCIES}],
    settings={"model": "toy", "goodput": "ttft:250"},
    notes=["99 % keep it at 35 req/s"],
)
CHECKS = [
    {"what": "ours ÷ theirs", "bound": ">= 4", "measured": 4.317, "unit": "", "met": True},
    {"what": "p99 ITL", "bound": "<= 2", "measured": 2.5, "unit": "x", "met": False},
]


def test_targets_come_first_with_their_verdicts(report: ModuleType, tmp_path: Path) -> None:
    text = written(report, tmp_path, SERVE, results("strategies", [], checks=CHECKS))
    assert "1 of 2 are met." in text
    assert "| ours ÷ theirs | ≥ 4 | 4.32 | met |" in text
    assert "| p99 ITL | ≤ 2 | 2.5 x | **MISSED** |" in text
    assert (
        text.index("## Targets") < text.index("## Static, dynamic") < text.index("## Throughput and latency over HTTP")
    )


def test_section_has_docstring_settings_plot_notes_and_rows(report: ModuleType, tmp_path: Path) -> None:
    section = written(report, tmp_path, SERVE).partition("## Throughput and latency over HTTP")[2]
    assert section.index("from an idle to an overloaded server") < section.index("`python benchmarks/serve.py`")
    assert "Settings: model toy, goodput ttft:250." in section
    assert "![serve](benchmarks/serve.svg)" in section
    assert "- 99 % keep it at 35 req/s" in section
    assert "| 4 at once | 4 | 997 | 12.5 / 12.5 |" in section
    assert (tmp_path / "docs/benchmarks/serve.svg").read_text().rstrip().endswith("</svg>")


def test_machine_commit_and_versions_are_named_once_for_all_that_share_them(report: ModuleType, tmp_path: Path) -> None:
    other = results("operator_scale", [{"what": "writes", "value": 0.0}], commit="def456")
    text = written(report, tmp_path, SERVE, results("strategies", []), other)
    place = "EPYC, 2 CPUs, Linux-6, Python 3.11.7; commit `abc123`; torch 2.13"
    assert len(re.findall(rf"^- strategies, serve: {place}", text, re.M)) == 1
    assert "commit `def456`" in text


def test_benchmark_may_have_several_results_files(report: ModuleType, tmp_path: Path) -> None:
    parts = [results(f"operator_scale_{part}", [{"value": part}]) for part in ("a", "b")]
    text = written(report, tmp_path, *parts)
    assert text.count("## The operator with 1,000 services\n") == 1
    assert "### operator_scale_a" in text
    assert "### operator_scale_b" in text


def test_file_of_an_earlier_version_is_ignored_with_a_message(
    report: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = written(report, tmp_path, SERVE, {"name": "operator_scale", "figures": {}})
    assert "## The operator" not in text
    assert "operator_scale.json is ignored" in capsys.readouterr().err


def test_plots_of_earlier_runs_are_deleted(report: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "docs/benchmarks").mkdir(parents=True)
    (tmp_path / "docs/benchmarks/old.svg").write_text("<svg/>")
    written(report, tmp_path, SERVE)
    assert [path.name for path in (tmp_path / "docs/benchmarks").iterdir()] == ["serve.svg"]


def test_every_benchmark_has_a_docstring(report: ModuleType) -> None:
    for benchmark in report.BENCHMARKS:
        assert len(report.about(benchmark.script)) > 100, benchmark.name
    in_make_bench = sum(benchmark.minutes for benchmark in report.BENCHMARKS if benchmark.in_make_bench)
    assert in_make_bench < 20


def test_runner_collects_the_checks_that_its_benchmarks_wrote(report: ModuleType, tmp_path: Path) -> None:
    of_formats = results("compare_formats", [], checks=CHECKS)
    written(report, tmp_path, SERVE, results("strategies", [], checks=CHECKS), of_formats)
    os.utime(tmp_path / "results/compare_formats.json", (0, 0))
    run = importlib.import_module("run")
    by_name = {each.name: each for each in report.BENCHMARKS}
    found = {
        name: run.checks([by_name[name]], 1.0, tmp_path / "results") for name in ("strategies", "serve", "compare")
    }
    assert [check.met for check in found["strategies"]] == [True, False]
    assert found["serve"] == found["compare"] == []
