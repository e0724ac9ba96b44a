"""Many users in flight, with lengths of a real trace: our engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from card.section import Findings
from card.sizes import Sizes
from card.stand import Stand, add
from llmservice_bench.lengths import read_trace, scaled_to
from llmservice_bench.report import Report
from llmservice_server.engine.engine import Engine
from peers.closed_loop import closed_loop
from peers.workload import Answer, Ask, draw_asks, records

_WARM_UPS = 32


class OurServer:
    """Implements `StepServer`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def add(self, index: int, ask: Ask) -> None:
        add(self._engine, str(index), ask.prompt_token_ids, ask.output_tokens)

    def step(self) -> Sequence[tuple[int, int]]:
        outputs = self._engine.step().outputs
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(f"request {output.request_id}: {output.error}")
        return [(int(output.request_id), token) for output in outputs for token in output.token_ids]


def ours(engine: Engine, asks: Sequence[Ask], in_flight: int) -> list[Answer]:
    server = OurServer(engine)
    closed_loop(server, warm_ups(asks), _WARM_UPS)
    return closed_loop(server, asks, in_flight)


def warm_ups(asks: Sequence[Ask]) -> list[Ask]:
    """A few of them, short, and turned round so that no prefix cache knows the real ones afterwards."""
    return [Ask(ask.prompt_token_ids[::-1], 3) for ask in asks[:_WARM_UPS]]


def drawn_asks(sizes: Sizes, seed: int = 0) -> Sequence[Ask]:
    return draw_asks(scaled_to(read_trace(), sizes.longest), sizes.requests, sizes.vocab_size, seed)


def latencies(report: Report) -> dict[str, Any]:
    """Throughput and what users felt meanwhile."""
    return {
        "requests": report.completed, "failed": report.failed, "output tokens/s": report.output_tokens_per_s,
        "TTFT p50 s": report.ttft_s.p50, "TTFT p99 s": report.ttft_s.p99,
        "ITL p50 s": report.itl_s.p50, "ITL p99 s": report.itl_s.p99,
    }  # fmt: skip


def measure(stand: Stand) -> Findings:
    asks, sizes = drawn_asks(stand.sizes), stand.sizes
    report = Report.of(records(asks, ours(stand.engine(), asks, sizes.in_flight)))
    stand.output_tokens_per_s = report.output_tokens_per_s
    return Findings(rows=[{"part": f"{sizes.in_flight} in flight", "peer": "llmservice", **latencies(report)}])
