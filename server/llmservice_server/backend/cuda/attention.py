"""Paged attention on a GPU by our kernels (`kernels/`); chunks of prompts by torch's, if that proved faster."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch

from llmservice_server.backend.base import Rotation
from llmservice_server.backend.cache_shape import KVCacheShape
from llmservice_server.backend.cuda.block_tables import BlockTables
from llmservice_server.backend.cuda.kernels.jit import FP8, num_processors
from llmservice_server.backend.cuda.kernels.layer_ops import rotate_and_store, store
from llmservice_server.backend.cuda.kernels.paged_decode import (
    DecodeScratch,
    WorkList,
    decode,
    num_items,
    programs_of_a_part,
    split,
)
from llmservice_server.backend.cuda.kernels.paged_prefill import prefill, query_tiles, tokens_per_tile
from llmservice_server.backend.grouped import GroupedAttention
from llmservice_server.backend.step_input import Int32Array, Int64Array, StepInput
from llmservice_server.backend.transfer import tables_to_device

if TYPE_CHECKING:
    from llmservice_server.backend.cuda.varlen import Varlen


@dataclass(frozen=True, slots=True)
class StepTables:
    """A step's integer arguments of the kernels, on the host.

    Sequences with one token (decodes) are separate from those with several (chunks).
    """

    slots: Int32Array  # [num_tokens]
    decode_rows: Int32Array  # [num_decodes] index of the token
    decode_lengths: Int64Array  # [num_decodes] number of keys, its own included
    chunks: Int32Array  # [num_chunks, 3] first row, position of the first token, tokens
    is_decode: npt.NDArray[np.bool_]  # [num_seqs]
    blocks: Int32Array  # of all sequences
    chunk_firsts: Int64Array  # [num_chunks] the index of each chunk's first block in `blocks`

    @classmethod
    def of(cls, step: StepInput, block_size: int) -> StepTables:
        starts, counts, rows = step.starts, step.counts, step.rows
        is_decode = counts == 1
        return cls(
            slots=step.slots(block_size).astype(np.int32),
            decode_rows=rows[is_decode].astype(np.int32),
            decode_lengths=starts[is_decode] + 1,
            chunks=np.stack([rows, starts, counts], axis=1)[~is_decode].astype(np.int32),
            is_decode=is_decode,
            blocks=step.blocks,
            chunk_firsts=step.table_firsts[~is_decode],
        )


@dataclass(frozen=True, slots=True)
class Decodes:
    """The sequences of a step with one token, on the device: arguments of `decode`."""

    places: torch.Tensor
    work: dict[int | None, WorkList]  # by window
    tables: torch.Tensor
    scratch: DecodeScratch


class ChunkAttention(Protocol):
    def __call__(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        scales: torch.Tensor | None,
        output: torch.Tensor,
        window: int | None,
        *,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> None:
        """Attend the sequences of a step with several tokens, whose keys and values are in the cache already.

        As `prefill`; writes the sequences' rows of the output.
        """


def _block(shape: KVCacheShape) -> tuple[int, int, int, int]:
    return shape.num_kv_heads, shape.stored, shape.block_size, shape.head_dim


def _each_once(windows: Sequence[int | None]) -> list[int | None]:
    return sorted({*windows}, key=lambda window: window or 0)


class TritonAttention:
    """Implements `Attention`. An fp8 cache's scales follow the layers' caches in `caches`, for each kind of heads.

    `varlen` computes the chunks of the steps that it supports.
    """

    def __init__(
        self, shape: KVCacheShape, num_blocks: int, device: torch.device, varlen: Varlen | None = None
    ) -> None:
        self._varlen = varlen
        self.device = device
        size = (num_blocks, *_block(shape))
        self._caches = [torch.empty(size, dtype=shape.dtype, device=device) for _ in shape.windows]
        self.caches = [*self._caches]
        for cache in self.caches:
            cache[0].zero_()  # the null block: torch's kernel reads it and multiplies it by 0
        self._scales_of: dict[tuple[int, ...], list[torch.Tensor]] = {}
        self._num_processors = num_processors(device)
        self._set_shape(shape)

    def _set_shape(self, shape: KVCacheShape) -> None:
        self.shape = shape
        self.windows = _each_once(shape.windows)
        self.tables = BlockTables(self.device)
        self._caches = [cache.view(-1, *_block(shape)) for cache in self._caches]
        self._scales: Sequence[torch.Tensor | None] = [None] * len(self._caches)
        if shape.dtype == FP8:
            self._scales = self._scales_for(shape)

    def _scales_for(self, shape: KVCacheShape) -> list[torch.Tensor]:
        """One of each row, the same for all groups of layers with such heads."""
        scales = self._scales_of.get(block := _block(shape))
        if scales is None:
            scales = [torch.zeros(cache.shape[:-1], device=self.device) for cache in self._caches]
            self.caches += [each.view(len(self.caches[0]), -1) for each in scales]
            self._scales_of[block] = scales
        return scales

    def viewed(self, shape: KVCacheShape) -> TritonAttention:
        other = copy(self)
        other._set_shape(shape)
        return other

    @property
    def parts(self) -> list[TritonAttention]:
        """As `GroupedAttention`, of which graphs know both kinds."""
        return [self]

    def split(self, step: StepInput) -> list[StepInput]:
        return [step]

    def joined(self, steps: Sequence[TritonStep]) -> TritonStep:
        [step] = steps
        return step

    def prepare(self, step: StepInput) -> TritonStep:
        tables = StepTables.of(step, self.shape.block_size)
        shape = self.shape
        tile_tokens = tokens_per_tile(shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.dtype)
        tiles = np.array([*query_tiles(tables.chunks[:, 2].tolist(), tile_tokens)], np.int32).reshape(-1, 2)
        there = self.tables
        if not there.has_room(len(step)):  # a sequence has a table for each chunk that it is divided into
            there = BlockTables(self.device)
        table_rows = there.update(step.block_tables)
        places = np.stack([tables.decode_rows, table_rows[tables.is_decode]], axis=1)
        chunks = np.column_stack([tables.chunks, table_rows[~tables.is_decode]])
        lists = self.work(tables.decode_lengths)
        has_parts = [bool(firsts[-1] > len(places)) for firsts in lists[1::2]]
        slots, places_there, tiles_there, chunks_there, *work = tables_to_device(
            [tables.slots, places, tiles, chunks, *lists], self.device
        )
        own = partial(prefill, tiles=tiles_there, sequences=chunks_there, tables=there.matrix)
        return self.step(
            slots,
            self.decodes(places_there, work, has_parts, there) if len(places) else None,
            ((self._varlen.chunks(tables, shape, self.device) if self._varlen else None) or own)
            if len(chunks)
            else None,
        )

    def num_items(self, num_decodes: int) -> int:
        shape = self.shape
        programs = programs_of_a_part(shape.num_heads, shape.num_kv_heads, shape.head_dim)
        return num_items(num_decodes, programs, self._num_processors)

    def work(self, lengths: Int64Array) -> list[Int32Array]:
        """The arrays of the work list of decodes of these lengths, for each window of the model's layers."""
        if not len(lengths):
            return []
        length = self.num_items(len(lengths))
        return [part for window in self.windows for part in split(lengths, window, length)]

    def decodes(
        self,
        places: torch.Tensor,
        work: Sequence[torch.Tensor],
        has_parts: Sequence[bool] | None = None,
        tables: BlockTables | None = None,
    ) -> Decodes:
        """The arguments of `decode`; `work` as its namesake returns it, on the device.

        `has_parts`: whether a sequence has several, by window; None: it may differ between the repetitions of a graph.
        `tables`: None: those that graphs read.
        """
        shape = self.shape
        lists = map(WorkList, work[::2], work[1::2], has_parts or [True] * len(self.windows))
        return Decodes(
            places,
            dict(zip(self.windows, lists, strict=True)),
            (tables or self.tables).matrix,
            DecodeScratch(self.num_items(len(places)), shape.num_heads, shape.head_dim, self.device),
        )

    def step(self, slots: torch.Tensor, decodes: Decodes | None, chunks: ChunkAttention | None) -> TritonStep:
        return TritonStep(self.shape, self._caches, self._scales, slots, decodes, chunks)


GraphAttention = TritonAttention | GroupedAttention[TritonAttention]


@dataclass(slots=True)
class TritonStep:
    """Implements `RotatingAttend` for one step."""

    shape: KVCacheShape
    caches: list[torch.Tensor]
    scales: Sequence[torch.Tensor | None]
    slots: torch.Tensor
    decodes: Decodes | None
    chunks: ChunkAttention | None
    output: torch.Tensor | None = None
    """Where each layer's result is written; None: to new memory."""

    def __call__(
        self, layer: int, query: torch.Tensor, key_value: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        store(key_value, self.slots, self.caches[layer], self.scales[layer])
        return self._attend(layer, query, sinks)

    def rotate_and_attend(
        self, layer: int, heads: torch.Tensor, rotation: Rotation, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        rotate_and_store(
            heads, (rotation.cos, rotation.sin), self.slots, self.caches[layer], self.scales[layer], rotation.qk_norm
        )
        return self._attend(layer, heads[:, : self.shape.num_heads], sinks)

    def _attend(self, layer: int, query: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        cache, scales, window = self.caches[layer], self.scales[layer], self.shape.windows[layer]
        output = self.output
        if output is None:
            output = query.new_empty((query.shape[0], query.shape[1] * query.shape[2]))
        if self.decodes is not None:
            parts = self.decodes
            work, softcap = parts.work[window], self.shape.softcap
            arguments = query, cache, scales, parts.places, work, parts.tables, output, parts.scratch
            decode(*arguments, softcap=softcap, sinks=sinks)
        if self.chunks is not None:
            self.chunks(query, cache, scales, output, window, softcap=self.shape.softcap, sinks=sinks)
        return output
