"""Paged attention on a GPU by our kernels (`kernels/`); chunks of prompts by torch's, if that proved faster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from llmservice_server.backend.base import Int32Array, KVCacheShape, Rotation, StepInput
from llmservice_server.backend.cuda.kernels.jit import FP8
from llmservice_server.backend.cuda.kernels.layer_ops import rotate_and_store, store
from llmservice_server.backend.cuda.kernels.paged_decode import DecodeScratch, decode, num_splits
from llmservice_server.backend.cuda.kernels.paged_prefill import prefill, query_tiles, tokens_per_tile
from llmservice_server.backend.transfer import tables_to_device

if TYPE_CHECKING:
    from llmservice_server.backend.cuda.varlen import Varlen

_INTERPRETED_PROCESSORS = 2
_TABLE_STEP = 16  # blocks: Triton compiles other kernels for strides that are not multiples of 16


@dataclass(frozen=True, slots=True)
class StepTables:
    """A step's integer arguments of the kernels, on the host.

    Sequences with one token (decodes) are separate from those with several (chunks).
    """

    slots: Int32Array  # [num_tokens]
    decode_rows: Int32Array  # [num_decodes] index of the token
    decode_lengths: Int32Array  # [num_decodes] number of keys, its own included
    decode_tables: Int32Array  # [num_decodes, blocks], padded with the null block
    chunks: Int32Array  # [num_chunks, 3] first row, position of the first token, tokens
    chunk_tables: Int32Array  # [num_chunks, blocks], padded with the null block

    @classmethod
    def of(cls, step: StepInput, block_size: int) -> StepTables:
        starts, counts, rows = step.starts, step.counts, step.rows
        tables = padded_tables(step)
        is_decode = counts == 1
        return cls(
            slots=step.slots(block_size).astype(np.int32),
            decode_rows=rows[is_decode].astype(np.int32),
            decode_lengths=(starts[is_decode] + 1).astype(np.int32),
            decode_tables=tables[is_decode],
            chunks=np.stack([rows, starts, counts], axis=1)[~is_decode].astype(np.int32),
            chunk_tables=tables[~is_decode],
        )


def table_width(num_blocks: int) -> int:
    """The width of a table of `num_blocks` blocks."""
    return -(-num_blocks // _TABLE_STEP) * _TABLE_STEP


def padded_tables(step: StepInput) -> Int32Array:
    """The step's block tables, one per row, padded with the null block to a width that seldom changes."""
    lengths = np.diff(np.append(step.table_firsts, len(step.blocks)))
    width = table_width(int(lengths.max(initial=0)))
    rows = np.zeros((len(lengths), width), np.int32)
    rows[np.arange(width) < lengths[:, None]] = step.blocks
    return rows


@dataclass(frozen=True, slots=True)
class Decodes:
    """The sequences of a step with one token, on the device: arguments of `decode`."""

    rows: torch.Tensor
    lengths: torch.Tensor
    tables: torch.Tensor
    splits: int
    scratch: DecodeScratch


ChunkAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, int | None], None]
"""Attends the sequences of a step with several tokens, whose keys and values are in the cache already. Takes query,
cache, scales, output and window, as `prefill`, and writes the sequences' rows of the output."""


class TritonAttention:
    """Implements `Attention`. An fp8 cache's scales follow the layers' caches in `caches`.

    `varlen` computes the chunks of the steps that it supports.
    """

    def __init__(
        self, shape: KVCacheShape, num_blocks: int, device: torch.device, varlen: Varlen | None = None
    ) -> None:
        self.shape = shape
        self._varlen = varlen
        self.device = device
        self.max_length = num_blocks * shape.block_size
        size = (num_blocks, shape.num_kv_heads, 2, shape.block_size, shape.head_dim)
        self._caches = [torch.empty(size, dtype=shape.dtype, device=device) for _ in shape.windows]
        self._scales: list[torch.Tensor | None] = [
            torch.empty(size[:-1], dtype=torch.float32, device=device) if shape.dtype == FP8 else None
            for _ in shape.windows
        ]
        self.caches = self._caches + [scales for scales in self._scales if scales is not None]
        self._num_processors = (
            torch.cuda.get_device_properties(device).multi_processor_count
            if device.type == "cuda"
            else _INTERPRETED_PROCESSORS
        )

    def prepare(self, step: StepInput) -> TritonStep:
        tables = StepTables.of(step, self.shape.block_size)
        shape = self.shape
        tile_tokens = tokens_per_tile(shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.dtype)
        tiles = np.array([*query_tiles(tables.chunks[:, 2].tolist(), tile_tokens)], np.int32).reshape(-1, 2)
        slots, rows, lengths, decode_tables, tiles_on_device, chunks, chunk_tables = tables_to_device(
            [
                tables.slots,
                tables.decode_rows,
                tables.decode_lengths,
                tables.decode_tables,
                tiles,
                tables.chunks,
                tables.chunk_tables,
            ],
            self.device,
        )
        own = partial(prefill, tiles=tiles_on_device, sequences=chunks, tables=chunk_tables) if len(chunks) else None
        return self.step(
            slots,
            self.decodes(rows, lengths, decode_tables) if len(rows) else None,
            (self._varlen.chunks(tables, shape, self.device) if self._varlen else None) or own,
        )

    def decodes(self, rows: torch.Tensor, lengths: torch.Tensor, tables: torch.Tensor) -> Decodes:
        """The arguments of `decode`. The number of splits depends only on the number of sequences."""
        shape = self.shape
        splits = num_splits(len(rows), shape.num_kv_heads, self.max_length, self._num_processors)
        num_parts = len(rows) * splits if splits > 1 else 0
        return Decodes(
            rows, lengths, tables, splits, DecodeScratch(num_parts, shape.num_heads, shape.head_dim, self.device)
        )

    def step(self, slots: torch.Tensor, decodes: Decodes | None, chunks: ChunkAttention | None) -> TritonStep:
        return TritonStep(self.shape, self._caches, self._scales, slots, decodes, chunks)


@dataclass(slots=True)
class TritonStep:
    """Implements `RotatingAttend` for one step."""

    shape: KVCacheShape
    caches: list[torch.Tensor]
    scales: list[torch.Tensor | None]
    slots: torch.Tensor
    decodes: Decodes | None
    chunks: ChunkAttention | None

    def __call__(self, layer: int, query: torch.Tensor, key_value: torch.Tensor) -> torch.Tensor:
        store(key_value, self.slots, self.caches[layer], self.scales[layer])
        return self._attend(layer, query)

    def rotate_and_attend(self, layer: int, heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        rotate_and_store(
            heads, (rotation.cos, rotation.sin), self.slots, self.caches[layer], self.scales[layer], rotation.qk_norm
        )
        return self._attend(layer, heads[:, : self.shape.num_heads])

    def _attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        cache, scales, window = self.caches[layer], self.scales[layer], self.shape.windows[layer]
        output = torch.empty((query.shape[0], query.shape[1] * query.shape[2]), dtype=query.dtype, device=query.device)
        if self.decodes is not None:
            parts = self.decodes
            decode(
                query, cache, scales, parts.rows, parts.lengths, parts.tables, output, parts.splits, parts.scratch,
                window,
            )  # fmt: skip
        if self.chunks is not None:
            self.chunks(query, cache, scales, output, window)
        return output
