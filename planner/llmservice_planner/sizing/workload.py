"""Engine settings by what a service is for, where the user sets none; each with its reason. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, get_args

from llmservice_planner.sizing.budget import Budget
from llmservice_planner.sizing.request import EXPECTED_TOKENS, SizingError, SizingRequest

Workload = Literal["chat", "longContext", "batch", "embeddings"]
WORKLOADS: tuple[Workload, ...] = get_args(Workload)
READING_S = 0.1
"""Per token: twice as fast as people read, 238 words (about 320 tokens) a minute (Brysbaert, Journal of Memory and
Language 109, 2019)."""
_EMBEDDING_TOKENS = 512
_LEAST_STEP = 512
_MULTIPLE = 64
_RIDGES = 8


def for_workload(request: SizingRequest, workload: Workload | None) -> SizingRequest:
    """With the workload's settings where `request` has None. Raises `SizingError` if the model is none for it."""
    if workload is None:
        return request
    if (workload == "embeddings") != request.shape.is_encoder:
        needed = "an encoder" if workload == "embeddings" else "a model that generates: use embeddings for an encoder"
        raise SizingError(f"workload {workload} is for {needed}, and the model is {request.shape.architecture}")
    settings: dict[str, Any] = {}
    notes = list(request.notes)
    for change, reason in _CHANGES[workload](request):
        settings |= change
        notes.append(f"workload: {workload}, {reason}")
    return replace(request, **settings, notes=tuple(notes))


_Change = tuple[dict[str, Any], str]


def _chat(request: SizingRequest) -> Iterator[_Change]:
    if request.expected_tokens is None:
        tokens = min(EXPECTED_TOKENS, request.model_len)
        yield {"expected_tokens": tokens}, f"{tokens} expected tokens, as a conversation's request has"
    budget = Budget.of(request)
    latency, step = budget.latency, budget.step.total
    if request.max_num_batched_tokens is not None or request.itl_p99_s is not None or latency is None:
        return
    longest = latency.longest_prefill(READING_S, step)
    tokens = min(step, max(_LEAST_STEP, longest // _MULTIPLE * _MULTIPLE))
    if tokens < step:
        took = latency.prefill_s(tokens)
        reason = f"steps of {tokens} tokens: a prompt in one delays other answers by {took * 1e3:.0f} ms"
        yield {"max_num_batched_tokens": tokens}, f"{reason}; people read a token in about {2 * READING_S * 1e3:.0f} ms"


def _long_context(request: SizingRequest) -> Iterator[_Change]:
    expected = request.expected_tokens
    if expected is None:
        expected = max(1, request.model_len // 2)
        yield {"expected_tokens": expected}, f"{expected} expected tokens, half of the longest request"
    yield from _fewer_rows(request, expected)


def _batch(request: SizingRequest) -> Iterator[_Change]:
    yield from _fewer_rows(request, request.typical_tokens)
    if request.itl_p99_s is None:
        yield {"bounded_by_ridge": False}, "more sequences than the ridge, as no client waits for a single token"


def _embeddings(request: SizingRequest) -> Iterator[_Change]:
    if request.expected_tokens is None:
        tokens = min(_EMBEDDING_TOKENS, request.model_len)
        yield {"expected_tokens": tokens}, f"{tokens} expected tokens, a passage of a document"
    budget = Budget.of(request)
    latency = budget.latency
    if request.max_num_batched_tokens is not None or latency is None or latency.ridge_tokens is None:
        return
    tokens = max(request.model_len, math.ceil(_RIDGES * latency.ridge_tokens / _MULTIPLE) * _MULTIPLE)
    if tokens < budget.step.total:
        reason = f"steps of {tokens} tokens: they read the weights in an eighth of the arithmetic's time or less"
        yield {"max_num_batched_tokens": tokens}, f"{reason}, and shorter steps answer sooner"


_CHANGES: Mapping[Workload, Any] = {
    "chat": _chat,
    "longContext": _long_context,
    "batch": _batch,
    "embeddings": _embeddings,
}


def _fewer_rows(request: SizingRequest, expected: int) -> Iterator[_Change]:
    least = expected // 4
    if least > request.least_sequence_tokens:
        yield (
            {"least_sequence_tokens": least},
            f"sequences of {least} tokens, a quarter of the expected, fill the memory: logits of more would take cache",
        )
