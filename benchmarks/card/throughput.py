"""256 users in flight, with lengths of a real trace: our engine beside transformers' continuous batching."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from card.engine import add, release, start
from card.section import Findings
from llmservice_bench.lengths import Lengths, read_trace, scaled_to
from llmservice_bench.report import Report
from llmservice_bench.results import Check
from llmservice_server.engine.engine import Engine
from peers.closed_loop import closed_loop
from peers.workload import Answer, Ask, draw_asks, records

IN_FLIGHT = 256
_LONGEST = Lengths(4096, 512)
_VOCABULARY = 32_000
_REQUESTS = 512
_PAGE_TOKENS = 64
_ANSWER_WITHIN_S = 60.0


class OurServer:
    """Implements `StepServer`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def add(self, index: int, ask: Ask) -> None:
        add(self._engine, str(index), ask.prompt_token_ids, ask.output_tokens)

    def step(self) -> Sequence[tuple[int, int]]:
        outputs = self._engine.step().outputs
        return [(int(output.request_id), token) for output in outputs for token in output.token_ids]


def ours(engine: Engine, asks: Sequence[Ask]) -> list[Answer]:
    server = OurServer(engine)
    closed_loop(server, [Ask(ask.prompt_token_ids[::-1], 3) for ask in asks[:32]], 32)
    return closed_loop(server, asks, IN_FLIGHT)


def transformers_continuous(folder: Path, asks: Sequence[Ask]) -> list[Answer]:
    """Its cache is given room for every sequence in flight, to its end."""
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa")
    model = model.eval().cuda()
    greedy: Any = GenerationConfig.from_dict({"do_sample": False, "eos_token_id": -1, "pad_token_id": 0})
    pages_each = -(-(_LONGEST.prompt_tokens + _LONGEST.output_tokens) // _PAGE_TOKENS) + 1
    config = ContinuousBatchingConfig(
        page_size=_PAGE_TOKENS,
        num_blocks=IN_FLIGHT * pages_each,
        max_batch_tokens=8192,
        max_requests_per_batch=IN_FLIGHT,
    )
    manager = model.init_continuous_batching(greedy, config)
    manager.start()
    try:
        _closed_loop(manager, [Ask(ask.prompt_token_ids[::-1], 3) for ask in asks[:32]])
        return _closed_loop(manager, asks)
    finally:
        manager.stop(block=True)


def _closed_loop(manager: Any, asks: Sequence[Ask]) -> list[Answer]:
    """It schedules in a thread of its own; each answer makes room for the next request."""
    sent: dict[str, float] = {}
    answers: dict[str, Answer] = {}
    coming = iter(asks)

    def send() -> None:
        ask = next(coming, None)
        if ask is not None:
            now = time.perf_counter()
            sent[
                manager.add_request(ask.prompt_token_ids, max_new_tokens=ask.output_tokens, record_timestamps=True)
            ] = now

    for _ in range(IN_FLIGHT):
        send()
    while len(answers) < len(sent):
        result = manager.get_result(timeout=_ANSWER_WITHIN_S)
        if result is None or result.error is not None:
            raise RuntimeError(f"transformers' continuous batching: {getattr(result, 'error', 'no answer for 60 s')}")
        answers[result.request_id] = Answer(sent[result.request_id], result.generated_tokens, result.timestamps)
        send()
    return [answers[name] for name in sent]


def drawn_asks(seed: int = 0) -> Sequence[Ask]:
    return draw_asks(scaled_to(read_trace(), _LONGEST), _REQUESTS, _VOCABULARY, seed)


def latencies(report: Report) -> dict[str, Any]:
    """Throughput and what users felt meanwhile."""
    return {
        "requests": report.completed, "failed": report.failed, "output tokens/s": report.output_tokens_per_s,
        "TTFT p50 s": report.ttft_s.p50, "TTFT p99 s": report.ttft_s.p99,
        "ITL p50 s": report.itl_s.p50, "ITL p99 s": report.itl_s.p99,
    }  # fmt: skip


def compare(folder: Path) -> Findings:
    peers: dict[str, Callable[[Sequence[Ask]], list[Answer]]] = {
        "llmservice": lambda asks: ours(start(folder), asks),
        "transformers continuous batching": lambda asks: transformers_continuous(folder, asks),
    }
    asks, found, rates = drawn_asks(), Findings(), {}
    for name, serve in peers.items():
        report = Report.of(records(asks, serve(asks)))
        rates[name] = report.output_tokens_per_s
        found.rows.append({"part": f"{IN_FLIGHT} in flight", "peer": name, **latencies(report)})
        release()
    ratio = rates["llmservice"] / rates["transformers continuous batching"]
    found.checks.append(Check("output tokens/s at 256 in flight ÷ transformers' continuous batching", ">= 3", ratio))
    return found
