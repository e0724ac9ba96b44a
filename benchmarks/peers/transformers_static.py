"""transformers' `generate`: a batch is padded to its longest prompt and runs until its slowest answer has ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteriaList

from peers.workload import Answer, Ask, Job

_PADDING = 0


class _StepTimes:
    """A stopping criterion, asked after every token of the batch: notes when, and never stops anybody."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        self.times_s.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def load(job: Job) -> Any:
    """The model on all cores, without a token that ends an answer."""
    torch.set_num_threads(job.threads)
    model: Any = AutoModelForCausalLM.from_pretrained(job.model, dtype=getattr(torch, job.dtype))
    model.eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = _PADDING
    return model


class StaticPeer:
    """Batch after batch; a user whose answer has ended asks again at once, and waits for the batch to end."""

    def __init__(self, job: Job) -> None:
        self._model = load(job)
        self._in_flight = job.in_flight
        self.serve(job.warm_up())

    def serve(self, asks: Sequence[Ask]) -> list[Answer]:
        answers: list[Answer] = []
        sent_s = [time.perf_counter()] * self._in_flight
        for first in range(0, len(asks), self._in_flight):
            together = asks[first : first + self._in_flight]
            batch = [Answer(at_s) for at_s in sent_s[: len(together)]]
            _generate(self._model, together, batch)
            sent_s = sorted(answer.token_times_s[-1] for answer in batch)
            answers += batch
        return answers

    def close(self) -> None:
        del self._model


def _generate(model: Any, asks: Sequence[Ask], batch: Sequence[Answer]) -> None:
    """One padded batch. Of each row only the tokens that were asked for count; what is computed along is waste."""
    width = max(len(ask.prompt_token_ids) for ask in asks)
    padding = [width - len(ask.prompt_token_ids) for ask in asks]
    prompts = [[_PADDING] * pad + ask.prompt_token_ids for pad, ask in zip(padding, asks, strict=True)]
    mask = [[0] * pad + [1] * (width - pad) for pad in padding]
    steps = _StepTimes()
    with torch.inference_mode():
        rows = model.generate(
            torch.tensor(prompts),
            attention_mask=torch.tensor(mask),
            max_new_tokens=max(ask.output_tokens for ask in asks),
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([steps]),
        )
    for ask, answer, row in zip(asks, batch, rows[:, width:].tolist(), strict=True):
        answer.token_ids = row[: ask.output_tokens]
        answer.token_times_s = steps.times_s[: ask.output_tokens]
