"""Attention of one token a sequence over the paged cache, split over the context (Flash-Decoding).

A program computes one sequence, one key head and one part of the context. The query heads that share the key head are
the rows of one tile, so that keys and values are read once for all of them. Each part's softmax is partial; a second
kernel combines the parts. With one part the first kernel writes the output itself.

Bytes: keys and values of all visible tokens, once: `sum(lengths) * 2 * num_kv_heads * head_dim` elements (fp8: and four
bytes of scale for every row of head_dim), which bounds the speed of decoding. The parts add `num_seqs * num_heads *
num_splits * (head_dim + 2)` float32, written and read.
"""

from __future__ import annotations

import math

import torch
import triton.language as tl

from llmservice_server.backend.cuda.kernels.jit import dot_dtype, jit, jit_for_any, padded

MAX_SPLITS = 64
_MOST_KEYS_PER_TILE = 64
_MOST_FP8_KEYS_PER_TILE = 128
"""An fp8 tile is read in half the time: with 64 keys the loop has more instructions than a Hopper processor issues
while it waits for memory."""
_TILE_BYTES = 1 << 14  # of keys, and of values; two of each are being loaded while one is used
_PROGRAMS_PER_PROCESSOR = 4
"""So that no processor of the GPU is idle, whichever sequences are long."""
_LOG2_E = math.log2(math.e)


def num_splits(num_seqs: int, num_kv_heads: int, max_length: int, num_processors: int) -> int:
    """The number of parts of each sequence's context.

    It depends on what is known when a graph is captured, never on the lengths of a step's sequences.
    """
    wanted = -(-_PROGRAMS_PER_PROCESSOR * num_processors // (num_seqs * num_kv_heads))
    return max(1, min(wanted, MAX_SPLITS, -(-max_length // _MOST_KEYS_PER_TILE)))


def keys_per_tile(width: int, itemsize: int) -> int:
    """Keys of a tile, of `width` numbers of `itemsize` bytes each."""
    most = _MOST_FP8_KEYS_PER_TILE if itemsize == 1 else _MOST_KEYS_PER_TILE
    return max(16, min(most, _TILE_BYTES // (width * itemsize)))


@jit
def load_rows(
    cache: tl.tensor,
    scales: tl.tensor,
    slot_row: tl.tensor,  # [KEYS] the row of the cache that holds each key, or value
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    QUANTIZED: tl.constexpr,
    DOT: tl.constexpr,
) -> tl.tensor:
    """Rows of the cache as operand of a product, `[KEYS, WIDTH]`, and the scale of each row, `[KEYS]`."""
    columns = tl.arange(0, WIDTH)
    inside = (columns < HEAD_DIM)[None, :]  # always true if the two are equal; then there is no mask
    tile = tl.load(cache + slot_row[:, None] * HEAD_DIM + columns[None, :], mask=inside, other=0.0)
    if QUANTIZED:
        factor = tl.load(scales + slot_row)
        operand = tile.to(tl.float32).to(DOT)  # exact; direct conversion to bfloat16 has a quarter of the rate
    else:
        factor = tl.full(slot_row.shape, 1.0, tl.float32)
        operand = tile.to(DOT)
    return operand, factor


@jit
def key_rows(
    table: tl.tensor,
    positions: tl.tensor,
    kv_head: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
) -> tl.tensor:
    """The cache's rows of the keys at `positions` of the sequence with this block table; values are BLOCK_SIZE rows on.

    All positions must exist: for fewer keys than a tile has, the caller repeats one. That reads no more bytes, and a
    mask would cost an instruction for each load.
    """
    block = tl.load(table + positions // BLOCK_SIZE).to(tl.int64)
    return (block * NUM_KV_HEADS + kv_head) * 2 * BLOCK_SIZE + positions % BLOCK_SIZE


@jit
def score_keys(
    queries: tl.tensor,
    slot_row: tl.tensor,
    cache: tl.tensor,
    scales: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    QUANTIZED: tl.constexpr,
    DOT: tl.constexpr,
) -> tl.tensor:
    """The products of `queries` `[ROWS, WIDTH]` with the keys in `slot_row` `[KEYS]`."""
    keys, key_factor = load_rows(cache, scales, slot_row, HEAD_DIM, WIDTH, QUANTIZED, DOT)
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    if QUANTIZED:
        scores *= key_factor[None, :]
    return scores


@jit
def add_values(
    scores: tl.tensor,  # [ROWS, KEYS] minus infinity: masked
    row_max: tl.tensor,  # [ROWS] of the scores so far, in base 2
    row_sum: tl.tensor,  # [ROWS] of their weights
    sums: tl.tensor,  # [ROWS, WIDTH] of the weighted values
    slot_row: tl.tensor,  # [KEYS] of the values
    cache: tl.tensor,
    scales: tl.tensor,
    scale: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    QUANTIZED: tl.constexpr,
    DOT: tl.constexpr,
    MASKED: tl.constexpr,  # a row may have seen no key yet
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """`row_max`, `row_sum` and `sums` with KEYS more keys: online softmax (arXiv:1805.02867)."""
    new_max = tl.maximum(row_max, tl.max(scores, axis=1) * scale)
    finite = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
    weights = tl.exp2(scores * scale - finite[:, None])
    rescale = tl.exp2(row_max - finite)
    row_sum = row_sum * rescale + tl.sum(weights, axis=1)
    values, value_factor = load_rows(cache, scales, slot_row, HEAD_DIM, WIDTH, QUANTIZED, DOT)
    if QUANTIZED:
        weights *= value_factor[None, :]
    return new_max, row_sum, tl.dot(weights.to(DOT), values, sums * rescale[:, None], input_precision="ieee")


@jit_for_any("num_splits", "window")
def _decode(
    query: tl.tensor,
    cache: tl.tensor,
    scales: tl.tensor,
    rows: tl.tensor,  # [num_seqs] int32: the row of query and output
    lengths: tl.tensor,  # [num_seqs] int32: keys, the token's own included; 0: the output is zeros
    tables: tl.tensor,  # [num_seqs, table_stride] int32
    output: tl.tensor,
    partial: tl.tensor,  # [num_seqs, NUM_KV_HEADS * GROUP, num_splits, HEAD_DIM] float32
    partial_max: tl.tensor,  # [num_seqs, NUM_KV_HEADS * GROUP, num_splits] float32, of scores in base 2
    partial_sum: tl.tensor,
    query_stride: tl.tensor,
    table_stride: tl.tensor,
    num_splits: tl.tensor,
    window: tl.tensor,  # keys that the token sees, its own included; 0: all
    scale: tl.tensor,  # of the scores, times log2(e)
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUANTIZED: tl.constexpr,
    WHOLE: tl.constexpr,
    DOT: tl.constexpr,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + sequence)
    row = tl.load(rows + sequence).to(tl.int64)
    first = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    span = tl.cdiv(tl.cdiv(length - first, num_splits), KEYS) * KEYS
    begin = first + split * span
    end = tl.minimum(begin + span, length)
    member, columns = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    heads = kv_head * GROUP + member
    mask = (member < GROUP)[:, None] & (columns < HEAD_DIM)[None, :]
    queries = tl.load(query + row * query_stride + heads[:, None] * HEAD_DIM + columns[None, :], mask=mask, other=0.0)
    queries = queries.to(DOT)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    table = tables + sequence.to(tl.int64) * table_stride
    for start in range(begin, end, KEYS):
        positions = start + tl.arange(0, KEYS)
        slot_row = key_rows(table, tl.minimum(positions, end - 1), kv_head, NUM_KV_HEADS, BLOCK_SIZE)
        scores = score_keys(queries, slot_row, cache, scales, HEAD_DIM, WIDTH, QUANTIZED, DOT)
        scores = tl.where((positions < end)[None, :], scores, float("-inf"))
        row_max, row_sum, sums = add_values(
            scores, row_max, row_sum, sums, slot_row + BLOCK_SIZE, cache, scales, scale,
            HEAD_DIM, WIDTH, QUANTIZED, DOT, MASKED=False,
        )  # fmt: skip
    if WHOLE:
        sums = sums / tl.where(row_sum == 0, 1.0, row_sum)[:, None]
        target = output + (row * NUM_KV_HEADS * GROUP + heads[:, None]) * HEAD_DIM + columns[None, :]
        tl.store(target, sums.to(output.dtype.element_ty), mask=mask)
    else:
        part = (sequence.to(tl.int64) * NUM_KV_HEADS * GROUP + heads) * num_splits + split
        tl.store(partial_max + part, row_max, mask=member < GROUP)
        tl.store(partial_sum + part, row_sum, mask=member < GROUP)
        tl.store(partial + part[:, None] * HEAD_DIM + columns[None, :], sums, mask=mask & (begin < end))


@jit_for_any("num_splits")
def _reduce(
    partial: tl.tensor,
    partial_max: tl.tensor,
    partial_sum: tl.tensor,
    rows: tl.tensor,
    output: tl.tensor,
    num_splits: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Combine the parts of one head of one sequence; a part without keys has a sum of 0 and nothing in `partial`."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + sequence).to(tl.int64)
    splits, columns = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    part = (sequence.to(tl.int64) * NUM_HEADS + head) * num_splits + splits
    exists = splits < num_splits
    part_sums = tl.load(partial_sum + part, mask=exists, other=0.0)
    part_max = tl.load(partial_max + part, mask=exists, other=float("-inf"))
    filled = part_sums != 0  # true for NaN, which reaches the output
    row_max = tl.max(part_max, axis=0)
    weights = tl.exp2(part_max - tl.where(row_max == float("-inf"), 0.0, row_max))
    mask = filled[:, None] & (columns < HEAD_DIM)[None, :]
    sums = tl.load(partial + part[:, None] * HEAD_DIM + columns[None, :], mask=mask, other=0.0)
    total = tl.sum(part_sums * weights, axis=0)
    combined = tl.sum(sums * weights[:, None], axis=0) / tl.where(total == 0, 1.0, total)
    target = output + (row * NUM_HEADS + head) * HEAD_DIM + columns
    tl.store(target, combined.to(output.dtype.element_ty), mask=columns < HEAD_DIM)


class DecodeScratch:
    """The memory of `num_parts` partial results, sequences times splits."""

    def __init__(self, num_parts: int, num_heads: int, head_dim: int, device: torch.device) -> None:
        self.sums = torch.empty(num_parts * num_heads, head_dim, dtype=torch.float32, device=device)
        self.max = torch.empty(num_parts * num_heads, dtype=torch.float32, device=device)
        self.total = torch.empty_like(self.max)

    @property
    def nbytes(self) -> int:
        return self.sums.nbytes + self.max.nbytes + self.total.nbytes


def decode(
    query: torch.Tensor,
    cache: torch.Tensor,
    scales: torch.Tensor | None,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    tables: torch.Tensor,
    output: torch.Tensor,
    splits: int,
    scratch: DecodeScratch,
    window: int | None = None,
) -> None:
    """Attend one token of each sequence, and write row `rows[i]` of `output` for sequence `i`.

    query `[num_tokens, num_heads, head_dim]`, heads contiguous; output `[num_tokens, num_heads * head_dim]`,
    contiguous. cache and scales as in `layer_ops.store`. rows, lengths `[num_seqs]`, tables `[num_seqs, blocks]`:
    int32. Sequence `i` sees the keys before `lengths[i]`, at most `window` of them; if there are none, its output is
    zeros.
    """
    num_seqs, num_heads, head_dim = len(rows), query.shape[1], query.shape[2]
    num_kv_heads, block_size = cache.shape[1], cache.shape[3]
    group, width = num_heads // num_kv_heads, padded(head_dim)
    _decode[num_seqs, num_kv_heads, splits](
        query,
        cache,
        cache if scales is None else scales,
        rows,
        lengths,
        tables,
        output,
        scratch.sums,
        scratch.max,
        scratch.total,
        query.stride(0),
        tables.stride(0),
        splits,
        window or 0,
        _LOG2_E / math.sqrt(head_dim),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        QUANTIZED=scales is not None,
        WHOLE=splits == 1,
        DOT=dot_dtype(query.dtype),
        KEYS=keys_per_tile(width, cache.dtype.itemsize),
        ROWS=padded(group),
        WIDTH=width,
        num_warps=4,
        num_stages=5,  # a table's entries are loaded before the tiles they point to, of which two are in flight
    )
    if splits > 1:
        _reduce[num_seqs, num_heads](
            scratch.sums,
            scratch.max,
            scratch.total,
            rows,
            output,
            splits,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            SPLITS=MAX_SPLITS,
            WIDTH=width,
            num_warps=4 if width <= 128 else 8,
        )
