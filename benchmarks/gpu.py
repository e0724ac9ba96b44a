"""`make bench-gpu`: everything that only a card can show, in one call of less than nine minutes.

Ceilings, kernels against torch, decode and prefill as shares of the ceilings, throughput beside transformers, start,
memory against the plan, host synchronisations, swapping, memory that runs out, overlap on and off. Needs torch with
CUDA, Triton, msgspec, safetensors and transformers; no HTTP server. Writes gpu.json and gpu.md.

python benchmarks/gpu.py [--only NAME …] [--minutes 8.5] [--folder DIR] [--out DIR]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
for house in ("planner", "server", "benchmarks"):  # a machine with a card may have this checkout and nothing installed
    sys.path.insert(0, str(HERE.parent / house))

from card.section import Findings, run_in_turn  # noqa: E402 - the paths come first
from llmservice_bench.results import FOLDER, Results  # noqa: E402 - likewise


def sections(folder: Path) -> dict[str, Callable[[], Findings]]:
    """In the order of what is most needed, should the time not do for all."""
    from card import ceilings, engine, faults, kernels, llama, overlap, sampling, throughput

    limits = ceilings.measure()
    print(
        f"copy {limits.copy_bytes_per_s / 1e12:.2f} TB/s, matmul {limits.matmul_flops / 1e12:.0f} TFLOP/s", flush=True
    )
    first = Findings(
        rows=[
            {
                "part": "ceilings",
                "copy TB/s": limits.copy_bytes_per_s / 1e12,
                "matmul TFLOP/s": limits.matmul_flops / 1e12,
            }
        ]
    )

    def with_release(section: Callable[[], Findings]) -> Findings:
        try:
            return section()
        finally:
            engine.release()

    def written() -> Findings:
        llama.write(folder)
        return Findings()

    found: dict[str, Callable[[], Findings]] = {
        "ceilings": lambda: first,
        "agreement": kernels.agreement,
        "kernels": partial(kernels.speed, limits),
        "sampling": sampling.measure,
        "checkpoint": written,
        "start": partial(engine.readiness, folder),
        "steps": partial(engine.steps, folder, limits),
        "throughput": partial(throughput.compare, folder),
        "host_syncs": partial(overlap.host_syncs, folder),
        "swapping": faults.swapping,
        "out_of_memory": partial(faults.out_of_memory, folder),
        "overlap": partial(overlap.compare, folder),
    }
    return {name: partial(with_release, section) for name, section in found.items()}


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
    import torch

    if not torch.cuda.is_available():
        print("bench-gpu measures a CUDA card, and torch sees none here", file=sys.stderr)
        return 2
    card = torch.cuda.get_device_name()
    chosen = {name: section for name, section in sections(folder).items() if not only or name in only}
    found = run_in_turn(chosen, minutes * 60)
    print(*(check.line() for check in found.checks), *found.notes, sep="\n")
    Results("gpu", found.rows, found.checks, {"card": card, "model": "Llama 3 8B's shape"}, found.notes).write(out)
    (out / "gpu.md").write_text(table(card, found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="sections")
    parser.add_argument("--minutes", type=float, default=8.5, help="after which no further section is begun")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "llmservice-bench" / "llama-8b")
    parser.add_argument("--out", type=Path, default=FOLDER, help="where gpu.json and gpu.md go")
    args = parser.parse_args()
    sys.exit(main(args.only, args.minutes, args.folder, args.out))
