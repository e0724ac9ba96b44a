"""Time to sample the next token of each row of logits, by sampling parameters."""

from __future__ import annotations

import time
from typing import Any

import torch

from llmservice_server.backend.base import Backend
from llmservice_server.backend.cache_shape import KVCacheShape
from llmservice_server.backend.choice import choose_backend
from llmservice_server.engine.request import Request
from llmservice_server.sampling.sampler import Sampler
from llmservice_server.types.messages import GenerateRequest, SamplingParams
from pieces.timing import Timing

VOCAB = 32_000
NUM_ROWS = (1, 32, 64, 256)
_PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "seeded": {"seed": 7},
    "top-k 50": {"top_k": 50},
    "top-p 0.9": {"top_p": 0.9},
    "top-k 50, top-p 0.9": {"top_k": 50, "top_p": 0.9},
    "min-p 0.05": {"min_p": 0.05},
    "penalties": _PENALTIES,
    "penalties, 8k tokens": _PENALTIES,
    "penalties, 8k tokens, counts sent again": _PENALTIES,
    "logprobs 5": {"logprobs": 5},
}
PROMPT_TOKENS = {"penalties, 8k tokens": 8000, "penalties, 8k tokens, counts sent again": 8000}
SENT_AGAIN = "penalties, 8k tokens, counts sent again"
"""As before counts were kept on the device: those of every place of every row are sent in each step."""
_MODEL_SPREAD = 3.0  # of the logits: hundreds of tokens are likely, more than from a trained model


def measure_sampler(kind: str, num_rows: int, count: int = 15) -> Timing:
    """Sample one batch, in which every row has the same parameters, repeatedly from new logits."""
    requests = [_request(number, KINDS[kind], PROMPT_TOKENS.get(kind, 256)) for number in range(num_rows)]
    logits = torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(0)) * _MODEL_SPREAD
    backend, scratch = _backend(), torch.empty_like(logits)
    sampler = Sampler(backend.choose_tokens, backend.penalize)
    seconds = []
    for step in range(count + 3):
        scratch.copy_(logits)  # sampling overwrites them
        if kind == SENT_AGAIN:
            sampler = Sampler(backend.choose_tokens, backend.penalize)
        started_s = time.perf_counter()
        sampler.draw(scratch, requests).wait()
        for number, request in enumerate(requests):
            request.append((number * 31 + step) % VOCAB)
        seconds.append(time.perf_counter() - started_s)
    return Timing.of(seconds[3:])


def _backend() -> Backend:
    """The one that a pod chooses on this CPU; the cache's shape does not matter here."""
    shape = KVCacheShape(num_heads=4, num_kv_heads=2, head_dim=64, windows=(None,), block_size=16, dtype=torch.float32)
    return choose_backend("auto", shape, torch.float32, torch.device("cpu"), max_num_batched_tokens=512)


def _request(number: int, sampling: dict[str, Any], prompt_tokens: int) -> Request:
    message = GenerateRequest(
        request_id=str(number),
        prompt_token_ids=[place % VOCAB for place in range(number, number + prompt_tokens)],
        sampling=SamplingParams(max_tokens=512, **sampling),
        arrival_s=0.0,
    )
    request = Request.of(message, number, seed=number, eos_token_ids=frozenset())
    for token_id in range(100):
        request.append(token_id)
    return request
