"""transformers as a peer: `generate` with static, padded batches, and its continuous batching."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, StoppingCriteriaList

from peers.workload import Answer, Job, PeerRequest

_PADDING = 0


class _StepTimes:
    """A stopping criterion that records the time of every token and never stops."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        self.times_s.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def load(job: Job) -> Any:
    """The model on all cores, without an end-of-sequence token."""
    torch.set_num_threads(job.threads)
    model: Any = AutoModelForCausalLM.from_pretrained(job.model, dtype=getattr(torch, job.dtype))
    model.eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = _PADDING
    return model


class StaticPeer:
    """Static batches: a batch runs until its longest response has ended; then the next one starts."""

    def __init__(self, job: Job) -> None:
        self._model = load(job)
        self._in_flight = job.in_flight
        self.serve(job.warm_up())

    def serve(self, requests: Sequence[PeerRequest]) -> list[Answer]:
        answers: list[Answer] = []
        sent_s = [time.perf_counter()] * self._in_flight
        for first in range(0, len(requests), self._in_flight):
            together = requests[first : first + self._in_flight]
            batch = [Answer(at_s) for at_s in sent_s[: len(together)]]
            _generate(self._model, together, batch)
            sent_s = sorted(answer.token_times_s[-1] for answer in batch)
            answers += batch
        return answers

    def close(self) -> None:
        del self._model


def _generate(model: Any, requests: Sequence[PeerRequest], batch: Sequence[Answer]) -> None:
    """Generate one padded batch; only the requested tokens of each row count."""
    width = max(len(request.prompt_token_ids) for request in requests)
    padding = [width - len(request.prompt_token_ids) for request in requests]
    prompts = [[_PADDING] * pad + request.prompt_token_ids for pad, request in zip(padding, requests, strict=True)]
    mask = [[0] * pad + [1] * (width - pad) for pad in padding]
    steps = _StepTimes()
    with torch.inference_mode():
        rows = model.generate(
            torch.tensor(prompts),
            attention_mask=torch.tensor(mask),
            max_new_tokens=max(request.output_tokens for request in requests),
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([steps]),
        )
    for request, answer, row in zip(requests, batch, rows[:, width:].tolist(), strict=True):
        answer.token_ids = row[: request.output_tokens]
        answer.token_times_s = steps.times_s[: request.output_tokens]


_PAGE_TOKENS = 64


class ContinuousPeer:
    """Continuous batching, which schedules in its own thread until the peer is closed."""

    def __init__(self, job: Job) -> None:
        greedy: Any = GenerationConfig.from_dict({"do_sample": False, "eos_token_id": -1, "pad_token_id": 0})
        self._manager = load(job).init_continuous_batching(greedy, _config(job))
        self._in_flight = job.in_flight
        self._manager.start()
        self.serve(job.warm_up())

    def serve(self, requests: Sequence[PeerRequest]) -> list[Answer]:
        answers: dict[str, Answer] = {}
        sent: dict[str, float] = {}
        coming = iter(requests)

        def send() -> None:
            request = next(coming, None)
            if request is not None:
                sent_s = time.perf_counter()
                tokens, count = request.prompt_token_ids, request.output_tokens
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
    """A KV cache for the sequences in flight; by default it would use most of the memory."""
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
