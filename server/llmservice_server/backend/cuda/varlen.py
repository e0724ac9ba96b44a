"""Prompts and their chunks by torch's own `varlen_attn` (FlashAttention) on keys and values fetched from the cache.

Torch's CUDA builds carry FlashAttention 2, whose block tables torch refuses or gets wrong (pytorch/pytorch#175924,
#194167): those are for FlashAttention 3, which is installed and activated apart from torch. So the blocks are first
gathered to rows that lie end to end, in one indexed copy a layer.

Bytes: that copy reads and writes `2 * num_kv_heads * head_dim * itemsize` for each token of the chunks' sequences, from
their first to the chunk's last; the kernel then reads them as ours does. FLOPs: as `kernels/paged_prefill.py`.

Single tokens stay with our kernels: they read each key once, so a copy of them would double their time, and CUDA graphs
want shapes that do not depend on lengths. So do fp8 caches, and float32, which FlashAttention does not take.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from llmservice_server.backend.base import Int32Array, KVCacheShape, firsts_of, positions_of
from llmservice_server.backend.cuda.step_tables import StepTables, to_device

_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Where sequences that lie end to end begin."""

    queries: torch.Tensor  # int32 [num_seqs + 1], the last one's end included
    keys: torch.Tensor  # likewise
    most_queries: int  # of a sequence
    most_keys: int


VarlenFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Bounds, int | None], torch.Tensor]
"""Of queries `[num_queries, num_heads, head_dim]`, keys and values, `[num_keys, num_kv_heads, head_dim]` each, and a
window: answers like the queries. Causal; the last query of a sequence sees its last key."""


def by_torch(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: Bounds, window: int | None
) -> torch.Tensor:
    """A `VarlenFunction`. Raises ImportError where torch has none (before 2.10)."""
    from torch.nn.attention.varlen import varlen_attn

    asked = "enable_gqa" in inspect.signature(varlen_attn).parameters  # torch 2.11 takes grouped heads unasked
    grouped: dict[str, Any] = {"enable_gqa": True} if asked else {}
    attended = varlen_attn(
        query,
        key,
        value,
        bounds.queries,
        bounds.keys,
        bounds.most_queries,
        bounds.most_keys,
        window_size=(-1 if window is None else window - 1, 0),  # keys to the left and the right of the query's own
        **grouped,
    )
    return cast("torch.Tensor", attended)  # a tuple only where more is asked for


@dataclass(frozen=True, slots=True)
class VarlenTables:
    """A step's chunks for `varlen_attn`, on the host."""

    query_bounds: Int32Array  # [num_chunks + 1]
    key_bounds: Int32Array  # [num_chunks + 1]
    query_rows: Int32Array  # [num_queries], among the step's tokens
    key_rows: Int32Array  # [num_keys]: of the first head's key, in a cache that is a matrix of rows of head_dim
    longest_chunk: int
    longest_sequence: int

    @classmethod
    def of(cls, tables: StepTables, shape: KVCacheShape) -> VarlenTables:
        """The step has at least one chunk."""
        first_rows, starts, counts = tables.chunks.astype(np.int64).T
        lengths = starts + counts
        sequence, position = positions_of(np.zeros_like(lengths), lengths)
        blocks = tables.chunk_tables[sequence, position // shape.block_size].astype(np.int64)
        rows_before = blocks * shape.num_kv_heads * 2 * shape.block_size
        return cls(
            query_bounds=_bounds(counts),
            key_bounds=_bounds(lengths),
            query_rows=positions_of(first_rows, counts)[1].astype(np.int32),
            key_rows=(rows_before + position % shape.block_size).astype(np.int32),
            longest_chunk=int(counts.max()),
            longest_sequence=int(lengths.max()),
        )


@dataclass(frozen=True, slots=True)
class VarlenChunks:
    """The chunks of a step, on the device."""

    attend: VarlenFunction
    bounds: Bounds
    query_rows: torch.Tensor  # int64 [num_queries], among the step's tokens
    rows: torch.Tensor  # int32 [2 * num_keys * num_kv_heads]: keys before values, all heads of a token side by side

    @classmethod
    def of(
        cls, attend: VarlenFunction, tables: VarlenTables, shape: KVCacheShape, device: torch.device
    ) -> VarlenChunks:
        query_bounds, key_bounds, query_rows, key_rows = to_device(
            [tables.query_bounds, tables.key_bounds, tables.query_rows, tables.key_rows], device
        )
        kinds = torch.arange(2, dtype=torch.int32, device=device) * shape.block_size
        heads = torch.arange(shape.num_kv_heads, dtype=torch.int32, device=device) * 2 * shape.block_size
        rows = key_rows[None, :, None] + kinds[:, None, None] + heads
        bounds = Bounds(query_bounds, key_bounds, tables.longest_chunk, tables.longest_sequence)
        return cls(attend, bounds, query_rows.long(), rows.flatten())

    def __call__(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        scales: torch.Tensor | None,
        answer: torch.Tensor,
        window: int | None,
    ) -> None:
        """Implements `ChunkAttention`; never with `scales`."""
        num_kv_heads, head_dim = cache.shape[1], cache.shape[-1]
        fetched = cache.view(-1, head_dim).index_select(0, self.rows)
        key, value = fetched.view(2, -1, num_kv_heads, head_dim).unbind()
        attended = self.attend(query.index_select(0, self.query_rows), key, value, self.bounds, window)
        answer.index_copy_(0, self.query_rows, attended.flatten(1))


@dataclass(frozen=True, slots=True)
class Varlen:
    """Which steps' chunks go that way."""

    attend: VarlenFunction
    most_keys: int  # of a step; what is gathered takes memory that the profiling pass must have seen

    def chunks(self, tables: StepTables, shape: KVCacheShape, device: torch.device) -> VarlenChunks | None:
        """None where the step has more keys, or no chunk."""
        num_keys = int(tables.chunks[:, 1:].sum())
        if not 0 < num_keys <= self.most_keys:
            return None
        return VarlenChunks.of(self.attend, VarlenTables.of(tables, shape), shape, device)


def why_varlen_cannot_serve(shape: KVCacheShape, dtype: torch.dtype) -> str | None:
    """What rules it out before anything is run: a phrase, or None."""
    if shape.dtype.itemsize == 1:
        return "an fp8 cache is for our own kernels"
    if dtype not in _DTYPES or shape.dtype != dtype:
        return f"it takes bfloat16 and float16, and keys of the queries' dtype, not {dtype} with {shape.dtype}"
    return None


def _bounds(counts: np.typing.NDArray[np.int64]) -> Int32Array:
    return np.append(firsts_of(counts), counts.sum()).astype(np.int32)
