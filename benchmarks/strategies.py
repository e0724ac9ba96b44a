"""The effect of continuous batching, chunked prefill, paging and the prefix cache on this machine.

The engine runs in this process, without HTTP, on a small model. Requests have the scaled lengths of the Azure
conversation trace and arrive as a Poisson process. The capacity of a strategy is the highest rate at which its p99 TTFT
meets a target: 5 (strict) or 25 (relaxed) times the p99 TTFT on an idle engine. A run lasts ten times the target or
ten turnovers of the batch, so that a rate which is not sustained misses the target. A run that misses it is repeated,
and of each request the better result counts, as a stall of the machine rarely affects the same one twice.

With static and dynamic batching, a request that arrives during a batch waits for its end. With a shorter target their
capacity is almost zero; with a longer one, the ratios approach those of requests that all arrive at once. The number of
sequences per step and the time of a step explain the latter: a draining batch has fewer sequences, but on this machine
such a step is also faster.

Admission is compared in simulated time, with the real scheduler: all requests arrive at once, a step takes what the
planner's roofline says of an 8B model on an H100, and a pool of 48k tokens bounds the batch. The scheduler does not
know where an answer ends. The same requests go through transformers' own schedulers and paged cache, with our block
size, tokens and sequences of a step, and with its defaults: pages of 256 tokens, steps of 8,192. Fairness is measured
with the same steps: one client's thousand requests beside a client that sends one at a time. The orders of the batch
lane are compared with such steps too, on the whole engine.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from llmservice_bench.models import SHAPES, checkpoint
from llmservice_bench.results import Check, Results
from llmservice_bench.trace import Lengths, draw, read_trace, scaled_to
from scheduling import admission, batch_order, batching, chunked_prefill, fairness, kv_cache, saturation
from scheduling.findings import HEADER, Findings, Setup

MODEL = "toy"
REQUESTS = 200
"""Maximum number of requests of a run."""


def chatting() -> Setup:
    """Short prompts and long outputs: both lengths of the trace, scaled to the model's context."""
    return _setup(scaled_to(read_trace(), Lengths(400, 256)))


def chatting_with_small() -> Setup:
    """Half of these lengths, for the model with 12 layers and hidden size 768, whose steps have little host time."""
    return _setup(scaled_to(read_trace(), Lengths(200, 128)), "small", "bfloat16")


def reading() -> Setup:
    """Prompts several times as long as outputs: the trace at a quarter of its lengths."""
    return _setup([each.scaled(0.25) for each in read_trace()])


def _setup(lengths: Sequence[Lengths], model: str = MODEL, dtype: str = "float32") -> Setup:
    drawn = list(itertools.islice(draw(lengths, np.random.default_rng(0)), REQUESTS))
    return Setup(checkpoint(model, dtype), SHAPES[model].vocab_size, drawn, f"{model}, {dtype}")


PARTS: dict[str, Callable[[], Findings]] = {
    "batching": lambda: batching.measure(chatting()),
    "saturation": lambda: saturation.measure(chatting_with_small()),
    "paging": lambda: kv_cache.paging(reading()),
    "chunks": lambda: chunked_prefill.measure(reading()),
    "prefix": lambda: kv_cache.prefix_cache(reading()),
    "admission": admission.measure,
    "fairness": fairness.measure,
    "order": batch_order.measure,
}


def main(parts: Sequence[str]) -> int:
    rows: list[dict[str, Any]] = []
    checks: list[Check] = []
    notes: list[str] = []
    for part in parts:
        print(HEADER)
        found = PARTS[part]()
        print(*(check.line() for check in found.checks), "", sep="\n", flush=True)
        rows += found.rows
        checks += found.checks
        notes += found.notes
    if {*parts} == {*PARTS}:
        Results("strategies", rows, checks, {"model": MODEL, "requests": REQUESTS}, notes).write()
    return 1 if any(row.get("failed") for row in rows) else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", choices=PARTS, nargs="+", default=list(PARTS), help="parts, whose results are only printed"
    )
    sys.exit(main(parser.parse_args().only))
