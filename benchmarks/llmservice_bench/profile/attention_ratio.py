"""Our attention over the paged cache compared with torch's over contiguous keys and values."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from llmservice_bench.profile.ceilings import best_seconds, seconds
from llmservice_server.backend.cache_shape import KVCacheShape
from llmservice_server.backend.cpu.attention import CpuAttention
from llmservice_server.backend.step_input import StepInput

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 12, 4, 64, 16
_ROUNDS = 15


@dataclass(frozen=True, slots=True)
class Shape:
    """`num_seqs` sequences, each with `new` tokens after `cached` ones."""

    num_seqs: int
    cached: int
    new: int

    @property
    def name(self) -> str:
        if self.new == 1:
            return f"decode {self.num_seqs} x {self.cached + 1}"
        return f"prefill {self.new}" + (f" behind {self.cached}" if self.cached else "")


SHAPES = (
    *(Shape(num_seqs, context - 1, 1) for num_seqs in (1, 32) for context in (128, 1024, 4096)),
    *(Shape(1, 0, length) for length in (128, 512, 1024)),
    Shape(1, 896, 128),
    Shape(1, 3584, 512),
)


def compare(shape: Shape, dtype: torch.dtype) -> dict[str, Any]:
    """Median seconds of alternate runs; ours includes storing the new keys and values."""
    with torch.inference_mode():
        paged, contiguous = _paged(shape, dtype), _contiguous(shape, dtype)
        pairs = [(seconds(paged), seconds(contiguous)) for _ in range(_ROUNDS + 1)][1:]
    return {
        "shape": shape.name,
        "dtype": str(dtype).removeprefix("torch."),
        "paged_ms": 1000 * statistics.median(ours for ours, _ in pairs),
        "contiguous_ms": 1000 * statistics.median(theirs for _, theirs in pairs),
        "paged_by_contiguous": statistics.median(ours / theirs for ours, theirs in pairs),
    }


def _paged(shape: Shape, dtype: torch.dtype) -> Callable[[], object]:
    """One layer's attention over fragmented blocks."""
    total = shape.cached + shape.new
    blocks_each = -(-total // BLOCK_SIZE)
    cache = KVCacheShape(NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, (None,), BLOCK_SIZE, dtype)
    attention = CpuAttention(cache, 1 + shape.num_seqs * blocks_each, tiled=True)
    attention.caches[0].normal_()
    places = (1 + torch.randperm(shape.num_seqs * blocks_each)).view(shape.num_seqs, blocks_each).tolist()
    step = attention.prepare(StepInput.of((shape.cached, shape.new, table) for table in places))
    num_rows = shape.num_seqs * shape.new
    query = torch.randn(num_rows, NUM_HEADS, HEAD_DIM).to(dtype)
    key_value = torch.randn(num_rows, 2 * NUM_KV_HEADS, HEAD_DIM).to(dtype)
    return lambda: step(0, query, key_value)


def _contiguous(shape: Shape, dtype: torch.dtype) -> Callable[[], object]:
    """torch's attention with the faster way to handle grouped heads."""
    total, group = shape.cached + shape.new, NUM_HEADS // NUM_KV_HEADS
    keys, values = torch.randn(2, shape.num_seqs, NUM_KV_HEADS, total, HEAD_DIM).to(dtype)
    query = torch.randn(shape.num_seqs, NUM_HEADS, shape.new, HEAD_DIM).to(dtype)
    if shape.new == 1:
        folded = query.view(shape.num_seqs, NUM_KV_HEADS, group, HEAD_DIM)
        return _faster(
            lambda: F.scaled_dot_product_attention(folded, keys, values),
            lambda: F.scaled_dot_product_attention(query, keys, values, enable_gqa=True),
        )
    mask = None
    if shape.cached:
        mask = torch.arange(total) <= torch.arange(shape.cached, total)[:, None]
    wide_keys, wide_values = (part.repeat_interleave(group, dim=1) for part in (keys, values))
    return _faster(
        lambda: F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        ),
        lambda: F.scaled_dot_product_attention(query, wide_keys, wide_values, attn_mask=mask, is_causal=mask is None),
    )


def _faster(*ways: Callable[[], object]) -> Callable[[], object]:
    return min(ways, key=lambda way: best_seconds(way, repeats=3))
