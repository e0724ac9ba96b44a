"""256 users in flight, with lengths of a real trace: our engine beside transformers' continuous batching."""

from __future__ import annotations

import time
from collections.abc import Sequence
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
_PEER_TOKENS = 1024
"""Of a step of the peer's: its mask is a number for each of them and each token that the cache has room for."""
_PEER_S = 90.0
"""That the peer may take, so that a slow one costs no other section its time; what it has finished by then counts."""
_PEER = "transformers continuous batching"


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
    """Answers to the first of `asks`, or to all. Its cache has room for whatever may be in flight."""
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa")
    model = model.eval().cuda()
    greedy: Any = GenerationConfig.from_dict({"do_sample": False, "eos_token_id": -1, "pad_token_id": 0})
    page = "page_size" if hasattr(ContinuousBatchingConfig, "page_size") else "block_size"  # as 5.17 still calls it
    size: dict[str, Any] = {page: _PAGE_TOKENS}
    config = ContinuousBatchingConfig(
        **size,
        num_blocks=pages_in_flight(asks),
        max_batch_tokens=_PEER_TOKENS,
        max_requests_per_batch=IN_FLIGHT,
    )
    manager = model.init_continuous_batching(greedy, config)
    manager.start()
    try:
        _closed_loop(manager, [Ask(ask.prompt_token_ids[::-1], 3) for ask in asks[:32]])
        return _closed_loop(manager, asks)
    finally:
        manager.stop(block=True, hard_stop=True)


def pages_in_flight(asks: Sequence[Ask]) -> int:
    """The most that IN_FLIGHT of `asks` take. Room for as many of the longest that there may be is not on any card."""
    return sum(sorted((-(-ask.num_tokens // _PAGE_TOKENS) + 1 for ask in asks), reverse=True)[:IN_FLIGHT])


def _closed_loop(manager: Any, asks: Sequence[Ask]) -> list[Answer]:
    """It schedules in a thread of its own; each answer makes room for the next request.

    Raises RuntimeError where it fails, or has finished none of the first requests when its time is over.
    """
    sent: dict[str, float] = {}
    answers: dict[str, Answer] = {}
    coming = iter(asks)
    ends_s = time.perf_counter() + _PEER_S

    def send() -> None:
        ask = next(coming, None)
        if ask is not None:
            now = time.perf_counter()
            sent[
                manager.add_request(ask.prompt_token_ids, max_new_tokens=ask.output_tokens, record_timestamps=True)
            ] = now

    for _ in range(IN_FLIGHT):
        send()
    while len(answers) < len(sent) and (left_s := ends_s - time.perf_counter()) > 0:
        result = manager.get_result(timeout=left_s)
        if result is not None and result.error is not None:
            raise RuntimeError(f"transformers' continuous batching: {result.error}")
        if result is not None:
            answers[result.request_id] = Answer(sent[result.request_id], result.generated_tokens, result.timestamps)
            send()
    if not answers:
        raise RuntimeError(f"transformers' continuous batching finished no request in {_PEER_S:.0f} s")
    return [answers.get(name, Answer(sent_s)) for name, sent_s in sent.items()]


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
    """Ours first: whatever becomes of the peer, that row stays."""
    asks, found = drawn_asks(), Findings()
    our_rate = _told("llmservice", asks, ours(start(folder), asks), found)
    release()
    try:
        answers = transformers_continuous(folder, asks)
    except (MemoryError, RuntimeError) as error:  # out of the card's memory, among others
        found.add(Findings.of_failure(_PEER, str(error)))
        return found
    ratio = our_rate / _told(_PEER, asks, answers, found)
    found.checks.append(Check("output tokens/s at 256 in flight ÷ transformers' continuous batching", ">= 3", ratio))
    return found


def _told(peer: str, asks: Sequence[Ask], answers: Sequence[Answer], found: Findings) -> float:
    """Output tokens a second, of finished answers; the rest is a row of `found`, and a note where some are missing."""
    finished = [(ask, answer) for ask, answer in zip(asks, answers, strict=False) if answer.token_ids]
    report = Report.of(records([ask for ask, _ in finished], [answer for _, answer in finished]))
    found.rows.append({"part": f"{IN_FLIGHT} in flight", "peer": peer, **latencies(report)})
    if len(finished) < len(asks):
        found.notes.append(
            f"{peer}: stopped after {_PEER_S:.0f} s with {len(finished)} of {len(asks)} requests finished; tokens of "
            "those that were not are not counted"
        )
    return report.output_tokens_per_s
