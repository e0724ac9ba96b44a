"""transformers' continuous batching: its own thread schedules, over a paged cache."""

from __future__ import annotations

import time
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig

from peers.transformers_static import load
from peers.workload import Answer, Job

_PAGE_TOKENS = 64


def serve(job: Job) -> list[Answer]:
    model = load(job)
    greedy: Any = GenerationConfig.from_dict({"do_sample": False, "eos_token_id": -1, "pad_token_id": 0})
    manager = model.init_continuous_batching(greedy, _config(job))
    manager.start()
    try:
        _run(manager, job.warm_up())
        return _run(manager, job)
    finally:
        manager.stop(block=True)


def _config(job: Job) -> ContinuousBatchingConfig:
    """Every sequence in flight has room to its end; left to itself, the cache would take most of the memory."""
    blocks_each = -(-job.longest // _PAGE_TOKENS) + 1
    return ContinuousBatchingConfig(
        page_size=_PAGE_TOKENS,
        num_blocks=job.in_flight * blocks_each,
        max_batch_tokens=512,
        max_requests_per_batch=job.in_flight,
    )


def _run(manager: Any, job: Job) -> list[Answer]:
    answers: dict[str, Answer] = {}
    sent: dict[str, float] = {}
    coming = iter(job.asks)
    order: list[str] = []

    def send() -> None:
        ask = next(coming, None)
        if ask is not None:
            sent_s = time.perf_counter()
            name = manager.add_request(ask.prompt_token_ids, max_new_tokens=ask.output_tokens, record_timestamps=True)
            sent[name] = sent_s
            order.append(name)

    for _ in range(job.in_flight):
        send()
    while len(answers) < len(order):
        result = manager.get_result(timeout=60)
        if result is None:
            raise RuntimeError("transformers' continuous batching has given no answer for 60 s: its thread has died")
        answers[result.request_id] = _answer(result, sent[result.request_id])
        send()
    return [answers[name] for name in order]


def _answer(result: Any, sent_s: float) -> Answer:
    if result.error is not None:
        raise RuntimeError(f"transformers' continuous batching failed: {result.error}")
    return Answer(sent_s, result.generated_tokens, result.timestamps)
