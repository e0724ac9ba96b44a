"""`make bench-gpu`: everything that only a card can show, in one call of less than nine minutes.

Ceilings, kernels against torch, the race for prompts, decode and prefill as shares of the ceilings, throughput beside
transformers, start and its parts, memory against the plan, host synchronisations, swapping, memory that runs out,
overlap on and off. Needs torch with CUDA, Triton, msgspec, safetensors and transformers; no HTTP server. Writes
gpu.json and gpu.md.

python benchmarks/gpu.py [--only NAME …] [--minutes 8.5] [--folder DIR] [--out DIR]
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

from card.names import SECTIONS  # noqa: E402 - the paths come first
from card.relay import Worker, relay  # noqa: E402 - likewise
from card.section import Findings  # noqa: E402 - likewise
from llmservice_bench.results import FOLDER, Results  # noqa: E402 - likewise
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


def main(only: Sequence[str], minutes: float, folder: Path, out: Path) -> int:
    """2 where there is no card; else 0, whatever was met or missed."""
    environment = for_computing(os.environ) | {
        "PYTHONPATH": os.pathsep.join([*HOUSES, os.environ.get("PYTHONPATH", "")])
    }
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "card.worker", "--folder", str(folder)]
        worker = Worker(command, environment, Path(scratch) / "sections.jsonl")
        found, card = relay([name for name in SECTIONS if not only or name in only], worker, minutes * 60)
    if card is None:
        print(*found.notes, sep="\n", file=sys.stderr)
        return 2
    print(*(check.line() for check in found.checks), *found.notes, sep="\n")
    Results("gpu", found.rows, found.checks, {"card": card, "model": "Llama 3 8B's shape"}, found.notes).write(out)
    (out / "gpu.md").write_text(table(card, found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], choices=SECTIONS, metavar="NAME", help=", ".join(SECTIONS))
    parser.add_argument("--minutes", type=float, default=8.5, help="after which the run is ended, with what it has")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "llmservice-bench" / "llama-8b")
    parser.add_argument("--out", type=Path, default=FOLDER, help="where gpu.json and gpu.md go")
    args = parser.parse_args()
    sys.exit(main(args.only, args.minutes, args.folder, args.out))
