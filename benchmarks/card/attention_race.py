"""The race that `--attention auto` runs when an engine starts, for chunks of several sizes; the loser's time too."""

from __future__ import annotations

import torch

from card.kernels import CUDA, HEAD_DIM, HEADS, KV_HEADS
from card.section import Findings
from llmservice_server.attention.base import KVCacheShape
from llmservice_server.attention.chunk_race import race_for_chunks


def measure() -> Findings:
    """Llama 3 8B's shape in bfloat16, with and without a window."""
    found = Findings()
    for window in (None, 1024):
        shape = KVCacheShape(HEADS, KV_HEADS, HEAD_DIM, (window,), 16, torch.bfloat16)
        for num_tokens in (256, 512, 1024, 2048):
            verdict = race_for_chunks(shape, torch.bfloat16, CUDA, num_tokens)
            found.rows.append({
                "part": "attention race", "window": window, "chunk": num_tokens // 2, "after": num_tokens // 2,
                "winner": verdict.name, "times": verdict.reason,
            })  # fmt: skip
    return found
