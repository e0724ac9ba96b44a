"""The token budget of a step, and of one prompt in it, where the user sets none."""

from __future__ import annotations

from dataclasses import dataclass

from llmservice_planner.sizing.gpu import GIB

LEAST_TOKENS = 2048
_LARGE_GIB, MOST_TOKENS = 70, 8192
"""With so much memory, the activations of such a step are about a hundredth of it (8B model). vLLM has the same
numbers."""
_CHUNKS_OF_A_STEP = 8
_LEAST_CHUNK = 512
_FLOOR_WITH_TARGET = 512  # shorter steps read the weights for little work
_MULTIPLE = 64


@dataclass(frozen=True, slots=True)
class StepTokens:
    """Tokens that a step computes at most, how many of one prompt while others wait, and why."""

    total: int
    chunk: int
    reason: str


def step_tokens(
    gpu_memory_bytes: int | None,
    *,
    total: int | None = None,
    at_least: int = 1,
    most_for_target: int | None = None,
) -> StepTokens:
    """By the memory of a GPU (None: a CPU), unless the user's number `total` is given.

    `at_least`: sequences, each of which needs a token. `most_for_target`: the longest step that meets the target of the
    inter-token latency, which bounds what the memory suggests.
    """
    if total is not None:
        return StepTokens(total, min(total, _chunk(total)), "as set")
    gib = (gpu_memory_bytes or 0) / GIB
    tokens = MOST_TOKENS if gib >= _LARGE_GIB else LEAST_TOKENS
    reason = "for a CPU" if gpu_memory_bytes is None else f"for a GPU of {gib:.0f} GiB"
    if most_for_target is not None and most_for_target < tokens:
        tokens = max(_FLOOR_WITH_TARGET, most_for_target // _MULTIPLE * _MULTIPLE)
        reason = "so that a full step meets the target of the inter-token latency"
        if most_for_target < _FLOOR_WITH_TARGET:
            reason = "the least worth a step, though a full one misses the target of the inter-token latency"
    tokens = max(tokens, at_least)
    return StepTokens(tokens, _chunk(tokens), reason)


def _chunk(total: int) -> int:
    return max(_LEAST_CHUNK, total // _CHUNKS_OF_A_STEP)
