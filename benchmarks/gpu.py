"""`make bench-gpu`: what needs a GPU, in less than nine minutes; `make bench-gpu-models`: all models there, in six.

Ceilings, start-up by phase, memory compared with the plan, decode and prefill as shares of the ceilings, host
synchronisations, throughput compared with transformers, attention, quantised products and experts, the attention race,
sampling, swapping, kernels compared with torch, out-of-memory handling, overlap on and off; the most important first.
The other command compares model families, quantised formats and adapters with transformers, and measures a model by
transformers' code and one with adapters. Needs torch with CUDA, Triton, msgspec, pydantic, safetensors and
transformers; no HTTP server. gpu.json and gpu.md are rewritten after each section. Sections that are not run keep their
results of the same GPU, each with its commit, so that they can be run one by one.

    python benchmarks/gpu.py [--only NAME …] [--minutes 8.5] [--folder DIR] [--out DIR]
    python benchmarks/gpu.py --rehearse    every section with small sizes on a CPU, to test that it runs (a minute)
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PACKAGES = [str(HERE.parent / package) for package in ("planner", "server", "benchmarks", "e2e")]
sys.path[:0] = PACKAGES  # a machine with a GPU may have this checkout without an installed package

from gpu_bench.relay import State, Worker, relay  # noqa: E402 - the paths come first
from gpu_bench.sections import MODELS, SECTIONS, Findings  # noqa: E402 - likewise
from llmservice_bench.results import FOLDER, Check, Results, commit, replace  # noqa: E402 - likewise
from llmservice_server.ipc.environment import for_computing  # noqa: E402 - likewise


def table(gpu: str, found: Findings) -> str:
    """The report in Markdown: checks, notes and rows."""
    lines = [f"# On {gpu}", "", "| what | target | measured | |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {check.what} | {check.bound} {check.unit} | {check.measured:.4g} | {'met' if check.met else '**MISSED**'} |"
        for check in found.checks
    ]
    lines += ["", *(f"- {note}" for note in found.notes), ""]
    for row in found.rows:
        figures = (f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items())
        lines.append("- " + ", ".join(figures))
    return "\n".join(lines) + "\n"


Recorded = tuple[dict[str, Any], Findings]
"""The row of a section's time, commit and number of rows, checks and notes; and these, without it."""


def recorded(path: Path, gpu: str) -> dict[str, Recorded]:
    """The sections in an earlier gpu.json of the same GPU; none if there is no such file."""
    if not path.exists() or (before := json.loads(path.read_text(encoding="utf-8")))["settings"]["gpu"] != gpu:
        return {}
    rows, notes = iter(before["rows"]), iter(before["notes"])
    checks = (Check(*(check[key] for key in ("what", "bound", "measured", "unit"))) for check in before["checks"])
    found: dict[str, Recorded] = {}
    for time in [row for row in before["rows"] if row["part"] == "time"]:
        part = Findings(
            [*islice(rows, time["rows"])], [*islice(checks, time["checks"])], [*islice(notes, time["notes"])]
        )
        found[time["section"]] = time, part
    return {name: each for name, each in found.items() if name in SECTIONS}  # not that a whole run failed


def with_time(name: str, found: Findings) -> Recorded:
    """A section that was run now."""
    rows = [row for row in found.rows if row["part"] != "time"]
    counts = {"rows": len(rows), "checks": len(found.checks), "notes": len(found.notes)}
    time: dict[str, Any] = next((row for row in found.rows if row["part"] == "time"), {"part": "time", "section": name})
    return {**time, "commit": commit(), **counts}, Findings(rows, found.checks, found.notes)


def write(state: State, model: str, out: Path, before: Mapping[str, Recorded]) -> None:
    """Write gpu.json and gpu.md; the times of the sections come last."""
    gpu = state.gpu or "no GPU"
    now = {name: with_time(name, found) for name, found in state.found.items() if found.ran or name not in before}
    sections = {**dict.fromkeys(SECTIONS), **before, **now}
    times, found = [], Findings()
    for time, part in filter(None, sections.values()):
        times.append(time)
        found.add(part)
    found.rows += times
    found.notes += [f"{name} was not run yet when this was written" for name in state.left if name not in before]
    out.mkdir(parents=True, exist_ok=True)
    replace(out / "gpu.md", table(gpu, found))
    Results("gpu", found.rows, found.checks, {"gpu": gpu, "model": model}, found.notes).write(out)
    sys.stdout.flush()  # so that the output is complete if this process is killed


def main(only: Sequence[str], minutes: float, folder: Path, out: Path, rehearse: bool) -> int:
    """Returns 2 without a GPU, else 0, also if targets are missed."""
    environment = for_computing(os.environ) | {
        "PYTHONPATH": os.pathsep.join([*PACKAGES, os.environ.get("PYTHONPATH", "")])
    }
    with tempfile.TemporaryDirectory() as scratch:
        model = "Llama 3 8B's shape"
        command = [sys.executable, "-m", "gpu_bench.worker", "--folder", str(folder)]
        if rehearse:
            environment["TRITON_INTERPRET"], model = "1", "a toy"
            command = [*command[:-1], str(Path(scratch) / "toy"), "--rehearse"]
        worker = Worker(command, environment, Path(scratch) / "sections.jsonl")
        chosen = only or (SECTIONS if rehearse else [name for name in SECTIONS if name not in MODELS])
        names = [name for name in SECTIONS if name in chosen]
        before: dict[str, Recorded] | None = None

        def on_progress(state: State) -> None:
            nonlocal before
            if before is None:
                before = recorded(out / "gpu.json", state.gpu or "")
            write(state, model, out, before)

        state = relay(names, worker, minutes * 60, on_progress)
    if state.gpu is None:
        print(*(note for found in state.found.values() for note in found.notes), sep="\n", file=sys.stderr)
        return 2
    on_progress(state)
    print((out / "gpu.md").read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], choices=SECTIONS, metavar="NAME", help=", ".join(SECTIONS))
    parser.add_argument("--minutes", type=float, default=8.5, help="time limit of the run")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "llmservice-bench" / "llama-8b")
    parser.add_argument("--out", type=Path, help="folder of the results: benchmarks/results, or a new one")
    parser.add_argument("--rehearse", action="store_true", help="small sizes without a GPU: the figures mean nothing")
    args = parser.parse_args()
    out = args.out or (Path(tempfile.mkdtemp(prefix="rehearsal-")) if args.rehearse else FOLDER)
    sys.exit(main(args.only, args.minutes, args.folder, out, args.rehearse))
