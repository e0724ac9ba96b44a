"""Decode, prefill and attention on this CPU compared with its memory bandwidth and arithmetic.

The ceilings are measured before each phase by reading a large array and by a large matrix product; the best counts. A
model with 12 layers and hidden size 768 runs in float32 and in bfloat16 with the server's settings.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from llmservice_server.ipc.environment import for_computing

os.environ.update(for_computing(os.environ))  # before torch is imported, so that threads wait as in a server
os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise torch.profiler logs each start

import torch

from llmservice_bench.models import checkpoint
from llmservice_bench.profile.attention_ratio import SHAPES, compare
from llmservice_bench.profile.benchmark import open_engine, profile_phases, table
from llmservice_bench.profile.phase import Phase
from llmservice_bench.results import Check, Results
from llmservice_server.engine.config import DType

MODEL = "small"
PHASES = (
    *(Phase("prefill", 1, length) for length in (128, 512, 1024)),
    *(Phase("decode", num_seqs, 128) for num_seqs in (1, 8, 32, 64)),
    Phase("decode", 1, 1024),
    Phase("decode", 32, 512),
)
DTYPES: dict[DType, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
KINDS = ("ceilings", "prefill", "decode", "attention")
MOST_BY_PRODUCTS = "<= 1.5"
MOST_BY_CONTIGUOUS = "<= 1.5"


def profile_model(folder: Path, name: DType) -> tuple[list[dict[str, Any]], list[Check]]:
    engine = open_engine(folder, PHASES, dtype=name)
    ceilings, rows = profile_phases(engine, PHASES)
    print("\n".join(["", *table(ceilings, rows)]))
    at_32 = next(row for row in rows if row["phase"] == "decode 32 x 128")
    check = Check(
        f"decode at 32 in flight ÷ its matrix products alone, {name}", MOST_BY_PRODUCTS, at_32["step_by_products"]
    )
    named = [{"kind": phase.kind, **row} for phase, row in zip(PHASES, rows, strict=True)]
    return [{"kind": "ceilings", **ceilings.as_dict()}, *named], [check]


def compare_attention(name: DType) -> tuple[list[dict[str, Any]], list[Check]]:
    rows = [compare(shape, DTYPES[name]) for shape in SHAPES]
    print(f"\n{'attention, ' + name:<28}{'paged ms':>10}{'contiguous ms':>15}{'ratio':>8}")
    for row in rows:
        print(
            f"{row['shape']:<28}{row['paged_ms']:>10.3f}{row['contiguous_ms']:>15.3f}{row['paged_by_contiguous']:>8.2f}"
        )
    worst = max(rows, key=lambda row: row["paged_by_contiguous"])
    what = f"paged ÷ contiguous attention, {name}, worst of the shapes ({worst['shape']})"
    return [{"kind": "attention", **row} for row in rows], [
        Check(what, MOST_BY_CONTIGUOUS, worst["paged_by_contiguous"])
    ]


def main() -> None:
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    checks: list[Check] = []
    folder = checkpoint(MODEL)
    for dtype in DTYPES:
        for more_rows, more_checks in (profile_model(folder, dtype), compare_attention(dtype)):
            rows += more_rows
            checks += more_checks
    rows.sort(key=lambda row: KINDS.index(row["kind"]))
    print("\n" + "\n".join(check.line() for check in checks))
    Results("roofline", rows, checks, {"threads": torch.get_num_threads()}).write()


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
