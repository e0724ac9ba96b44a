"""What the scheduler's ideas are worth on this machine: batching, chunked prefill, paging and the prefix cache.

The engine runs in this process, without HTTP, on small models. Requests come from the Azure conversation trace,
scaled, and arrive as a Poisson process. A strategy's capacity is the highest rate at which its p99 TTFT keeps one and
the same bound, a multiple of what a request shows when nobody else is there.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence

import numpy as np

from llmservice_bench.lengths import Lengths, draw, read_trace, scaled_to
from llmservice_bench.models import SHAPES, checkpoint
from llmservice_bench.results import Results
from scheduling import batching, chunked_prefill, paging, prefix_cache
from scheduling.findings import HEADER, Findings, Setup


def small() -> Setup:
    """A model whose decode steps are bound by memory, as a large one's are: what batching is for."""
    return _setup("small", "bfloat16", scaled_to(read_trace(), Lengths(400, 256)), 100)


def toy() -> Setup:
    """A model that is quick enough for longer prompts: the trace at a quarter of its size."""
    return _setup("toy", "float32", [each.scaled(0.25) for each in read_trace()], 200)


def _setup(model: str, dtype: str, lengths: Sequence[Lengths], count: int) -> Setup:
    drawn = list(itertools.islice(draw(lengths, np.random.default_rng(0)), count))
    return Setup(checkpoint(model, dtype), SHAPES[model].vocab_size, drawn)


PARTS: dict[str, tuple[Callable[[], Setup], Callable[[Setup], Findings]]] = {
    "batching": (small, batching.measure),
    "paging": (toy, paging.measure),
    "chunks": (toy, chunked_prefill.measure),
    "prefix": (toy, prefix_cache.measure),
}


def main(parts: Sequence[str]) -> int:
    print(HEADER)
    found = [measure(setup()) for setup, measure in (PARTS[part] for part in parts)]
    rows = [row for each in found for row in each.rows]
    checks = [check for each in found for check in each.checks]
    print(*(check.line() for check in checks), sep="\n")
    Results("strategies", rows, checks, {"parts": list(parts)}).write()
    return 1 if any(row["failed"] for row in rows) else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS), help="parts")
    sys.exit(main(parser.parse_args().only))
