"""What the scheduler's ideas are worth on this machine: batching, chunked prefill, paging and the prefix cache.

The engine runs in this process, without HTTP, on a small model. Requests come from the Azure conversation trace,
scaled, and arrive as a Poisson process. A strategy's capacity is the highest rate at which its p99 TTFT keeps one and
the same promise, a strict and a relaxed one: 5 and 25 times that of requests which have the engine to themselves.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from llmservice_bench.lengths import Lengths, draw, read_trace, scaled_to
from llmservice_bench.models import SHAPES, checkpoint
from llmservice_bench.results import Check, Results
from scheduling import batching, chunked_prefill, paging, prefix_cache
from scheduling.findings import HEADER, Findings, Setup

MODEL = "toy"
REQUESTS = 200
"""Of every run, at most."""


def chatting() -> Setup:
    """Short prompts and long answers: the trace's two lengths, each scaled to what the model bears."""
    return _setup(scaled_to(read_trace(), Lengths(400, 256)))


def reading() -> Setup:
    """Prompts several times as long as answers: the trace at a quarter of its size."""
    return _setup([each.scaled(0.25) for each in read_trace()])


def _setup(lengths: Sequence[Lengths]) -> Setup:
    drawn = list(itertools.islice(draw(lengths, np.random.default_rng(0)), REQUESTS))
    return Setup(checkpoint(MODEL), SHAPES[MODEL].vocab_size, drawn)


PARTS: dict[str, tuple[Callable[[], Setup], Callable[[Setup], Findings]]] = {
    "batching": (chatting, batching.measure),
    "paging": (reading, paging.measure),
    "chunks": (reading, chunked_prefill.measure),
    "prefix": (reading, prefix_cache.measure),
}


def main(parts: Sequence[str]) -> int:
    rows: list[dict[str, Any]] = []
    checks: list[Check] = []
    for setup, measure in (PARTS[part] for part in parts):
        print(HEADER)
        found = measure(setup())
        print(*(check.line() for check in found.checks), "", sep="\n", flush=True)
        rows += found.rows
        checks += found.checks
    Results("strategies", rows, checks, {"model": MODEL, "requests": REQUESTS}).write()
    return 1 if any(row["failed"] for row in rows) else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS), help="parts")
    sys.exit(main(parser.parse_args().only))
