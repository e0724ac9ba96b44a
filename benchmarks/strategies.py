"""What the scheduler's ideas are worth on this machine: batching, chunked prefill, paging and the prefix cache.

The engine runs in this process, without HTTP, on a small model. Requests come from the Azure conversation trace,
scaled, and arrive as a Poisson process. A strategy's capacity is the highest rate at which its p99 TTFT keeps one and
the same promise, a strict and a relaxed one: 5 and 25 times that of requests which have the engine to themselves. A run
lasts ten times the promise, or the time in which all places are taken anew ten times, so that a rate which is not
sustained breaks it.

Who comes to a batch on its way waits for its end. A promise shorter than that leaves static and dynamic batching next
to nothing; the longer it is, the nearer the ratios come to those with all requests there at once, where nobody minds
waiting. The sequences of a step and its time tell why these are low: a batch that drains has fewer sequences, but
where a step takes the longer the more are in it, as here, a step of few is cheap.
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
from scheduling import batching, chunked_prefill, paging, prefix_cache, saturation
from scheduling.findings import HEADER, Findings, Setup

MODEL = "toy"
REQUESTS = 200
"""Of every run, at most."""


def chatting() -> Setup:
    """Short prompts and long answers: the trace's two lengths, each scaled to what the model bears."""
    return _setup(scaled_to(read_trace(), Lengths(400, 256)))


def chatting_with_small() -> Setup:
    """The same at half the length, with 12 layers of 768, whose steps are nothing but the model."""
    return _setup(scaled_to(read_trace(), Lengths(200, 128)), "small", "bfloat16")


def reading() -> Setup:
    """Prompts several times as long as answers: the trace at a quarter of its size."""
    return _setup([each.scaled(0.25) for each in read_trace()])


def _setup(lengths: Sequence[Lengths], model: str = MODEL, dtype: str = "float32") -> Setup:
    drawn = list(itertools.islice(draw(lengths, np.random.default_rng(0)), REQUESTS))
    return Setup(checkpoint(model, dtype), SHAPES[model].vocab_size, drawn, f"{model}, {dtype}")


PARTS: dict[str, tuple[Callable[[], Setup], Callable[[Setup], Findings]]] = {
    "batching": (chatting, batching.measure),
    "saturation": (chatting_with_small, saturation.measure),
    "paging": (reading, paging.measure),
    "chunks": (reading, chunked_prefill.measure),
    "prefix": (reading, prefix_cache.measure),
}


def main(parts: Sequence[str]) -> int:
    rows: list[dict[str, Any]] = []
    checks: list[Check] = []
    notes: list[str] = []
    for setup, measure in (PARTS[part] for part in parts):
        print(HEADER)
        found = measure(setup())
        print(*(check.line() for check in found.checks), "", sep="\n", flush=True)
        rows += found.rows
        checks += found.checks
        notes += found.notes
    Results("strategies", rows, checks, {"model": MODEL, "requests": REQUESTS}, notes).write()
    return 1 if any(row["failed"] for row in rows) else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS), help="parts")
    sys.exit(main(parser.parse_args().only))
