"""Keys and values into the paged cache, by slot.

A layer's cache is `[num_blocks, num_kv_heads, 2, block_size, head_dim]`, keys before values: what one head reads of a
block is one stream. An fp8 cache (e4m3) has beside it the scales `[num_blocks, num_kv_heads, 2, block_size]`, float32:
each token's keys of a head are divided by their own scale, the largest of them becoming 448, so that no calibration is
needed and nothing overflows.

Bytes: reads `num_tokens * 2 * num_kv_heads * head_dim` elements once and writes as many (fp8: one byte each, and four
for the scale of a row).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from llmservice_server.kernels.jit import FP8_MAX, jit, padded

ROWS_PER_PROGRAM = 8


@jit
def store_rows(
    tile: tl.tensor,  # [ROWS, WIDTH] float32: rows of one token, part `part` of head `head` each
    slot: tl.tensor,  # scalar, the token's
    head: tl.tensor,  # [ROWS]
    part: tl.tensor,  # [ROWS] 0 for keys, 1 for values
    mask: tl.tensor,  # [ROWS]
    columns: tl.tensor,  # [WIDTH] where in a row the tile's columns lie
    column_mask: tl.tensor,  # [WIDTH]
    scale: tl.tensor,  # [ROWS] float32, read for fp8 only
    cache: tl.tensor,
    scales: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUANTIZED: tl.constexpr,
) -> None:
    """Write rows into the slot, unless it is of block 0: that is the null block, which never holds a token."""
    block = (slot // BLOCK_SIZE).to(tl.int64)
    row = ((block * NUM_KV_HEADS + head) * 2 + part) * BLOCK_SIZE + slot % BLOCK_SIZE
    kept = mask & (block > 0)
    if QUANTIZED:
        tile = tile / scale[:, None]
    target = cache + row[:, None] * HEAD_DIM + columns[None, :]
    tl.store(target, tile.to(cache.dtype.element_ty), mask=kept[:, None] & column_mask[None, :])
    if QUANTIZED:
        tl.store(scales + row, scale, mask=kept)


@jit
def row_scale(largest: tl.tensor, MAX: tl.constexpr) -> tl.tensor:
    """What a row is divided by so that the `largest` of its absolute values becomes MAX; never 0."""
    return tl.maximum(largest, 1e-30) / MAX


@jit
def _store(
    key_value: tl.tensor,
    slots: tl.tensor,
    cache: tl.tensor,
    scales: tl.tensor,
    token_stride: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUANTIZED: tl.constexpr,
    MAX: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    token = tl.program_id(0)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    mask = rows < 2 * NUM_KV_HEADS
    column_mask = columns < HEAD_DIM
    source = key_value + token.to(tl.int64) * token_stride + rows[:, None] * HEAD_DIM + columns[None, :]
    tile = tl.load(source, mask=mask[:, None] & column_mask[None, :], other=0.0).to(tl.float32)
    scale = row_scale(tl.max(tl.abs(tile), axis=1), MAX)
    head, part = rows % NUM_KV_HEADS, rows // NUM_KV_HEADS
    store_rows(
        tile, tl.load(slots + token), head, part, mask, columns, column_mask, scale, cache, scales,
        NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, QUANTIZED,
    )  # fmt: skip


def store(
    key_value: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor, scales: torch.Tensor | None = None
) -> None:
    """Put `key_value` `[num_tokens, 2 * num_kv_heads, head_dim]`, keys first, into the cache's `slots` `[num_tokens]`.

    A slot is `block * block_size + offset`; slots of the null block are skipped. `scales` belong to an fp8 cache.
    """
    num_kv_heads, block_size, head_dim = cache.shape[1], cache.shape[3], cache.shape[4]
    _store[len(slots), triton.cdiv(2 * num_kv_heads, ROWS_PER_PROGRAM)](
        key_value,
        slots,
        cache,
        cache if scales is None else scales,
        key_value.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        QUANTIZED=scales is not None,
        MAX=FP8_MAX,
        ROWS=ROWS_PER_PROGRAM,
        WIDTH=padded(head_dim),
        num_warps=2,
    )
