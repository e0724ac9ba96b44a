"""Causal attention of any number of tokens a sequence over the paged cache: prompts, chunks, mixed batches (Flash).

The step's tokens are concatenated. A program computes some successive tokens of one sequence and one key head; the
query heads that share it are further rows of its tile. All keys, including the step's own, are read from the cache
through the block table, so that later chunks, prompts with a cached prefix and decodes need no special case.

Bytes: each program reads the keys and values that its tokens see; all query tiles of a sequence read them again, mostly
from the L2 cache. FLOPs: `4 * num_heads * head_dim` for each pair of a token and a key that it sees.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl

from llmservice_server.backend.cuda.kernels.jit import (
    dot_dtype,
    has_little_shared_memory,
    jit,
    jit_for_any,
    takes_large_tiles,
)
from llmservice_server.backend.cuda.kernels.paged_decode import (
    add_values,
    bounded,
    first_max,
    heads_per_tile,
    key_rows,
    keys_of_latents,
    keys_per_tile,
    load_queries,
    parts_of,
    score_keys,
    store_sums,
)

_LOG2_E = math.log2(math.e)
_MOST_KEYS, _MOST_KEYS_OF_LARGE_TILES = 64, 128
_STAGES = 2


def tile_rows(group: int, width: int, itemsize: int) -> int:
    """Rows of a tile, each a token and a head: as many as registers hold beside sums that are `width` wide.

    Products of float32 (`itemsize` 4) do not use the tensor cores and need more registers. Before Ampere, queries, keys
    and values of 16 bits have to fit into 64 KB.
    """
    rows = 16 if itemsize == 4 else 64 if width > 128 else 128
    if itemsize == 2 and has_little_shared_memory():
        rows = min(rows, 8192 // width)
    return max(rows, _group_rows(group, width))


def _group_rows(group: int, width: int) -> int:
    """Heads of a tile, of those that share a key head."""
    return min(1 << (group - 1).bit_length(), heads_per_tile(group, width))


def tokens_per_tile(num_heads: int, num_kv_heads: int, head_dim: int, cache_dtype: torch.dtype) -> int:
    """The tokens of each of the `query_tiles` that `prefill` takes for such a cache."""
    group, (width, _) = num_heads // num_kv_heads, parts_of(head_dim)
    return tile_rows(group, width, cache_dtype.itemsize) // _group_rows(group, width)


def query_tiles(num_tokens: Sequence[int], tile_tokens: int) -> Iterator[tuple[int, int]]:
    """The number of the sequence and the first token of each tile; the last tiles, which see most keys, come first."""
    for sequence, count in enumerate(num_tokens):
        last = (count - 1) // tile_tokens * tile_tokens
        for first in range(last, -1, -tile_tokens):
            yield sequence, first


@jit
def _attend_tile(
    queries: tl.tensor,  # [ROWS, WIDTH]
    rest_queries: tl.tensor,  # [ROWS, REST]
    query_position: tl.tensor,  # [ROWS]
    row_max: tl.tensor,  # as in `add_values`
    row_sum: tl.tensor,
    sums: tl.tensor,
    rest_sums: tl.tensor,
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
    REST: tl.constexpr,
    STORED: tl.constexpr,
    BOUND: tl.constexpr,
    MASKED: tl.constexpr,  # a row may not see a key; `first_key`, `end` and `window` are used only then
) -> tl.tensor:
    """`add_values` of the keys from `begin` on."""
    positions = begin + tl.arange(0, KEYS)
    existing = tl.minimum(tl.maximum(positions, first_key), end - 1) if MASKED else positions
    slot_row = key_rows(table, existing, kv_head, NUM_KV_HEADS, BLOCK_SIZE, STORED)
    scores, keys, rest, factor = score_keys(
        queries, rest_queries, slot_row, cache, scales, HEAD_DIM, WIDTH, REST, QUANTIZED, DOT
    )
    if BOUND > 0:
        scores = bounded(scores, scale, BOUND)
    if MASKED:
        visible = positions[None, :] <= query_position[:, None]
        visible &= (window == 0) | (positions[None, :] > query_position[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
    return add_values(
        scores, row_max, row_sum, sums, rest_sums, keys, rest, factor, slot_row + BLOCK_SIZE, cache, scales,
        1.0 if BOUND > 0 else scale, HEAD_DIM, WIDTH, REST, STORED, QUANTIZED, DOT, MASKED,
    )  # fmt: skip


@jit_for_any("window")
def _prefill(
    query: tl.tensor,
    cache: tl.tensor,
    scales: tl.tensor,
    tiles: tl.tensor,  # [num_tiles, 2] int32: number of the sequence, first of its tokens
    sequences: tl.tensor,  # [num_seqs, 4] int32: first row of query and output, first position, tokens, row of tables
    tables: tl.tensor,  # [num_tables, table_stride] int32
    output: tl.tensor,
    sinks: tl.tensor,  # [NUM_KV_HEADS * GROUP], read if HAS_SINKS
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
    STORED: tl.constexpr,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP_ROWS: tl.constexpr,  # heads of a tile: those of a group, rounded up to a power of 2, or a part of them
    WIDTH: tl.constexpr,
    REST: tl.constexpr,
    BOUND: tl.constexpr,  # of the scores in base 2; 0: none
    HAS_SINKS: tl.constexpr,
) -> None:
    parts_of_group: tl.constexpr = (GROUP + GROUP_ROWS - 1) // GROUP_ROWS
    tile, kv_head = tl.program_id(0), tl.program_id(1) // parts_of_group
    sequence, first_token = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    first_row, start = tl.load(sequences + 4 * sequence), tl.load(sequences + 4 * sequence + 1)
    num_tokens = tl.load(sequences + 4 * sequence + 2)
    lines = tl.arange(0, ROWS)
    token = first_token + lines // GROUP_ROWS
    member = tl.program_id(1) % parts_of_group * GROUP_ROWS + lines % GROUP_ROWS
    is_query = (token < num_tokens) & (member < GROUP)
    row = (first_row + token).to(tl.int64)
    heads = kv_head * GROUP + member
    source = query + row[:, None] * query_stride + heads[:, None] * HEAD_DIM
    queries, rest_queries = load_queries(source, is_query, HEAD_DIM, WIDTH, REST, DOT)
    query_position = start + token
    first_key = tl.where(window > 0, tl.maximum(start + first_token + 1 - window, 0), 0)
    end = start + tl.minimum(first_token + ROWS // GROUP_ROWS, num_tokens)
    row_max, row_sum = first_max(sinks, heads, is_query, HAS_SINKS)
    sums, rest_sums = tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS, max(REST, 16)], tl.float32)
    table = tables + tl.load(sequences + 4 * sequence + 3).to(tl.int64) * table_stride
    first_tile = first_key // KEYS * KEYS
    seen_by_all = tl.where(window > 0, first_tile, (start + first_token + 1) // KEYS * KEYS)
    for begin in range(first_tile, seen_by_all, KEYS):  # most tiles of a long prompt need no mask
        row_max, row_sum, sums, rest_sums = _attend_tile(
            queries, rest_queries, query_position, row_max, row_sum, sums, rest_sums, table, cache, scales, kv_head,
            begin, first_key, end, window, scale,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, QUANTIZED, DOT, KEYS, WIDTH, REST, STORED, BOUND, MASKED=False,
        )  # fmt: skip
    for begin in range(seen_by_all, end, KEYS):
        row_max, row_sum, sums, rest_sums = _attend_tile(
            queries, rest_queries, query_position, row_max, row_sum, sums, rest_sums, table, cache, scales, kv_head,
            begin, first_key, end, window, scale,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, QUANTIZED, DOT, KEYS, WIDTH, REST, STORED, BOUND, MASKED=True,
        )  # fmt: skip
    total = tl.where(row_sum == 0, 1.0, row_sum)[:, None]
    target = output + (row[:, None] * NUM_KV_HEADS * GROUP + heads[:, None]) * HEAD_DIM
    store_sums(target, sums / total, rest_sums / total, is_query, HEAD_DIM, WIDTH, REST)


def prefill(
    query: torch.Tensor,
    cache: torch.Tensor,
    scales: torch.Tensor | None,
    output: torch.Tensor,
    window: int | None = None,
    *,
    tiles: torch.Tensor,
    sequences: torch.Tensor,
    tables: torch.Tensor,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Attend the tokens of `sequences` causally, each sequence to itself, and write their rows of `output`.

    query `[num_tokens, num_heads, head_dim]`, heads contiguous; output `[num_tokens, num_heads * head_dim]`,
    contiguous. cache and scales as in `layer_ops.store`. tiles `[num_tiles, 2]`: of `query_tiles` and
    `tokens_per_tile`. sequences `[num_seqs, 4]`: first row, position of the first token (all keys up to the
    step's own are in the cache), number of tokens, row of tables `[num_tables, blocks]`. All int32. softcap and sinks
    as of `decode`.
    """
    num_heads, head_dim = query.shape[1], query.shape[2]
    num_kv_heads, block_size = cache.shape[1], cache.shape[3]
    group, (width, rest) = num_heads // num_kv_heads, parts_of(head_dim)
    most = _MOST_KEYS_OF_LARGE_TILES if takes_large_tiles() else _MOST_KEYS
    rows, group_rows = tile_rows(group, width, cache.dtype.itemsize), _group_rows(group, width)
    _prefill[len(tiles), num_kv_heads * triton.cdiv(group, group_rows)](
        query,
        cache,
        cache if scales is None else scales,
        tiles,
        sequences,
        tables,
        output,
        output if sinks is None else sinks,
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
        STORED=cache.shape[2],
        KEYS=keys_of_latents(cache) or keys_per_tile(width, query.dtype.itemsize, most),
        ROWS=rows,
        GROUP_ROWS=group_rows,
        WIDTH=width,
        REST=rest,
        BOUND=(softcap or 0.0) * _LOG2_E,
        HAS_SINKS=sinks is not None,
        num_warps=8 if rows >= 128 or width > 256 else 4,
        num_stages=_STAGES,
    )
