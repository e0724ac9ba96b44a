"""Every section on the CPU with a toy model: the rows and checks that it returns.

The engine, the kernels (interpreted), transformers and the files are real; the figures mean nothing.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import harness.gpu.triton_interpreter  # noqa: F401 - what the sections import is not compiled
from gpu_bench import worker
from gpu_bench.bench import Bench
from gpu_bench.rehearsal import TOY, CPUDevice
from gpu_bench.sections import MODELS, SECTIONS, SectionLog, SectionWriter

pytestmark = pytest.mark.slow

GPU = Path(__file__).parents[3] / "benchmarks" / "gpu.py"
STARTS_S = 25  # of the first process and of the one after transformers
LATENCIES = {"TTFT p50 s", "TTFT p99 s", "ITL p50 s", "ITL p99 s"}

PARTS: dict[str, dict[str, int]] = {
    "ceilings": {"ceilings": 1},
    "checkpoint": {"checkpoint": 1},
    "start": {"start": 1, "start by phase": 1, "memory": 1},
    "steps": {"decode step": 2, "prefill step": 1, "mixed step": 1},
    "host_syncs": {"host waits": 4},
    "throughput": {"2 in flight": 1},
    "transformers": {"2 in flight": 1},
    "kernels": {"paged decode": 4, "prefill attention": 1},
    "quantized": {"product": 7},
    "experts": {"experts": 1},
    "agreement": {"agreement": 4},
    "families": {"family": 1},
    "formats": {"family": 2},
    "by_transformers": {"decode step of transformers' code": 2},
    "with_adapters": {"decode step with adapters": 2},
    "attention_race": {"attention race": 2},
    "sampling": {"sampling": 8},
    "swapping": {"swap out": 1},
    "out_of_memory": {"out of memory": 1},
    "overlap": {"decode loop": 2, "GPU busy, 2 decodes": 1, "2 in flight": 2},
}
"""The number of rows of each part, by section."""

TARGETS: dict[str, tuple[str, ...]] = {
    "start": ("ready beyond reading the weights", "planned KV blocks differ from measured"),
    "steps": ("least share of copy bandwidth", "share of the matmul rate"),
    "host_syncs": ("host synchronisations a decode step, greedy", "host synchronisations a decode step, everything"),
    "transformers": ("÷ transformers' continuous batching",),
    "experts": ("time ÷ reading the active ones", "time ÷ a loop over experts"),
    "overlap": ("share of a decode loop in which the GPU computes", "with overlap ÷ without"),
}
"""The targets on a GPU, by section."""

KEPT: dict[str, tuple[str, ...]] = {
    "start": ("attention by our kernels",),
    "host_syncs": ("host synchronisations",),
    "quantized": ("W4A16", "W8A16", "fp8 blocks"),
    "experts": ("differ from the loop",),
    "families": ("families computed in time", "that fail", "whose float32 tokens differ", "need a fallback"),
    "formats": ("formats computed in time", "that fail", "shortfall", "need a fallback"),
    "agreement": ("float32", "float16", "bfloat16"),
    "sampling": ("our sampling kernels agree",),
    "swapping": ("with changed content",),
    "out_of_memory": ("other requests that fail", "requests that finish", "blocks held afterwards"),
}
"""Checks that do not depend on speed and must be met on a CPU, too."""


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(CPUDevice(), TOY, tmp_path_factory.mktemp("toy"))
    bench.output_tokens_per_s = 1.0  # for a section that runs alone
    yield bench
    bench.clear()


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_returns_its_rows_and_checks(name: str, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # of the processes that a section starts
    found = worker.sections()[name](bench)
    parts: dict[str, int] = {}
    for row in found.rows:
        parts[row["part"]] = parts.get(row["part"], 0) + 1
        if any(key.endswith("tokens/s") for key in row):
            assert row.keys() >= LATENCIES or {"ITL p50 ms", "ITL p99 ms"} <= row.keys()
        for key, value in row.items():
            assert not isinstance(value, float) or (math.isfinite(value) and value >= 0), (key, value)
    assert parts == PARTS[name]
    json.dumps(found.rows)
    whats = [check.what for check in found.checks]
    for target in TARGETS.get(name, ()):
        assert any(target in what for what in whats), (target, whats)
    for kept in KEPT.get(name, ()):
        there = [check for check in found.checks if kept in check.what]
        assert there
        assert all(check.met for check in there), there


def test_a_killed_run_leaves_its_results_and_no_process(tmp_path: Path) -> None:
    command = [sys.executable, str(GPU), "--rehearse", "--out", str(tmp_path), "--only", "ceilings", "start"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        assert run.stdout is not None
        assert any(line.startswith("written:") for line in run.stdout)
        os.kill(run.pid, signal.SIGKILL)
        run.stdout.read()  # returns when the worker has ended, too
    results = json.loads((tmp_path / "gpu.json").read_text())
    assert results["rows"][0]["part"] == "ceilings"
    assert results["notes"] == ["start was not run yet when this was written"]
    assert "- start was not run yet when this was written" in (tmp_path / "gpu.md").read_text()


def test_a_failed_section_does_not_stop_the_others(tmp_path: Path) -> None:
    folder, log = tmp_path / "a file", tmp_path / "log"
    folder.touch()
    bench = Bench(CPUDevice(), TOY, folder)
    assert worker.run(bench, ["checkpoint", "ceilings"], 60.0, SectionWriter(log)) == 0
    done = SectionLog.read(log).done
    assert [check.what for check in done["checkpoint"].checks] == ["checkpoint completed"]
    assert "FileExistsError" in done["checkpoint"].notes[0]
    assert [row["part"] for row in done["ceilings"].rows] == ["ceilings", "time"]


def test_the_expected_times_fit_the_time_limit() -> None:
    assert tuple(worker.sections()) == tuple(SECTIONS)
    for names in (SECTIONS.keys() - MODELS, MODELS):
        assert sum(SECTIONS[name] for name in names) + STARTS_S <= 510
