"""Causal attention of any number of tokens a sequence over the paged cache: prompts, chunks, mixed batches (Flash).

The step's tokens lie end to end. A program takes some successive tokens of one sequence and one key head; the query
heads that share it are further rows of its tile. All keys, those of the step's own tokens too, are read from the cache
by the block table, so that a prompt's later chunk, a prompt whose beginning was cached, and a single token that decodes
are all the same to it.

Bytes: each program reads the keys and values that its tokens see; all query tiles of a sequence read them again, from
the L2 cache for the most part. FLOPs: `4 * num_heads * head_dim` for each pair of a token and a key that it sees.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import triton.language as tl

from llmservice_server.backend.cuda.kernels.jit import dot_dtype, jit, jit_for_any, padded
from llmservice_server.backend.cuda.kernels.paged_decode import key_rows, keys_per_tile, load_rows

_LOG2_E = math.log2(math.e)


def tile_rows(group: int, width: int, itemsize: int) -> int:
    """Rows of a tile, a token and a head each: as many as registers hold beside sums that are `width` wide.

    Products of float32, which an exact cache (`itemsize` 4) is for, run without the tensor cores and take more of them.
    """
    rows = 16 if itemsize == 4 else 64 if width > 128 else 128
    return max(rows, 1 << (group - 1).bit_length())


def tokens_per_tile(num_heads: int, num_kv_heads: int, head_dim: int, cache_dtype: torch.dtype) -> int:
    """How far apart the `query_tiles` are that `prefill` takes for such a cache."""
    group = num_heads // num_kv_heads
    return tile_rows(group, padded(head_dim), cache_dtype.itemsize) >> (group - 1).bit_length()


def query_tiles(num_tokens: Sequence[int], tile_tokens: int) -> Iterator[tuple[int, int]]:
    """Number of the sequence and first of its tokens, for each tile; the last tiles, which see the most, come first."""
    for sequence, count in enumerate(num_tokens):
        last = (count - 1) // tile_tokens * tile_tokens
        for first in range(last, -1, -tile_tokens):
            yield sequence, first


@jit
def _attend_tile(
    queries: tl.tensor,  # [ROWS, WIDTH]
    own: tl.tensor,  # [ROWS] their positions
    highest: tl.tensor,  # [ROWS] of their scores so far, in powers of 2
    total: tl.tensor,  # [ROWS] of their weights
    sums: tl.tensor,  # [ROWS, WIDTH] of the values by weight
    table: tl.tensor,
    cache: tl.tensor,
    scales: tl.tensor,
    kv_head: tl.tensor,
    begin: tl.tensor,  # the tile's first key
    first_key: tl.tensor,
    end: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUANTIZED: tl.constexpr,
    DOT: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,  # some row may not see some key: `first_key`, `end` and `window` are only read then
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """`highest`, `total` and `sums` with what KEYS keys add to them."""
    positions = begin + tl.arange(0, KEYS)
    there = tl.minimum(tl.maximum(positions, first_key), end - 1) if MASKED else positions
    slot_row = key_rows(table, there, kv_head, NUM_KV_HEADS, BLOCK_SIZE)
    keys, key_factor = load_rows(cache, scales, slot_row, HEAD_DIM, WIDTH, QUANTIZED, DOT)
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    if QUANTIZED:
        scores *= key_factor[None, :]
    if MASKED:
        sees = positions[None, :] <= own[:, None]
        sees &= (window == 0) | (positions[None, :] > own[:, None] - window)
        scores = tl.where(sees, scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, axis=1) * scale)
    finite = new_highest
    if MASKED:
        finite = tl.where(new_highest == float("-inf"), 0.0, new_highest)  # a row that has seen no key yet
    weights = tl.exp2(scores * scale - finite[:, None])
    shrink = tl.exp2(highest - finite)
    total = total * shrink + tl.sum(weights, axis=1)
    values, value_factor = load_rows(cache, scales, slot_row + BLOCK_SIZE, HEAD_DIM, WIDTH, QUANTIZED, DOT)
    if QUANTIZED:
        weights *= value_factor[None, :]
    return new_highest, total, tl.dot(weights.to(DOT), values, sums * shrink[:, None], input_precision="ieee")


@jit_for_any("window")
def _prefill(
    query: tl.tensor,
    cache: tl.tensor,
    scales: tl.tensor,
    tiles: tl.tensor,  # [num_tiles, 2] int32: number of the sequence, first of its tokens
    sequences: tl.tensor,  # [num_seqs, 3] int32: first row of query and answer, position of the first token, tokens
    tables: tl.tensor,  # [num_seqs, table_stride] int32
    answer: tl.tensor,
    query_stride: tl.tensor,
    table_stride: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUANTIZED: tl.constexpr,
    DOT: tl.constexpr,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP_ROWS: tl.constexpr,  # GROUP, rounded up to a power of 2
    WIDTH: tl.constexpr,
) -> None:
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    sequence, first_token = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    first_row = tl.load(sequences + 3 * sequence)
    start, num_tokens = tl.load(sequences + 3 * sequence + 1), tl.load(sequences + 3 * sequence + 2)
    lines, columns = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    token, member = first_token + lines // GROUP_ROWS, lines % GROUP_ROWS
    asks = (token < num_tokens) & (member < GROUP)
    mask = asks[:, None] & (columns < HEAD_DIM)[None, :]
    row = (first_row + token).to(tl.int64)
    heads = kv_head * GROUP + member
    source = query + row[:, None] * query_stride + heads[:, None] * HEAD_DIM + columns[None, :]
    queries = tl.load(source, mask=mask, other=0.0).to(DOT)
    own = start + token  # the query's position
    first_key = tl.where(window > 0, tl.maximum(start + first_token + 1 - window, 0), 0)
    end = start + tl.minimum(first_token + ROWS // GROUP_ROWS, num_tokens)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    table = tables + sequence.to(tl.int64) * table_stride
    first_tile = first_key // KEYS * KEYS
    seen_by_all = tl.where(window > 0, first_tile, (start + first_token + 1) // KEYS * KEYS)
    for begin in range(first_tile, seen_by_all, KEYS):  # most of a long prompt's tiles: no mask, no comparison
        highest, total, sums = _attend_tile(
            queries, own, highest, total, sums, table, cache, scales, kv_head, begin, first_key, end, window, scale,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, QUANTIZED, DOT, KEYS, WIDTH, MASKED=False,
        )  # fmt: skip
    for begin in range(seen_by_all, end, KEYS):
        highest, total, sums = _attend_tile(
            queries, own, highest, total, sums, table, cache, scales, kv_head, begin, first_key, end, window, scale,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, QUANTIZED, DOT, KEYS, WIDTH, MASKED=True,
        )  # fmt: skip
    sums = sums / tl.where(total == 0, 1.0, total)[:, None]
    target = answer + (row[:, None] * NUM_KV_HEADS * GROUP + heads[:, None]) * HEAD_DIM + columns[None, :]
    tl.store(target, sums.to(answer.dtype.element_ty), mask=mask)


def prefill(
    query: torch.Tensor,
    cache: torch.Tensor,
    scales: torch.Tensor | None,
    answer: torch.Tensor,
    window: int | None = None,
    *,
    tiles: torch.Tensor,
    sequences: torch.Tensor,
    tables: torch.Tensor,
) -> None:
    """Attend the tokens of `sequences` causally, each sequence to itself, and write their rows of `answer`.

    query `[num_tokens, num_heads, head_dim]`, heads contiguous; answer `[num_tokens, num_heads * head_dim]`,
    contiguous. cache and scales as in `kv_store`. tiles `[num_tiles, 2]`: what `query_tiles` yields for
    `tokens_per_tile`. sequences `[num_seqs, 3]`: first row, position of the first token (all earlier ones are in the
    cache, and the step's own by now as well), number of tokens. tables `[num_seqs, blocks]`. All int32.
    """
    num_heads, head_dim = query.shape[1], query.shape[2]
    num_kv_heads, block_size = cache.shape[1], cache.shape[3]
    group, width = num_heads // num_kv_heads, padded(head_dim)
    rows = tile_rows(group, width, cache.dtype.itemsize)
    _prefill[len(tiles), num_kv_heads](
        query,
        cache,
        cache if scales is None else scales,
        tiles,
        sequences,
        tables,
        answer,
        query.stride(0),
        tables.stride(0),
        window or 0,
        _LOG2_E / math.sqrt(head_dim),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        QUANTIZED=scales is not None,
        DOT=dot_dtype(query.dtype),
        KEYS=keys_per_tile(width, query.dtype.itemsize),
        ROWS=rows,
        GROUP_ROWS=1 << (group - 1).bit_length(),
        WIDTH=width,
        num_warps=8 if rows >= 128 else 4,
        num_stages=3,
    )
