"""transformers' continuous batching: its own thread schedules, over a paged cache."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig

from peers.transformers_static import load
from peers.workload import Answer, Ask, Job

_PAGE_TOKENS = 64


class ContinuousPeer:
    """Its thread lives as long as the peer does, and sleeps while nobody asks for anything."""

    def __init__(self, job: Job) -> None:
        greedy: Any = GenerationConfig.from_dict({"do_sample": False, "eos_token_id": -1, "pad_token_id": 0})
        self._manager = load(job).init_continuous_batching(greedy, _config(job))
        self._in_flight = job.in_flight
        self._manager.start()
        self.serve(job.warm_up())

    def serve(self, asks: Sequence[Ask]) -> list[Answer]:
        answers: dict[str, Answer] = {}
        sent: dict[str, float] = {}
        coming = iter(asks)

        def send() -> None:
            ask = next(coming, None)
            if ask is not None:
                sent_s = time.perf_counter()
                tokens, count = ask.prompt_token_ids, ask.output_tokens
                sent[self._manager.add_request(tokens, max_new_tokens=count, record_timestamps=True)] = sent_s

        for _ in range(self._in_flight):
            send()
        while len(answers) < len(sent):
            result = self._manager.get_result(timeout=60)
            if result is None:
                raise RuntimeError("transformers' continuous batching gave no answer for 60 s: its thread has died")
            answers[result.request_id] = _answer(result, sent[result.request_id])
            send()
        return [answers[name] for name in sent]

    def close(self) -> None:
        self._manager.stop(block=True)


def _config(job: Job) -> ContinuousBatchingConfig:
    """Every sequence in flight has room to its end; left to itself, the cache would take most of the memory."""
    blocks_each = -(-job.longest // _PAGE_TOKENS) + 1
    return ContinuousBatchingConfig(
        page_size=_PAGE_TOKENS,
        num_blocks=job.in_flight * blocks_each,
        max_batch_tokens=512,
        max_requests_per_batch=job.in_flight,
    )


def _answer(result: Any, sent_s: float) -> Answer:
    if result.error is not None:
        raise RuntimeError(f"transformers' continuous batching failed: {result.error}")
    return Answer(sent_s, result.generated_tokens, result.timestamps)
