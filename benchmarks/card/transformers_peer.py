"""transformers' continuous batching on the same card, with the same requests in flight."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from card.section import Findings
from card.stand import Stand
from card.throughput import drawn_asks, latencies, warm_ups
from llmservice_bench.report import Report
from llmservice_bench.results import Check
from peers.workload import Answer, Ask, records

_NAME = "transformers continuous batching"
_PAGE_TOKENS = 64
_WARM_UPS = 8


def measure(stand: Stand) -> Findings:
    """Beside what our engine did in this process."""
    stand.clear()
    asks, sizes, found = drawn_asks(stand.sizes), stand.sizes, Findings()
    answers = _answers(stand, asks)
    if not any(answer.token_ids for answer in answers):
        raise RuntimeError(f"{_NAME} drew no token in {sizes.peer_s:.0f} s")
    begun = [(ask, answer) for ask, answer in zip(asks, answers, strict=False) if answer.token_ids]
    as_far = [Ask(ask.prompt_token_ids, len(answer.token_ids)) for ask, answer in begun]
    report = Report.of(records(as_far, [answer for _, answer in begun]))
    found.rows.append({"part": f"{sizes.in_flight} in flight", "peer": _NAME, **latencies(report)})
    finished = sum(len(answer.token_ids) == ask.output_tokens for ask, answer in begun)
    if finished < len(asks):
        found.notes.append(
            f"{_NAME} was stopped after {sizes.peer_s:.0f} s: of {len(asks)} requests {finished} were finished and "
            f"{len(begun) - finished} under way, and every token drawn by then counts"
        )
    if stand.output_tokens_per_s is None:
        found.notes.append("our engine was not measured in the process that measured transformers: no ratio")
    else:
        ratio = stand.output_tokens_per_s / report.output_tokens_per_s
        what = f"output tokens/s at {sizes.in_flight} in flight ÷ transformers' continuous batching"
        found.checks.append(Check(what, ">= 3", ratio))
    return found


def _answers(stand: Stand, asks: Sequence[Ask]) -> list[Answer]:
    """To the first of `asks`, or to all. Its cache has room for whatever may be in flight."""
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    sizes = stand.sizes
    model: Any = AutoModelForCausalLM.from_pretrained(stand.checkpoint(), dtype=sizes.dtype, attn_implementation="sdpa")
    model = model.eval().to(stand.card.device)
    greedy: Any = GenerationConfig.from_dict({"do_sample": False, "eos_token_id": -1, "pad_token_id": 0})
    page = "page_size" if hasattr(ContinuousBatchingConfig, "page_size") else "block_size"  # as 5.17 still calls it
    size: dict[str, Any] = {page: _PAGE_TOKENS}
    config = ContinuousBatchingConfig(
        **size,
        num_blocks=pages_in_flight(asks, sizes.in_flight),
        max_batch_tokens=sizes.peer_tokens,
        max_requests_per_batch=sizes.in_flight,
    )
    manager = model.init_continuous_batching(greedy, config)
    manager.start()
    try:
        closed_loop(manager, warm_ups(asks)[:_WARM_UPS], sizes.in_flight, sizes.peer_s / 3)
        return closed_loop(manager, asks, sizes.in_flight, sizes.peer_s)
    finally:
        manager.stop(block=True, hard_stop=True)


def pages_in_flight(asks: Sequence[Ask], in_flight: int) -> int:
    """The most that so many of `asks` take. Room for as many of the longest that there may be is not on any card."""
    return sum(sorted((-(-ask.num_tokens // _PAGE_TOKENS) + 1 for ask in asks), reverse=True)[:in_flight])


def closed_loop(manager: Any, asks: Sequence[Ask], in_flight: int, seconds: float) -> list[Answer]:
    """It schedules in a thread of its own; each answer makes room for the next request.

    What it has drawn counts as it comes, whatever of it is finished when the `seconds` are over. Raises RuntimeError
    where it fails.
    """
    answers: dict[str, Answer] = {}
    running: set[str] = set()
    coming = iter(asks)
    ends_s = time.perf_counter() + seconds

    def send() -> None:
        ask = next(coming, None)
        if ask is not None:
            now = time.perf_counter()
            name = manager.add_request(
                ask.prompt_token_ids, max_new_tokens=ask.output_tokens, record_timestamps=True, streaming=True
            )
            answers[name] = Answer(now)
            running.add(name)

    for _ in range(in_flight):
        send()
    while running and (left_s := ends_s - time.perf_counter()) > 0:
        result = manager.get_result(timeout=min(left_s, 1.0))
        if result is None and not manager.is_running():
            raise RuntimeError(f"{_NAME} has ended its thread: what broke it is in the log")
        if result is None or result.request_id not in answers:  # of a warm-up that was too slow
            continue
        if result.error is not None:
            raise RuntimeError(f"{_NAME}: {result.error}")
        answer = answers[result.request_id]
        answer.token_ids, answer.token_times_s = result.generated_tokens, result.timestamps
        if result.is_finished():
            running.discard(result.request_id)
            send()
    return list(answers.values())
