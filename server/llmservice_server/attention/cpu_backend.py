"""Paged attention on a CPU: kernels of our own for what touches the paged cache, torch's products for chunks.

The tokens that stand alone, one of each sequence that decodes, are computed in one call a layer. A chunk of a prompt
has its keys and values at hand in one piece if it is the beginning, and has them copied together otherwise: beside a
chunk's products that is little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from llmservice_server.attention import cpu_kernels
from llmservice_server.attention.base import KVCacheShape, SequenceSlice, slots_of

_PIECES_A_THREAD = 4
"""With fewer sequences than so many for each thread, the heads of a sequence are shared out as well."""

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Several tokens of one sequence: rows `first_row` to `end_row` of the step, from position `start` on."""

    first_row: int
    end_row: int
    start: int
    table: Int32Array

    @property
    def num_queries(self) -> int:
        return self.end_row - self.first_row

    @property
    def end(self) -> int:
        return self.start + self.num_queries

    def first_key(self, window: int | None) -> int:
        """The first position that any of the queries sees."""
        return 0 if window is None else max(0, self.start + 1 - window)


@dataclass(frozen=True, slots=True)
class _Decodes:
    """The tokens that stand alone, in an order in which equal parts are equal work: so threads share them."""

    sequences: Int32Array  # [num_seqs, 4]: row of the step, where its table begins in `blocks`, first key, end of keys
    blocks: Int32Array

    @classmethod
    def of(cls, rows: Sequence[int], slices: Sequence[SequenceSlice], num_threads: int) -> _Decodes:
        sequences: list[tuple[int, int, int, int]] = []
        blocks: list[int] = []
        for place in _dealt([part.start for part in slices], num_threads):
            sequences.append((rows[place], len(blocks), 0, slices[place].start + 1))
            blocks += slices[place].block_table
        return cls(np.array(sequences, np.int32), np.array(blocks, np.int32))

    def within(self, window: int | None) -> Int32Array:
        """`sequences`, with the first key that a layer with this window sees."""
        if window is None:
            return self.sequences
        sequences = self.sequences.copy()
        sequences[:, 2] = np.maximum(0, sequences[:, 3] - window)
        return sequences


class CpuAttention:
    """Implements `AttentionBackend`. The caches' memory is touched only as blocks come into use."""

    device = torch.device("cpu")

    def __init__(self, shape: KVCacheShape, num_blocks: int) -> None:
        self.shape = shape
        self._num_threads = torch.get_num_threads()
        size = (num_blocks, shape.num_kv_heads, 2, shape.block_size, shape.head_dim)
        self.caches = [torch.empty(size, dtype=shape.dtype) for _ in shape.windows]
        self._arrays = [cpu_kernels.as_array(cache) for cache in self.caches]

    def prepare(self, slices: Sequence[SequenceSlice]) -> CpuStep:
        num_threads = cpu_kernels.use_threads(self._num_threads)
        alone: list[SequenceSlice] = []
        rows: list[int] = []
        chunks: list[_Chunk] = []
        row = 0
        for part in slices:
            if part.num_tokens == 1:
                alone.append(part)
                rows.append(row)
            else:
                table = np.array(part.block_table, np.int32)
                chunks.append(_Chunk(row, row + part.num_tokens, part.start, table))
            row += part.num_tokens
        decodes = _Decodes.of(rows, alone, num_threads) if alone else None
        few = len(alone) < _PIECES_A_THREAD * num_threads
        return CpuStep(
            shape=self.shape,
            caches=self._arrays,
            slots=np.array(slots_of(slices, self.shape.block_size), np.int64),
            decodes=decodes,
            parts=self.shape.num_kv_heads if few and num_threads > 1 else 1,
            chunks=chunks,
        )


@dataclass(slots=True)
class CpuStep:
    """Implements `Attend` for one step."""

    shape: KVCacheShape
    caches: list[npt.NDArray[Any]]
    slots: npt.NDArray[np.int64]
    decodes: _Decodes | None
    parts: int  # into which a sequence that decodes is divided, by its key heads
    chunks: list[_Chunk]

    def __call__(self, layer: int, query: torch.Tensor, key_value: torch.Tensor) -> torch.Tensor:
        stored = key_value.to(self.shape.dtype)
        cache, window = self.caches[layer], self.shape.windows[layer]
        cpu_kernels.store(cpu_kernels.as_array(stored), self.slots, cache)
        answer = torch.empty(query.shape)
        if self.decodes is not None:
            self._decode(self.decodes, query, cache, window, answer)
        for chunk in self.chunks:
            answer[chunk.first_row : chunk.end_row] = self._attend_chunk(chunk, query, stored, cache, window)
        return answer.to(query.dtype).flatten(1)

    def _decode(
        self,
        decodes: _Decodes,
        query: torch.Tensor,
        cache: npt.NDArray[Any],
        window: int | None,
        answer: torch.Tensor,
    ) -> None:
        cpu_kernels.decode(
            query.float().contiguous().numpy(),
            cache,
            decodes.within(window),
            decodes.blocks,
            self.parts,
            answer.numpy(),
        )

    def _attend_chunk(
        self, chunk: _Chunk, query: torch.Tensor, stored: torch.Tensor, cache: npt.NDArray[Any], window: int | None
    ) -> torch.Tensor:
        """`[num_queries, num_heads, head_dim]`. The heads of a group see the same keys, which are not repeated."""
        num_kv_heads, head_dim = self.shape.num_kv_heads, self.shape.head_dim
        if chunk.start == 0:
            keys, values = stored[chunk.first_row : chunk.end_row].transpose(0, 1).chunk(2)
        else:
            num_keys = chunk.end - chunk.first_key(window)
            gathered = torch.empty((2, num_kv_heads, num_keys, head_dim), dtype=self.shape.dtype)
            cpu_kernels.gather(cache, chunk.table, chunk.first_key(window), cpu_kernels.as_array(gathered))
            keys, values = gathered
        grouped = query[chunk.first_row : chunk.end_row].view(chunk.num_queries, num_kv_heads, -1, head_dim)
        by_head = grouped.permute(1, 2, 0, 3)
        group = by_head.shape[1]
        keys, values = (part.to(query.dtype)[:, None].expand(-1, group, -1, -1) for part in (keys, values))
        if chunk.start == 0 and (window is None or chunk.num_queries <= window):
            answer = F.scaled_dot_product_attention(by_head, keys, values, is_causal=True)
        else:
            answer = F.scaled_dot_product_attention(by_head, keys, values, attn_mask=_mask(chunk, window))
        return answer.permute(2, 0, 1, 3).flatten(1, 2)


def _mask(chunk: _Chunk, window: int | None) -> torch.Tensor:
    """True where a query may see a key, `[num_queries, num_keys]`."""
    queries = torch.arange(chunk.start, chunk.end)[:, None]
    keys = torch.arange(chunk.first_key(window), chunk.end)
    return (keys <= queries) if window is None else (keys <= queries) & (keys > queries - window)


def _dealt(work: Sequence[int], num_hands: int) -> list[int]:
    """The places of `work`, dealt like cards, most work first, from the first hand to the last and back again."""
    hands: list[list[int]] = [[] for _ in range(num_hands)]
    for turn, place in enumerate(sorted(range(len(work)), key=work.__getitem__, reverse=True)):
        lap, seat = divmod(turn, num_hands)
        hands[seat if lap % 2 == 0 else num_hands - 1 - seat].append(place)
    return [place for hand in hands for place in hand]
