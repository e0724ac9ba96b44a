"""Paged attention on a CPU.

If the kernel for chunks of prompts is worth compiling, one call per layer computes all tokens of a step on the cache's
blocks. Otherwise kernels store keys and values and compute decodes, and torch computes the chunks: with the step's own
keys and values if a chunk begins its prompt, and with a contiguous copy from the cache if not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from llmservice_server.backend.base import Rotation
from llmservice_server.backend.cache_shape import KVCacheShape
from llmservice_server.backend.cpu import attention_kernels as kernels
from llmservice_server.backend.cpu.compiled import use_threads
from llmservice_server.backend.cpu.layer_ops import rotate_and_store, store
from llmservice_server.backend.cpu.linear import KERNEL_ROWS
from llmservice_server.backend.cpu.llvm import as_array
from llmservice_server.backend.step_input import Int32Array, Int64Array, StepInput, firsts_of, joined
from llmservice_server.backend.torch.attention import attend_chunk, attend_otherwise, first_key, visible

_TILE_ROWS = 256
"""About the rows of a tile, for all of which a key is gathered once; their scores and sums stay in the core's cache."""
_GATHER_TOKENS = 8
"""To gather and pack a key costs as much as the products of this many tokens with it."""


def query_tiles(step: StepInput, *, num_kv_heads: int, group: int, num_threads: int) -> Int32Array:
    """The step's tokens in tiles `[num_tiles, 5]`, as `kernels.attend_tiles` takes them.

    A tile's columns are its first row, its number of tokens, the end of its last token's keys, the first entry of its
    block table, and its key head. The order is that of `balanced_order`.
    """
    starts, counts = step.starts, step.counts
    tiles_each = -(-counts * group // _TILE_ROWS)
    sizes = -(-counts // tiles_each)
    tiles_each = -(-counts // sizes)
    sequence = np.repeat(np.arange(len(counts)), tiles_each)
    behind = (np.arange(len(sequence)) - firsts_of(tiles_each)[sequence]) * sizes[sequence]
    num_tokens = np.minimum(sizes[sequence], counts[sequence] - behind)
    ends = starts[sequence] + behind + num_tokens
    columns = (step.rows[sequence] + behind, num_tokens, ends, step.table_firsts[sequence])
    tiles = np.empty((len(sequence), num_kv_heads, 5), np.int32)
    for number, column in enumerate(columns):
        tiles[:, :, number] = column[:, None]
    tiles[:, :, 4] = np.arange(num_kv_heads)
    work = ends * (num_tokens + _GATHER_TOKENS)
    return tiles.reshape(-1, 5)[balanced_order(np.repeat(work, num_kv_heads), num_threads)]


def balanced_order(work: Int64Array | Int32Array, num_threads: int) -> Int64Array:
    """An order of the items in which `num_threads` equal runs of them have about equal work.

    The items are assigned by decreasing work to the threads from the first to the last, and back again.
    """
    if len(work) <= num_threads:
        return np.arange(len(work))
    rounds = np.full((-(-len(work) // num_threads), num_threads), -1)  # -1: no item in the last round
    rounds.ravel()[: len(work)] = np.argsort(-work, kind="stable")
    rounds[1::2] = rounds[1::2, ::-1]
    order = rounds.T.ravel()
    return order[order >= 0]


_NO_WINDOW = 1 << 31  # longer than any sequence
_PARTS_PER_THREAD = 4
"""With fewer sequences per thread, the key heads of each sequence are divided among the threads as well."""


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


@dataclass(frozen=True, slots=True)
class _Decodes:
    """The sequences with one token, in `balanced_order`."""

    sequences: Int32Array  # [num_seqs, 3]: row of the step, first entry of the block table in `blocks`, number of keys
    blocks: Int32Array
    parts: int  # into which the key heads of a sequence are divided

    @classmethod
    def of(cls, step: StepInput, alone: Int64Array, parts: int, num_threads: int) -> _Decodes:
        """Of the sequences `alone` of a step, those with one token."""
        last_keys = step.starts[alone]
        sequences = np.empty((len(alone), 3), np.int32)
        sequences[:, 0], sequences[:, 1], sequences[:, 2] = step.rows[alone], step.table_firsts[alone], last_keys + 1
        return cls(sequences[balanced_order(last_keys, num_threads)], step.blocks, parts)

    @classmethod
    def of_all(cls, step: StepInput, parts: int, num_threads: int) -> _Decodes:
        """Of a step of decodes only, in few calls, because each counts in a step of one sequence."""
        tables = step.block_tables
        firsts = accumulate(map(len, tables[:-1]), initial=0)
        starts = step.starts.tolist()
        rows = [(row, first, start + 1) for row, (first, start) in enumerate(zip(firsts, starts, strict=True))]
        sequences = np.array(rows, np.int32)
        if len(rows) > num_threads:
            sequences = sequences[balanced_order(sequences[:, 2], num_threads)]
        return cls(sequences, joined(tables), parts)

    @property
    def arguments(self) -> tuple[Int32Array, Int32Array, int]:
        """As `kernels.decode` takes them."""
        return self.sequences, self.blocks, self.parts


def _block(shape: KVCacheShape) -> tuple[int, int, int, int]:
    return shape.num_kv_heads, shape.stored, shape.block_size, shape.head_dim


def _windows(shape: KVCacheShape) -> Int64Array:
    return np.array([_NO_WINDOW if window is None else window for window in shape.windows], np.int64)


def _is_balanced(num_parts: int, num_threads: int) -> bool:
    """Whether threads with equal shares of `num_parts` have about equal work."""
    return num_parts % num_threads == 0 or num_parts >= _PARTS_PER_THREAD * num_threads


class CpuAttention:
    """Implements `Attention`. The operating system allocates the caches' memory when blocks are first written."""

    device = torch.device("cpu")

    def __init__(self, shape: KVCacheShape, num_blocks: int, *, tiled: bool = False) -> None:
        """`tiled`: chunks of prompts are computed by our kernel, which takes seconds to compile."""
        self._tiled = tiled
        self._num_threads = torch.get_num_threads()
        self._all = torch.empty(len(shape.windows), num_blocks, *_block(shape), dtype=shape.dtype)
        self._set_shape(shape)

    def _set_shape(self, shape: KVCacheShape) -> None:
        self.shape = shape
        self.caches = list(self._all.unbind())
        self._array = as_array(self._all)
        self._windows = _windows(shape)
        self._head_shape = kernels.head_shape(shape.num_heads // shape.num_kv_heads, shape.head_dim)

    def viewed(self, shape: KVCacheShape) -> CpuAttention:
        other = copy(self)
        other._all = self._all.view(len(self._all), -1, *_block(shape))
        other._set_shape(shape)
        return other

    def decodes(self, step: StepInput) -> tuple[Any, ...]:
        """A step of decodes only, for compiled code.

        Caches and windows of all layers, and the arguments `decodes` and `shape` of `kernels.rotate_and_decode`.
        """
        num_threads = use_threads(self._num_threads)
        decodes = _Decodes.of_all(step, self._parts(len(step), num_threads), num_threads)
        return self._array, self._windows, decodes.arguments, self._head_shape

    def _parts(self, num_seqs: int, num_threads: int) -> int:
        """Into how many parts the key heads of each decode are divided.

        The fewest with which no thread is idle, because each costs a microsecond.
        """
        num_kv_heads = self.shape.num_kv_heads
        parts = (parts for parts in range(1, num_kv_heads) if num_kv_heads % parts == 0)
        enough = (each for each in parts if _is_balanced(num_seqs * each, num_threads))
        return next(enough, num_kv_heads)

    def prepare(self, step: StepInput) -> CpuStep:
        num_threads = use_threads(self._num_threads)
        alone = np.flatnonzero(step.counts == 1)
        slots = step.slots(self.shape.block_size)
        attend = CpuStep(self.shape, self._head_shape, self.caches, self._array, self._windows, slots)
        if self._tiled and (not step.is_decode or len(step) > KERNEL_ROWS):  # fewer are one compiled call
            num_kv_heads = self.shape.num_kv_heads
            group = self.shape.num_heads // num_kv_heads
            tiles = query_tiles(step, num_kv_heads=num_kv_heads, group=group, num_threads=num_threads)
            return replace(attend, tiles=(tiles, step.blocks))
        decodes = _Decodes.of(step, alone, self._parts(len(alone), num_threads), num_threads) if len(alone) else None
        if step.is_decode:
            return replace(attend, decodes=decodes)
        columns = (step.rows.tolist(), step.counts.tolist(), step.starts.tolist(), step.block_tables)
        chunks = [
            _Chunk(row, row + count, start, np.array(table, np.int32))
            for row, count, start, table in zip(*columns, strict=True)
            if count != 1
        ]
        return replace(attend, decodes=decodes, chunks=chunks)


@dataclass(slots=True)
class CpuStep:
    """Implements `RotatingAttend` for one step."""

    shape: KVCacheShape
    head_shape: kernels.HeadShape
    layers: list[torch.Tensor]  # the cache of each
    caches: npt.NDArray[Any]  # the same, for kernels
    windows: Int64Array  # of all layers
    slots: Int64Array
    tiles: tuple[Int32Array, Int32Array] | None = None
    """Of all tokens, and the block tables; instead of `decodes` and `chunks`."""
    decodes: _Decodes | None = None
    chunks: Sequence[_Chunk] = ()
    masks: dict[tuple[int, int | None], torch.Tensor] = field(default_factory=dict)  # by first row and window

    def __call__(
        self, layer: int, query: torch.Tensor, key_value: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        stored = key_value.to(self.shape.dtype)
        store(as_array(stored), self.slots, self.caches[layer])
        return self._attend(layer, query.contiguous(), stored, sinks)

    def rotate_and_attend(
        self, layer: int, heads: torch.Tensor, rotation: Rotation, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Implements `RotatingAttend`."""
        num_heads = self.shape.num_heads
        rotate_and_store(as_array(heads), _rotation_arrays(rotation), self.slots, num_heads, self.caches[layer])
        return self._attend(layer, heads, heads[:, num_heads:].to(self.shape.dtype), sinks)

    def _attend(
        self, layer: int, query: torch.Tensor, stored: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """`query`: `[num_tokens, num_heads or more, head_dim]`. `stored`: keys and values in the cache's dtype."""
        num_heads = self.shape.num_heads
        output = query.new_empty(len(query), num_heads, self.shape.head_dim)
        rows, cache = as_array(query), self.caches[layer]
        scores_of_nothing = np.empty(0, np.float32) if sinks is None else as_array(sinks.float())
        rule = self.windows[layer], np.float32(self.shape.softcap or 0), scores_of_nothing
        if self.tiles is not None:
            dtypes = kernels.product_dtypes(rows, cache)
            kernels.attend_tiles(rows, cache, *self.tiles, rule, as_array(output), self.head_shape, dtypes)
        elif self.decodes is not None:
            kernels.decode(rows, cache, self.decodes.arguments, rule, as_array(output), self.head_shape)
        for chunk in self.chunks:
            chunk_query = query[chunk.first_row : chunk.end_row, :num_heads]
            output[chunk.first_row : chunk.end_row] = self._attend_chunk(layer, chunk, chunk_query, stored, sinks)
        return output.flatten(1)

    def _attend_chunk(
        self, layer: int, chunk: _Chunk, query: torch.Tensor, stored: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """`[num_queries, num_heads, head_dim]`."""
        num_kv_heads, window = self.shape.num_kv_heads, self.shape.windows[layer]
        if chunk.start == 0:
            rows = stored[chunk.first_row : chunk.end_row, : self.shape.stored * num_kv_heads]
            parts = rows.transpose(0, 1).chunk(self.shape.stored)
        else:
            parts = self._cached(layer, chunk).unbind()
        keys, values = parts[0], parts[-1]
        if not self.shape.is_plain:
            keys, values = keys.to(query.dtype), values.to(query.dtype)
            mask, softcap = visible(chunk.start, chunk.end, window, keys.device), self.shape.softcap
            otherwise = attend_otherwise(query.transpose(0, 1), keys, values, mask, softcap=softcap, sinks=sinks)
            return otherwise.transpose(0, 1)
        is_causal = chunk.start == 0 and (window is None or chunk.num_queries <= window)
        return attend_chunk(query, keys, values, None if is_causal else self._mask(chunk, window, query.dtype))

    def _cached(self, layer: int, chunk: _Chunk) -> torch.Tensor:
        """A copy of what is stored of the tokens that the chunk sees, `[stored, num_kv_heads, num_keys, head_dim]`."""
        block_size, first = self.shape.block_size, first_key(chunk.start, self.shape.windows[layer])
        first_block = first // block_size
        blocks = torch.from_numpy(chunk.table[first_block : -(-chunk.end // block_size)])
        copied = self.layers[layer].permute(2, 1, 0, 3, 4).index_select(2, blocks).flatten(2, 3)
        return copied[:, :, first - first_block * block_size : chunk.end - first_block * block_size]

    def _mask(self, chunk: _Chunk, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """What is added to the scores, `[num_queries, num_keys]`, made once for all layers.

        torch would convert a boolean mask to this in each layer.
        """
        mask = self.masks.get((chunk.first_row, window))
        if mask is None:
            seen = visible(chunk.start, chunk.end, window, CpuAttention.device)
            mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -math.inf)
            self.masks[chunk.first_row, window] = mask
        return mask


def _rotation_arrays(rotation: Rotation) -> tuple[npt.NDArray[Any], np.float32, npt.NDArray[Any], npt.NDArray[Any]]:
    """As `rotate_and_store` takes it."""
    weight, eps = (rotation.cos.new_empty(0, 0), 0.0) if rotation.qk_norm is None else rotation.qk_norm
    return as_array(weight), np.float32(eps), as_array(rotation.cos.flatten(1)), as_array(rotation.sin.flatten(1))
