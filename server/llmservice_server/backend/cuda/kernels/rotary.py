"""Rotary embedding and the KV store in one pass: queries are rotated in place, keys on their way into the cache.

Bytes: reads `num_tokens * (num_heads + 2 * num_kv_heads) * head_dim` elements, and writes as many: the queries' back,
the others into the cache. Apart they would be three reads and writes of the keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from llmservice_server.backend.cuda.kernels.jit import FP8_MAX, jit, padded

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


@jit
def _rotate_and_store(
    heads: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    norm: tl.tensor,
    slots: tl.tensor,
    cache: tl.tensor,
    scales: tl.tensor,
    token_stride: tl.tensor,
    eps: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NORMED: tl.constexpr,
    QUANTIZED: tl.constexpr,
    MAX: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,  # of half a head
) -> None:
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    column_mask = columns < HALF
    mask = (rows < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & column_mask[None, :]
    source = heads + token.to(tl.int64) * token_stride + rows[:, None] * HEAD_DIM + columns[None, :]
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    turned = rows < NUM_HEADS + NUM_KV_HEADS  # queries and keys
    if NORMED:
        weight_mask = turned[:, None] & column_mask[None, :]
        weights = norm + rows[:, None] * HEAD_DIM + columns[None, :]
        factor = tl.rsqrt(tl.sum(first * first + second * second, axis=1) / HEAD_DIM + eps)[:, None]
        first_weight = tl.load(weights, mask=weight_mask, other=1.0).to(tl.float32)
        second_weight = tl.load(weights + HALF, mask=weight_mask, other=1.0).to(tl.float32)
        first = tl.where(turned[:, None], first * factor * first_weight, first)
        second = tl.where(turned[:, None], second * factor * second_weight, second)
    cosine = tl.load(cos + token * HEAD_DIM + columns, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(sin + token * HEAD_DIM + HALF + columns, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    left = tl.where(turned[:, None], first * cosine - second * sine, first)
    right = tl.where(turned[:, None], second * cosine + first * sine, second)
    is_query = mask & (rows < NUM_HEADS)[:, None]
    tl.store(source, left.to(heads.dtype.element_ty), mask=is_query)
    tl.store(source + HALF, right.to(heads.dtype.element_ty), mask=is_query)
    kv_row = rows - NUM_HEADS
    kept = (kv_row >= 0) & (kv_row < 2 * NUM_KV_HEADS)
    kv_row = tl.where(kept, kv_row, 0)
    head, part = kv_row % NUM_KV_HEADS, kv_row // NUM_KV_HEADS
    slot = tl.load(slots + token)
    scale = row_scale(tl.maximum(tl.max(tl.abs(left), axis=1), tl.max(tl.abs(right), axis=1)), MAX)
    store_rows(
        left, slot, head, part, kept, columns, column_mask, scale, cache, scales,
        NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, QUANTIZED,
    )  # fmt: skip
    store_rows(
        right, slot, head, part, kept, HALF + columns, column_mask, scale, cache, scales,
        NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, QUANTIZED,
    )  # fmt: skip


def rotate_and_store(
    heads: torch.Tensor,
    rotation: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    cache: torch.Tensor,
    scales: torch.Tensor | None = None,
    qk_norm: tuple[torch.Tensor, float] | None = None,
) -> None:
    """Rotate the queries of `heads` in place, and put the rotated keys and the values into the cache's `slots`.

    heads `[num_tokens, num_heads + 2 * num_kv_heads, head_dim]`: queries, keys, values; contiguous. rotation: cosines
    and sines, `[num_tokens, 1, head_dim]` each, the first half of the sines negated (`RotaryEmbedding.at`). qk_norm:
    weights `[num_heads + num_kv_heads, head_dim]` and epsilon of the RMS norm that comes first, where there is one.
    slots, cache and scales as in `kv_store.store`. Keys and values in `heads` stay as they were.
    """
    num_kv_heads, block_size, head_dim = cache.shape[1], cache.shape[3], cache.shape[4]
    num_rows = heads.shape[1]
    cos, sin = rotation
    weight, eps = qk_norm if qk_norm is not None else (heads, 0.0)
    _rotate_and_store[heads.shape[0], triton.cdiv(num_rows, ROWS_PER_PROGRAM)](
        heads,
        cos,
        sin,
        weight,
        slots,
        cache,
        cache if scales is None else scales,
        heads.stride(0),
        eps,
        NUM_HEADS=num_rows - 2 * num_kv_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        NORMED=qk_norm is not None,
        QUANTIZED=scales is not None,
        MAX=FP8_MAX,
        ROWS=ROWS_PER_PROGRAM,
        WIDTH=padded(head_dim // 2),
        num_warps=2,
    )
