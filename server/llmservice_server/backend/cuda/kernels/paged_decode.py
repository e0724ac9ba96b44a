"""Attention of one token a sequence over the paged cache, split over the context (Flash-Decoding).

A program takes one sequence, one key head and one part of the context. The query heads that share the key head are the
rows of one tile, so that keys and values are read once for all of them. Each part's softmax is partial; a second kernel
weighs the parts. With one part the first kernel writes the answer itself.

Bytes: keys and values of all tokens seen, once: `sum(lengths) * 2 * num_kv_heads * head_dim` elements (fp8: and four
bytes of scale for every row of head_dim), which is what decoding is bound by. The parts add `num_seqs * num_heads *
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
"""A tile's bytes come in half the time, so what is done once a tile must be done half as often: with 64 keys the loop
is more instructions than a Hopper processor issues while it waits for the memory."""
_TILE_BYTES = 1 << 14  # of keys, and of values; two of each are on their way while one is computed with
_PROGRAMS_PER_PROCESSOR = 4
"""So that all of a GPU's processors have work till the end, whichever sequences are long."""
_LOG2_E = math.log2(math.e)


def num_splits(num_seqs: int, num_kv_heads: int, max_length: int, num_processors: int) -> int:
    """Into how many parts to split each sequence's context.

    Depends on what is known when a graph is captured, never on the lengths of the sequences at hand.
    """
    wanted = -(-_PROGRAMS_PER_PROCESSOR * num_processors // (num_seqs * num_kv_heads))
    return max(1, min(wanted, MAX_SPLITS, -(-max_length // _MOST_KEYS_PER_TILE)))


def keys_per_tile(width: int, itemsize: int) -> int:
    """Of rows with `width` numbers of `itemsize` bytes."""
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
    """Rows of the cache as a product's operand, `[KEYS, WIDTH]`, and the factor of each row, `[KEYS]`."""
    columns = tl.arange(0, WIDTH)
    inside = (columns < HEAD_DIM)[None, :]  # always true where the two are equal, and then no mask
    tile = tl.load(cache + slot_row[:, None] * HEAD_DIM + columns[None, :], mask=inside, other=0.0)
    if QUANTIZED:
        factor = tl.load(scales + slot_row)
        operand = tile.to(tl.float32).to(DOT)  # exact; straight to bfloat16 is an instruction of a quarter of the rate
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
    """The cache's rows of the keys at `positions` of the sequence with this block table; values lie BLOCK_SIZE on.

    All of them must be there: who asks for fewer than a tile of keys asks for one of them several times. That costs no
    bytes, and a mask would cost an instruction for each load.
    """
    block = tl.load(table + positions // BLOCK_SIZE).to(tl.int64)
    return (block * NUM_KV_HEADS + kv_head) * 2 * BLOCK_SIZE + positions % BLOCK_SIZE


@jit_for_any("num_splits", "window")
def _decode(
    query: tl.tensor,
    cache: tl.tensor,
    scales: tl.tensor,
    rows: tl.tensor,  # [num_seqs] int32: the row of query and answer
    lengths: tl.tensor,  # [num_seqs] int32: keys that there are, the token's own included; 0: the answer is zeros
    tables: tl.tensor,  # [num_seqs, table_stride] int32
    answer: tl.tensor,
    partial: tl.tensor,  # [num_seqs, NUM_KV_HEADS * GROUP, num_splits, HEAD_DIM] float32
    partial_max: tl.tensor,  # [num_seqs, NUM_KV_HEADS * GROUP, num_splits] float32, of scores in powers of 2
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
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    table = tables + sequence.to(tl.int64) * table_stride
    for start in range(begin, end, KEYS):
        positions = start + tl.arange(0, KEYS)
        slot_row = key_rows(table, tl.minimum(positions, end - 1), kv_head, NUM_KV_HEADS, BLOCK_SIZE)
        keys, key_factor = load_rows(cache, scales, slot_row, HEAD_DIM, WIDTH, QUANTIZED, DOT)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        if QUANTIZED:
            scores *= key_factor[None, :]
        scores = tl.where((positions < end)[None, :], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis=1) * scale)
        weights = tl.exp2(scores * scale - new_highest[:, None])
        shrink = tl.exp2(highest - new_highest)
        total = total * shrink + tl.sum(weights, axis=1)
        values, value_factor = load_rows(cache, scales, slot_row + BLOCK_SIZE, HEAD_DIM, WIDTH, QUANTIZED, DOT)
        if QUANTIZED:
            weights *= value_factor[None, :]
        sums = tl.dot(weights.to(DOT), values, sums * shrink[:, None], input_precision="ieee")
        highest = new_highest
    if WHOLE:
        sums = sums / tl.where(total == 0, 1.0, total)[:, None]
        target = answer + (row * NUM_KV_HEADS * GROUP + heads[:, None]) * HEAD_DIM + columns[None, :]
        tl.store(target, sums.to(answer.dtype.element_ty), mask=mask)
    else:
        part = (sequence.to(tl.int64) * NUM_KV_HEADS * GROUP + heads) * num_splits + split
        tl.store(partial_max + part, highest, mask=member < GROUP)
        tl.store(partial_sum + part, total, mask=member < GROUP)
        tl.store(partial + part[:, None] * HEAD_DIM + columns[None, :], sums, mask=mask & (begin < end))


@jit_for_any("num_splits")
def _reduce(
    partial: tl.tensor,
    partial_max: tl.tensor,
    partial_sum: tl.tensor,
    rows: tl.tensor,
    answer: tl.tensor,
    num_splits: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """One head of one sequence; a part without keys has a sum of 0 and nothing in `partial`."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + sequence).to(tl.int64)
    splits, columns = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    part = (sequence.to(tl.int64) * NUM_HEADS + head) * num_splits + splits
    there = splits < num_splits
    part_sums = tl.load(partial_sum + part, mask=there, other=0.0)
    part_max = tl.load(partial_max + part, mask=there, other=float("-inf"))
    filled = part_sums != 0  # NaN is no 0: it goes on
    highest = tl.max(part_max, axis=0)
    weights = tl.exp2(part_max - tl.where(highest == float("-inf"), 0.0, highest))
    mask = filled[:, None] & (columns < HEAD_DIM)[None, :]
    sums = tl.load(partial + part[:, None] * HEAD_DIM + columns[None, :], mask=mask, other=0.0)
    total = tl.sum(part_sums * weights, axis=0)
    answered = tl.sum(sums * weights[:, None], axis=0) / tl.where(total == 0, 1.0, total)
    target = answer + (row * NUM_HEADS + head) * HEAD_DIM + columns
    tl.store(target, answered.to(answer.dtype.element_ty), mask=columns < HEAD_DIM)


class DecodeScratch:
    """Where the parts of up to `num_parts` sequences times splits wait to be reduced; its size is `nbytes`."""

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
    answer: torch.Tensor,
    splits: int,
    scratch: DecodeScratch,
    window: int | None = None,
) -> None:
    """Attend one token of each sequence, and write row `rows[i]` of `answer` for sequence `i`.

    query `[num_tokens, num_heads, head_dim]`, heads contiguous; answer `[num_tokens, num_heads * head_dim]`,
    contiguous. cache and scales as in `kv_store`. rows, lengths `[num_seqs]`, tables `[num_seqs, blocks]`, int32.
    Sequence `i` sees the keys before `lengths[i]`, at most `window` of them; with a length of 0 its answer is zeros.
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
        answer,
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
        num_stages=5,  # the tables' entries come before what they point to: two tiles of keys and values on their way
    )
    if splits > 1:
        _reduce[num_seqs, num_heads](
            scratch.sums,
            scratch.max,
            scratch.total,
            rows,
            answer,
            splits,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            SPLITS=MAX_SPLITS,
            WIDTH=width,
            num_warps=4 if width <= 128 else 8,
        )
