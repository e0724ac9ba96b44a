"""What the scheduler's ideas are worth on this machine: batching, chunked prefill, paging and the prefix cache.

The engine runs in this process, without HTTP, on a small model. Requests come from the Azure conversation trace,
scaled, and arrive as a Poisson process. A strategy's capacity is the highest rate at which its p99 TTFT keeps one and
the same bound: the time that the longest answers take when nobody else is there (p99 of an unloaded request's E2E).
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence

import numpy as np

from llmservice_bench.lengths import Lengths, draw, read_trace
from llmservice_bench.models import SHAPES, checkpoint
from llmservice_bench.results import Results
from scheduling import batching, chunked_prefill, prefix_cache
from scheduling.findings import HEADER, Setup

PARTS = {"batching": batching.measure, "chunks": chunked_prefill.measure, "prefix": prefix_cache.measure}
MODEL = "toy"


def requests(count: int, scale: float) -> list[Lengths]:
    """Cut where the model's context ends."""
    trace = itertools.islice(draw(read_trace(), np.random.default_rng(0)), count)
    scaled = (each.scaled(scale) for each in trace)
    return [Lengths(min(each.prompt_tokens, 1400), min(each.output_tokens, 400)) for each in scaled]


def main(parts: Sequence[str], count: int, scale: float) -> int:
    shape = SHAPES[MODEL]
    setup = Setup(checkpoint(MODEL), shape.vocab_size, requests(count, scale))
    print(HEADER)
    found = [PARTS[part](setup) for part in parts]
    rows = [row for each in found for row in each.rows]
    checks = [check for each in found for check in each.checks]
    print(*(check.line() for check in checks), sep="\n")
    Results("strategies", rows, checks, {"model": MODEL, "requests": count, "scale": scale}).write()
    return 1 if any(row["failed"] for row in rows) else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS), help="parts")
    parser.add_argument("--requests", type=int, default=200, help="of the trace, for every run")
    parser.add_argument("--scale", type=float, default=0.25, help="multiply the trace's lengths by this")
    arguments = parser.parse_args()
    sys.exit(main(arguments.only, arguments.requests, arguments.scale))
