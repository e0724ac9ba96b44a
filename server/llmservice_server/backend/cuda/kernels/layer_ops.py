"""The operations of a layer between its matrix products: RMS norm, SiLU, rotary embedding with the KV store.

Each is one pass over memory; "Bytes" in a docstring is what it reads and writes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from llmservice_server.backend.cuda.kernels.jit import FP8_MAX, jit, padded

ROWS_PER_PROGRAM = 8
_COLUMNS = 1024


@jit
def _add_rms_norm(
    hidden: tl.tensor,
    delta: tl.tensor,
    weight: tl.tensor,
    normed: tl.tensor,
    eps: tl.tensor,
    ADDS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * SIZE
    columns = tl.arange(0, WIDTH)
    mask = columns < SIZE
    states = tl.load(hidden + row + columns, mask=mask, other=0.0)
    if ADDS:
        added = states.to(tl.float32) + tl.load(delta + row + columns, mask=mask, other=0.0).to(tl.float32)
        states = added.to(states.dtype)  # rounded, because the next layer reads the rounded sum
        tl.store(hidden + row + columns, states, mask=mask)
    states = states.to(tl.float32)
    mean_square = tl.sum(states * states, axis=0) / SIZE
    factor = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    scaled = states * tl.rsqrt(mean_square + eps) * factor
    tl.store(normed + row + columns, scaled.to(normed.dtype.element_ty), mask=mask)


def add_rms_norm(hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add `delta` to `hidden` in place, if there is one, and return the sum's RMS norm times `weight`.

    All contiguous: hidden, delta and the result `[num_rows, size]`, weight `[size]`. Bytes: 2 reads and 2 writes of
    `num_rows * size` elements; 1 and 1 without a delta.
    """
    normed = torch.empty_like(hidden)
    size = hidden.shape[1]
    width = padded(size)
    _add_rms_norm[(len(hidden),)](
        hidden,
        hidden if delta is None else delta,
        weight,
        normed,
        eps,
        ADDS=delta is not None,
        SIZE=size,
        WIDTH=width,
        num_warps=min(16, max(2, width // 512)),
    )
    return normed


@jit
def silu(gate: tl.tensor) -> tl.tensor:
    decay = tl.exp(-tl.abs(gate))  # at most 1, so that large gates do not overflow
    return gate * tl.where(gate >= 0, 1.0, decay) / (1.0 + decay)


@jit
def _silu_mul(gate_up: tl.tensor, product: tl.tensor, SIZE: tl.constexpr, COLUMNS: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(product + row * SIZE + columns, (silu(gate) * up).to(product.dtype.element_ty), mask=mask)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` `[num_rows, size]` of `gate_up` `[num_rows, 2 * size]`, contiguous, the gate's columns first.

    Bytes: reads `num_rows * 2 * size` elements and writes half as many.
    """
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    product = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device)
    _silu_mul[num_rows, triton.cdiv(size, _COLUMNS)](gate_up, product, SIZE=size, COLUMNS=_COLUMNS, num_warps=4)
    return product


@jit
def store_rows(
    tile: tl.tensor,  # [ROWS, WIDTH] float32: rows of one token, each part `part` of head `head`
    slot: tl.tensor,  # scalar: of the token
    head: tl.tensor,  # [ROWS]
    part: tl.tensor,  # [ROWS] 0 for keys, 1 for values
    mask: tl.tensor,  # [ROWS]
    columns: tl.tensor,  # [WIDTH] the columns of the row
    column_mask: tl.tensor,  # [WIDTH]
    scale: tl.tensor,  # [ROWS] float32, used for fp8 only
    cache: tl.tensor,
    scales: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STORED: tl.constexpr,
    QUANTIZED: tl.constexpr,
) -> None:
    """Write rows to the slot, unless it is in block 0, the null block."""
    block = (slot // BLOCK_SIZE).to(tl.int64)
    row = ((block * NUM_KV_HEADS + head) * STORED + part) * BLOCK_SIZE + slot % BLOCK_SIZE
    stored = mask & (block > 0)
    if QUANTIZED:
        tile = tile / scale[:, None]
    target = cache + row[:, None] * HEAD_DIM + columns[None, :]
    tl.store(target, tile.to(cache.dtype.element_ty), mask=stored[:, None] & column_mask[None, :])
    if QUANTIZED:
        tl.store(scales + row, scale, mask=stored)


@jit
def row_scale(largest: tl.tensor, MAX: tl.constexpr) -> tl.tensor:
    """The divisor of a row with which the `largest` of its absolute values becomes MAX; never 0."""
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
    STORED: tl.constexpr,  # rows of a token and key head: 1 if keys are the values
    QUANTIZED: tl.constexpr,
    MAX: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    token = tl.program_id(0)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    mask = rows < STORED * NUM_KV_HEADS
    column_mask = columns < HEAD_DIM
    source = key_value + token.to(tl.int64) * token_stride + rows[:, None] * HEAD_DIM + columns[None, :]
    tile = tl.load(source, mask=mask[:, None] & column_mask[None, :], other=0.0).to(tl.float32)
    scale = row_scale(tl.max(tl.abs(tile), axis=1), MAX)
    head, part = rows % NUM_KV_HEADS, rows // NUM_KV_HEADS
    store_rows(
        tile, tl.load(slots + token), head, part, mask, columns, column_mask, scale, cache, scales,
        NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, STORED, QUANTIZED,
    )  # fmt: skip


def store(
    key_value: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor, scales: torch.Tensor | None = None
) -> None:
    """Write `key_value` `[num_tokens, 2 * num_kv_heads, head_dim]`, keys first, to the cache's `slots` `[num_tokens]`.

    cache `[num_blocks, num_kv_heads, 2, block_size, head_dim]`, keys before values; scales `[num_blocks, num_kv_heads,
    2, block_size]` float32, of an fp8 cache. A cache of latents has 1 in the place of 2: keys, which are the values. A
    slot is `block * block_size + offset`; those of block 0 are skipped.
    """
    num_kv_heads, stored, block_size, head_dim = cache.shape[1:]
    _store[len(slots), triton.cdiv(stored * num_kv_heads, ROWS_PER_PROGRAM)](
        key_value,
        slots,
        cache,
        cache if scales is None else scales,
        key_value.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        STORED=stored,
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
    rotated = rows < NUM_HEADS + NUM_KV_HEADS  # queries and keys
    if NORMED:
        weight_mask = rotated[:, None] & column_mask[None, :]
        weights = norm + rows[:, None] * HEAD_DIM + columns[None, :]
        factor = tl.rsqrt(tl.sum(first * first + second * second, axis=1) / HEAD_DIM + eps)[:, None]
        first_weight = tl.load(weights, mask=weight_mask, other=1.0).to(tl.float32)
        second_weight = tl.load(weights + HALF, mask=weight_mask, other=1.0).to(tl.float32)
        first = tl.where(rotated[:, None], first * factor * first_weight, first)
        second = tl.where(rotated[:, None], second * factor * second_weight, second)
    cosine = tl.load(cos + token * HEAD_DIM + columns, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(sin + token * HEAD_DIM + HALF + columns, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    left = tl.where(rotated[:, None], first * cosine - second * sine, first)
    right = tl.where(rotated[:, None], second * cosine + first * sine, second)
    is_query = mask & (rows < NUM_HEADS)[:, None]
    tl.store(source, left.to(heads.dtype.element_ty), mask=is_query)
    tl.store(source + HALF, right.to(heads.dtype.element_ty), mask=is_query)
    kv_row = rows - NUM_HEADS
    is_kv = (kv_row >= 0) & (kv_row < 2 * NUM_KV_HEADS)
    kv_row = tl.where(is_kv, kv_row, 0)
    head, part = kv_row % NUM_KV_HEADS, kv_row // NUM_KV_HEADS
    slot = tl.load(slots + token)
    scale = row_scale(tl.maximum(tl.max(tl.abs(left), axis=1), tl.max(tl.abs(right), axis=1)), MAX)
    store_rows(
        left, slot, head, part, is_kv, columns, column_mask, scale, cache, scales,
        NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, 2, QUANTIZED,
    )  # fmt: skip
    store_rows(
        right, slot, head, part, is_kv, HALF + columns, column_mask, scale, cache, scales,
        NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, 2, QUANTIZED,
    )  # fmt: skip


def rotate_and_store(
    heads: torch.Tensor,
    rotation: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    cache: torch.Tensor,
    scales: torch.Tensor | None = None,
    qk_norm: tuple[torch.Tensor, float] | None = None,
) -> None:
    """Rotate the queries of `heads` in place, and write the rotated keys and the values to the cache's `slots`.

    heads `[num_tokens, num_heads + 2 * num_kv_heads, head_dim]`: queries, keys, values; contiguous. rotation: cosines
    and sines, `[num_tokens, 1, head_dim]` each, the first half of the sines negated (`RotaryEmbedding.at`). qk_norm:
    weights `[num_heads + num_kv_heads, head_dim]` and epsilon of the RMS norm that comes first, if there is one.
    slots, cache and scales as in `store`. Keys and values in `heads` are unchanged. Bytes: `heads`, read and written
    once.
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
        num_warps=2 if head_dim > 64 else 1,  # so that a thread loads 16 bytes of 16-bit numbers at once
    )
