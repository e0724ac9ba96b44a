"""What drawing the tokens of a step takes of the card, and of the host that tells it how."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from card.card import Card, seconds
from card.section import Findings
from card.stand import Stand
from llmservice_bench.results import Check
from llmservice_server.engine.request import Request
from llmservice_server.kernels.heaviest import heaviest as by_kernel
from llmservice_server.messages import Generate, SamplingParams
from llmservice_server.sampling.heaviest import heaviest as by_torch
from llmservice_server.sampling.heaviest import why_unusable
from llmservice_server.sampling.sampler import Sampler

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-p 0.95": {"temperature": 0.8, "top_p": 0.95, "seed": 7},
    "everything": {
        "temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.01, "presence_penalty": 0.3,
        "frequency_penalty": 0.3, "repetition_penalty": 1.1, "min_tokens": 4000, "logprobs": 5,
        "logit_bias": {7: -1.0}, "stop_token_ids": (2,),
    },
}  # fmt: skip


def measure(stand: Stand) -> Findings:
    """By what the rows ask for; top-k and top-p cut by our kernel and by torch."""
    card, vocab_size = stand.card, stand.sizes.vocab_size
    problem = why_unusable(by_kernel, vocab_size, card.device)
    found = Findings(checks=[Check("our kernel cuts top-k and top-p as torch does", "= 1", problem is None)])
    if problem is not None:
        found.notes.append(f"the kernel for top-k and top-p: {problem}")
    for batch in stand.sizes.sampling_batches:
        logits = torch.randn(batch, vocab_size, device=card.device) * 3
        for kind, sampling in KINDS.items():
            requests = [_request(number, sampling) for number in range(batch)]
            for name, cut in (("kernel", by_kernel), ("torch", by_torch)):
                sampler, scratch = Sampler(cut), torch.empty_like(logits)

                def draw(sampler=sampler, scratch=scratch, logits=logits, requests=requests) -> None:  # type: ignore[no-untyped-def]
                    sampler.draw(scratch.copy_(logits), requests)

                found.rows.append({
                    "part": "sampling", "kind": kind, "cut by": name, "batch": batch, "vocabulary": vocab_size,
                    "card ms": seconds(card, draw) * 1e3, "host ms": _host_seconds(card, draw) * 1e3,
                })  # fmt: skip
    return found


def _host_seconds(card: Card, draw: Callable[[], None], repetitions: int = 5) -> float:
    """Until the host may do something else."""
    card.synchronize()
    started_s = time.perf_counter()
    for _ in range(repetitions):
        draw()
    taken_s = (time.perf_counter() - started_s) / repetitions
    card.synchronize()
    return taken_s


def _request(number: int, sampling: dict[str, Any]) -> Request:
    message = Generate(
        request_id=str(number),
        prompt_token_ids=list(range(number, number + 256)),
        sampling=SamplingParams(max_tokens=512, **sampling),
        arrival_s=0.0,
    )
    return Request.of(message, number, seed=number, eos_token_ids=frozenset())
