"""`make bench-gpu`: everything that only a card can show, in one call of less than nine minutes.

Ceilings, start and its parts, memory against the plan, decode and prefill as shares of the ceilings, the host's waits,
throughput beside transformers, kernels against torch, the race for prompts, swapping, memory that runs out, overlap on
and off; what is most needed first. Needs torch with CUDA, Triton, msgspec, safetensors and transformers; no HTTP
server. gpu.json and gpu.md are written anew after each section, so that a run that is ended leaves what it had.

    python benchmarks/gpu.py [--only NAME …] [--minutes 8.5] [--folder DIR] [--out DIR]
    python benchmarks/gpu.py --rehearse    every section small, on a CPU: that it runs, and no figure (a minute)
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
HOUSES = [str(HERE.parent / house) for house in ("planner", "server", "benchmarks")]
sys.path[:0] = HOUSES  # a machine with a card may have this checkout and nothing installed

from card.relay import State, Worker, relay  # noqa: E402 - the paths come first
from card.section import Findings  # noqa: E402 - likewise
from card.sections import SECTIONS  # noqa: E402 - likewise
from llmservice_bench.results import FOLDER, Results, replace  # noqa: E402 - likewise
from llmservice_server.environment import for_computing  # noqa: E402 - likewise


def table(card: str, found: Findings) -> str:
    """The report, in Markdown: verdicts, rows, and what did not run."""
    lines = [f"# On {card}", "", "| what | target | measured | |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {check.what} | {check.bound} {check.unit} | {check.measured:.4g} | {'met' if check.met else '**MISSED**'} |"
        for check in found.checks
    ]
    lines += ["", *(f"- {note}" for note in found.notes), ""]
    for row in found.rows:
        figures = (f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items())
        lines.append("- " + ", ".join(figures))
    return "\n".join(lines) + "\n"


def write(state: State, model: str, out: Path) -> None:
    """gpu.json and gpu.md, in the place of those before; what the sections took comes last."""
    card, found = state.card or "no card", state.found
    notes = [*found.notes, *(f"{name} had not been run when this was written" for name in state.left)]
    told = Findings(sorted(found.rows, key=lambda row: row["part"] == "time"), found.checks, notes)
    out.mkdir(parents=True, exist_ok=True)
    replace(out / "gpu.md", table(card, told))
    Results("gpu", told.rows, told.checks, {"card": card, "model": model}, told.notes).write(out)
    sys.stdout.flush()  # whoever ends us has seen it


def main(only: Sequence[str], minutes: float, folder: Path, out: Path, rehearse: bool) -> int:
    """2 where there is no card; else 0, whatever was met or missed."""
    environment = for_computing(os.environ) | {
        "PYTHONPATH": os.pathsep.join([*HOUSES, os.environ.get("PYTHONPATH", "")])
    }
    with tempfile.TemporaryDirectory() as scratch:
        model = "Llama 3 8B's shape"
        command = [sys.executable, "-m", "card.worker", "--folder", str(folder)]
        if rehearse:
            environment["TRITON_INTERPRET"], model = "1", "a toy"
            command = [*command[:-1], str(Path(scratch) / "toy"), "--rehearse"]
        worker = Worker(command, environment, Path(scratch) / "sections.jsonl")
        names = [name for name in SECTIONS if not only or name in only]
        state = relay(names, worker, minutes * 60, lambda state: write(state, model, out))
    if state.card is None:
        print(*state.found.notes, sep="\n", file=sys.stderr)
        return 2
    write(state, model, out)
    print((out / "gpu.md").read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], choices=SECTIONS, metavar="NAME", help=", ".join(SECTIONS))
    parser.add_argument("--minutes", type=float, default=8.5, help="after which the run is ended, with what it has")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "llmservice-bench" / "llama-8b")
    parser.add_argument("--out", type=Path, help="where gpu.json and gpu.md go: benchmarks/results, or a new folder")
    parser.add_argument("--rehearse", action="store_true", help="small, and without a card: its figures mean nothing")
    args = parser.parse_args()
    out = args.out or (Path(tempfile.mkdtemp(prefix="rehearsal-")) if args.rehearse else FOLDER)
    sys.exit(main(args.only, args.minutes, args.folder, out, args.rehearse))
