"""Each section's own code from its first line to its last, on a processor and a toy: what it finds, and of what kind.

The engine, the kernels (interpreted), transformers and the files are real; what they reach means nothing.
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

import harness.triton_interpreter  # noqa: F401 - what the sections import is not compiled
from card import worker
from card.rehearsal import TOY, Processor
from card.section_log import SectionLog, SectionWriter
from card.sections import SECTIONS
from card.stand import Stand

GPU = Path(__file__).parents[3] / "benchmarks" / "gpu.py"
STARTS_S = 25  # of the first process, and of the one that follows transformers
LATENCIES = {"TTFT p50 s", "TTFT p99 s", "ITL p50 s", "ITL p99 s"}

PARTS: dict[str, dict[str, int]] = {
    "ceilings": {"ceilings": 1},
    "checkpoint": {"checkpoint": 1},
    "start": {"start": 1, "start by phase": 1, "memory": 1},
    "steps": {"decode step": 2, "prefill step": 1},
    "host_syncs": {"host waits": 4},
    "throughput": {"2 in flight": 1},
    "transformers": {"2 in flight": 1},
    "kernels": {"paged decode": 4, "prefill attention": 1},
    "agreement": {"agreement": 4},
    "attention_race": {"attention race": 2},
    "sampling": {"sampling": 8},
    "swapping": {"swap out": 1},
    "out_of_memory": {"out of memory": 1},
    "overlap": {"decode loop": 2, "card busy, 2 decodes": 1, "2 in flight": 2},
}
"""By section, its rows by what they are of."""

TARGETS: dict[str, tuple[str, ...]] = {
    "start": ("ready beyond reading the weights", "planned KV blocks differ from measured"),
    "steps": ("least share of copy bandwidth", "share of the matmul rate"),
    "host_syncs": ("host synchronisations a decode step, greedy", "host synchronisations a decode step, everything"),
    "transformers": ("÷ transformers' continuous batching",),
    "overlap": ("share of a decode loop in which the card computes", "with overlap ÷ without"),
}
"""What is promised of a card, by the section whose checks say so."""

KEPT: dict[str, tuple[str, ...]] = {
    "start": ("attention by our kernels",),
    "host_syncs": ("host synchronisations",),
    "agreement": ("float32", "float16", "bfloat16"),
    "sampling": ("our kernel cuts top-k and top-p",),
    "swapping": ("came back changed",),
    "out_of_memory": ("requests that fail beside", "requests that end", "blocks held afterwards"),
}
"""Checks that hold on a processor too, as no speed is in them."""


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    stand = Stand(Processor(), TOY, tmp_path_factory.mktemp("toy"))
    stand.output_tokens_per_s = 1.0  # whichever section is run alone
    yield stand
    stand.clear()


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_finds_what_it_is_for(name: str, stand: Stand) -> None:
    found = worker.sections()[name](stand)
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
    for promised in TARGETS.get(name, ()):
        assert any(promised in what for what in whats), (promised, whats)
    for kept in KEPT.get(name, ()):
        there = [check for check in found.checks if kept in check.what]
        assert there
        assert all(check.met for check in there), there


def test_a_run_that_is_killed_leaves_what_it_had_and_nobody_on_the_card(tmp_path: Path) -> None:
    command = [sys.executable, str(GPU), "--rehearse", "--out", str(tmp_path), "--only", "ceilings", "start"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        assert run.stdout is not None
        assert any(line.startswith("written:") for line in run.stdout)
        os.kill(run.pid, signal.SIGKILL)
        run.stdout.read()  # ends when the last process that may write there has, the worker too
    results = json.loads((tmp_path / "gpu.json").read_text())
    assert results["rows"][0]["part"] == "ceilings"
    assert results["notes"] == ["start had not been run when this was written"]
    assert "- start had not been run when this was written" in (tmp_path / "gpu.md").read_text()


def test_what_fails_costs_the_other_sections_nothing(tmp_path: Path) -> None:
    folder, log = tmp_path / "a file", tmp_path / "log"
    folder.touch()
    stand = Stand(Processor(), TOY, folder)
    assert worker.run(stand, ["checkpoint", "ceilings"], 60.0, SectionWriter(log)) == 0
    done = SectionLog.read(log).done
    assert [check.what for check in done["checkpoint"].checks] == ["checkpoint ran to its end"]
    assert "FileExistsError" in done["checkpoint"].notes[0]
    assert [row["part"] for row in done["ceilings"].rows] == ["ceilings", "time"]


def test_no_section_is_expected_to_be_run_when_the_time_is_over() -> None:
    assert tuple(worker.sections()) == tuple(SECTIONS)
    assert sum(SECTIONS.values()) + STARTS_S <= 510
