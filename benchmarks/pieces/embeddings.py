"""Inter-token latency with and without concurrent embedding requests.

Only the engine is measured, because on a small machine the clients of a server would dominate.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from typing import Any

from llmservice_bench.report import Distribution
from llmservice_server.runtime.embeddings import BatchEmbedder
from llmservice_server.types.messages import Embed
from pieces.step import decoding_engine

MODEL = "small"
NUM_STREAMS = 8
PHASES = 10
"""Phases of each kind, which alternate."""
STEPS = 50
"""Steps of a phase."""


@dataclass(slots=True)
class _Phase:
    """The measurements of one kind of phase."""

    itl_s: list[float] = field(default_factory=list)
    embedded_tokens: int = 0

    @property
    def seconds(self) -> float:
        return sum(self.itl_s)


def measure_embeddings(num_inputs: int, input_tokens: int) -> dict[str, Any]:
    """Decode `NUM_STREAMS` streams; in every other phase, also embed requests of `num_inputs` texts.

    Raises ValueError if a stream ends before.
    """
    engine = decoding_engine(MODEL, NUM_STREAMS, 2 * (PHASES + 2) * STEPS)
    embedder = engine.embedder
    assert isinstance(embedder, BatchEmbedder)  # noqa: S101 - it says how many inputs are left
    phases, requests = {False: _Phase(), True: _Phase()}, itertools.count()
    inputs, step_s = [[5] * input_tokens] * num_inputs, None
    for number in range(PHASES + 1):
        for beside, phase in phases.items():
            counted = phase if number else _Phase()
            for _ in range(STEPS):
                if beside and embedder.due_s() is None:
                    embedder.add(Embed(request_id=f"e{next(requests)}", inputs=inputs), time.monotonic())
                began_s = time.perf_counter()
                if beside:
                    waiting = embedder.num_waiting
                    engine.embed(step_s)
                    counted.embedded_tokens += input_tokens * (waiting - embedder.num_waiting)
                stepped_s = time.perf_counter()
                engine.step()
                step_s = time.perf_counter() - stepped_s
                counted.itl_s.append(time.perf_counter() - began_s)
    if len(engine.last_plan.scheduled) < NUM_STREAMS:
        raise ValueError("some of the streams had ended before the last step: let them have more tokens")
    alone, with_embeddings = (Distribution.of(phases[beside].itl_s) for beside in (False, True))
    return {
        "inputs": num_inputs,
        "tokens_per_input": input_tokens,
        "alone_tokens_per_s": NUM_STREAMS / alone.mean,
        "beside_tokens_per_s": NUM_STREAMS / with_embeddings.mean,
        "embedded_tokens_per_s": phases[True].embedded_tokens / phases[True].seconds,
        "alone_itl_p50_ms": alone.p50 * 1000,
        "beside_itl_p50_ms": with_embeddings.p50 * 1000,
        "alone_itl_p99_ms": alone.p99 * 1000,
        "beside_itl_p99_ms": with_embeddings.p99 * 1000,
        "itl_p99_ratio": with_embeddings.p99 / alone.p99,
    }
