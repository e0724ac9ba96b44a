"""Attention of one token a sequence over the paged cache, split over the context (Flash-Decoding).

A program computes one part of one sequence's context and one key head. The query heads that share the key head are the
rows of one tile, so that keys and values are read once for all of them. The parts of a step are a list, made from the
lengths of its sequences, the longest part first: long sequences are split so that all processors end at about the same
time, short ones are whole. A second kernel combines the parts of a sequence; a whole one is written by the first.

Bytes: keys and values of all visible tokens, once: `sum(lengths) * 2 * num_kv_heads * head_dim` elements (fp8: and four
bytes of scale for every row of head_dim), which bounds the speed of decoding. The parts of split sequences add
`num_parts * num_heads * (head_dim + 2)` float32, written and read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from llmservice_server.backend.cuda.kernels.jit import dot_dtype, jit, padded, takes_large_tiles
from llmservice_server.backend.step_input import Int32Array, Int64Array, positions_of

_MOST_KEYS_PER_TILE = 64
_MOST_FP8_KEYS_PER_TILE = 128
"""An fp8 tile is read in half the time: with 64 keys the loop has more instructions than a Hopper processor issues
while it waits for memory."""
_PART_KEYS = 64  # of which the parts of a sequence are multiples
_STAGES = 3
"""Of loads in flight; the fastest of 3, 4 and 5 on an H200, as is the number of programs below of 2, 3, 4 and 6."""
_MOST_COLUMNS = 512
_KEYS_OF_LATENTS = 32
_MOST_SUMS = 64 * _MOST_COLUMNS
_PROGRAMS_PER_PROCESSOR = 3
"""So that no processor of the GPU is idle, whichever sequences are long."""
_PARTS_AT_ONCE = 16  # that the second kernel combines
_LOG2_E = math.log2(math.e)
_LOG2_E_CONSTANT = tl.constexpr(_LOG2_E)


def num_items(num_seqs: int, num_programs: int, num_processors: int) -> int:
    """The length of the list of parts, of `num_programs` each.

    It depends on what is known when a graph is captured, never on lengths.
    """
    return num_seqs + -(-_PROGRAMS_PER_PROCESSOR * num_processors // num_programs)


def split(lengths: Int64Array, window: int | None, num_items: int) -> tuple[Int32Array, Int32Array]:
    """The parts of a step's sequences: `WorkList`'s arrays. `num_items` is of `num_items`.

    The sum of all visible keys, divided by the number of parts beyond one a sequence, is the longest part: then there
    are never more parts than `num_items`.
    """
    seen = lengths if window is None else np.minimum(lengths, window)
    tile = _PART_KEYS
    longest = tile * max(1, -(-int(seen.sum()) // (tile * (num_items - len(lengths)))))
    counts = np.maximum(1, -(-seen // longest))
    sizes = tile * -(-seen // (tile * counts))  # of each sequence's parts: equal ones
    sequence, number = positions_of(np.zeros_like(counts), counts)
    begins = (lengths - seen)[sequence] + number * sizes[sequence]
    ends = np.minimum(begins + sizes[sequence], lengths[sequence])
    order = np.argsort(begins - ends, kind="stable")
    items = np.full((num_items, 4), -1, np.int32)
    items[: len(order)] = np.stack([sequence, begins, ends, np.arange(len(order))], axis=1)[order]
    return items, np.append(0, np.cumsum(counts)).astype(np.int32)


@dataclass(frozen=True, slots=True)
class WorkList:
    """The parts of the sequences of a step, int32 on the device."""

    items: torch.Tensor
    """`[num_items, 4]`: number of the sequence (-1: nothing to do), first key, end of the keys, number of the part."""
    firsts: torch.Tensor  # [num_seqs + 1]: the number of each sequence's first part
    has_parts: bool = True
    """Whether a sequence may have several; False: a kernel less is launched."""


def keys_per_tile(width: int, itemsize: int, most: int) -> int:
    """Keys of a tile, of `width` numbers of `itemsize` bytes each: `most` of 128 numbers of 16 bits or less."""
    return max(16, min(most, most * 128 * min(itemsize, 2) // (width * itemsize)))


def keys_of_latents(cache: torch.Tensor) -> int | None:
    """Of a tile of wide latents, where a GPU takes large ones; None: as of other caches."""
    is_wide = cache.shape[2] == 1 and cache.shape[-1] > _MOST_COLUMNS
    return _KEYS_OF_LATENTS if is_wide and takes_large_tiles() else None


def parts_of(head_dim: int) -> tuple[int, int]:
    """The columns of a head's two tiles: the second has what is beyond 512, as that of latents, or is not there."""
    if head_dim <= _MOST_COLUMNS:
        return padded(head_dim), 0
    return _MOST_COLUMNS, padded(head_dim - _MOST_COLUMNS)


def heads_per_tile(group: int, width: int) -> int:
    """Query heads of a tile, of those that share a key head: as many as registers hold beside sums of `width`."""
    return min(padded(group), _MOST_SUMS // width)


def programs_of_a_part(num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """How many programs read one part of a sequence's context: a key head each, or a part of its query heads."""
    group = num_heads // num_kv_heads
    return num_kv_heads * -(-group // heads_per_tile(group, parts_of(head_dim)[0]))


@jit
def load_rows(
    cache: tl.tensor,
    scales: tl.tensor,
    slot_row: tl.tensor,  # [KEYS] the row of the cache that holds each key, or value
    FIRST: tl.constexpr,  # column
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    QUANTIZED: tl.constexpr,
    DOT: tl.constexpr,
) -> tl.tensor:
    """Columns of rows of the cache as operand of a product, `[KEYS, WIDTH]`, and the scale of each row, `[KEYS]`."""
    columns = FIRST + tl.arange(0, WIDTH)
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
    STORED: tl.constexpr,  # rows of a token and key head
) -> tl.tensor:
    """The cache's rows of the keys at `positions` of the sequence with this block table; values are BLOCK_SIZE rows on.

    All positions must exist: for fewer keys than a tile has, the caller repeats one. That reads no more bytes, and a
    mask would cost an instruction for each load.
    """
    block = tl.load(table + positions // BLOCK_SIZE).to(tl.int64)
    return (block * NUM_KV_HEADS + kv_head) * STORED * BLOCK_SIZE + positions % BLOCK_SIZE


@jit
def score_keys(
    queries: tl.tensor,  # [ROWS, WIDTH]
    rest_queries: tl.tensor,  # [ROWS, REST] of the columns after these
    slot_row: tl.tensor,
    cache: tl.tensor,
    scales: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    REST: tl.constexpr,  # 0: there are none
    QUANTIZED: tl.constexpr,
    DOT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The products of queries with the keys in `slot_row` `[KEYS]`, and these keys: both parts, and their scales."""
    keys, key_factor = load_rows(cache, scales, slot_row, 0, HEAD_DIM, WIDTH, QUANTIZED, DOT)
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    if REST > 0:
        rest, _ = load_rows(cache, scales, slot_row, WIDTH, HEAD_DIM, REST, QUANTIZED, DOT)
        scores = tl.dot(rest_queries, tl.trans(rest), scores, input_precision="ieee")
    else:
        rest = keys
    if QUANTIZED:
        scores *= key_factor[None, :]
    return scores, keys, rest, key_factor


@jit
def bounded(scores: tl.tensor, scale: tl.tensor, BOUND: tl.constexpr) -> tl.tensor:
    """`BOUND * tanh(scores * scale / BOUND)`, of which exp2 takes the place: NaN stays, infinities become the bound."""
    return BOUND - 2 * BOUND / (tl.exp2(scores * (scale * (2 * _LOG2_E_CONSTANT / BOUND))) + 1)


@jit
def first_max(
    sinks: tl.tensor, heads: tl.tensor, mask: tl.tensor, HAS_SINKS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """What `row_max` and `row_sum` begin with: a sink is a key that is seen by all, and whose value is 0."""
    if HAS_SINKS:
        row_max = tl.load(sinks + heads, mask=mask, other=0.0).to(tl.float32) * _LOG2_E_CONSTANT
        row_sum = tl.full(heads.shape, 1.0, tl.float32)
    else:
        row_max = tl.full(heads.shape, float("-inf"), tl.float32)
        row_sum = tl.zeros(heads.shape, tl.float32)
    return row_max, row_sum


@jit
def add_values(
    scores: tl.tensor,  # [ROWS, KEYS] minus infinity: masked
    row_max: tl.tensor,  # [ROWS] of the scores so far, in base 2
    row_sum: tl.tensor,  # [ROWS] of their weights
    sums: tl.tensor,  # [ROWS, WIDTH] of the weighted values
    rest_sums: tl.tensor,  # [ROWS, REST]
    keys: tl.tensor,  # as from `score_keys`, like the next two: they are the values, if there are no others
    rest: tl.tensor,
    factor: tl.tensor,
    slot_row: tl.tensor,  # [KEYS] of the values
    cache: tl.tensor,
    scales: tl.tensor,
    scale: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    REST: tl.constexpr,
    STORED: tl.constexpr,  # rows of a token and key head: 1 if keys are the values
    QUANTIZED: tl.constexpr,
    DOT: tl.constexpr,
    MASKED: tl.constexpr,  # a row may have seen no key yet
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """`row_max`, `row_sum` and the sums with KEYS more keys: online softmax (arXiv:1805.02867)."""
    new_max = tl.maximum(row_max, tl.max(scores, axis=1) * scale)
    finite = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
    weights = tl.exp2(scores * scale - finite[:, None])
    rescale = tl.exp2(row_max - finite)
    row_sum = row_sum * rescale + tl.sum(weights, axis=1)
    if STORED == 2:
        values, factor = load_rows(cache, scales, slot_row, 0, HEAD_DIM, WIDTH, QUANTIZED, DOT)
        if REST > 0:
            rest, _ = load_rows(cache, scales, slot_row, WIDTH, HEAD_DIM, REST, QUANTIZED, DOT)
    else:
        values = keys
    if QUANTIZED:
        weights *= factor[None, :]
    weights = weights.to(DOT)
    if REST > 0:
        rest_sums = tl.dot(weights, rest, rest_sums * rescale[:, None], input_precision="ieee")
    return new_max, row_sum, tl.dot(weights, values, sums * rescale[:, None], input_precision="ieee"), rest_sums


@jit
def store_sums(
    target: tl.tensor,  # [ROWS, 1] of each row's first number
    sums: tl.tensor,
    rest_sums: tl.tensor,
    mask: tl.tensor,  # [ROWS]
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    REST: tl.constexpr,
) -> None:
    columns = tl.arange(0, WIDTH)[None, :]
    tl.store(target + columns, sums.to(target.dtype.element_ty), mask=mask[:, None] & (columns < HEAD_DIM))
    if REST > 0:
        columns = WIDTH + tl.arange(0, REST)[None, :]
        tl.store(target + columns, rest_sums.to(target.dtype.element_ty), mask=mask[:, None] & (columns < HEAD_DIM))


@jit
def load_queries(
    source: tl.tensor,  # [ROWS, 1] of each row's first number
    mask: tl.tensor,  # [ROWS]
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    REST: tl.constexpr,
    DOT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """`[ROWS, WIDTH]`, and the columns after these, `[ROWS, REST]`."""
    columns = tl.arange(0, WIDTH)[None, :]
    queries = tl.load(source + columns, mask=mask[:, None] & (columns < HEAD_DIM), other=0.0).to(DOT)
    if REST > 0:
        columns = WIDTH + tl.arange(0, REST)[None, :]
        rest = tl.load(source + columns, mask=mask[:, None] & (columns < HEAD_DIM), other=0.0).to(DOT)
    else:
        rest = queries
    return queries, rest


@jit
def _decode(
    query: tl.tensor,
    cache: tl.tensor,
    scales: tl.tensor,
    places: tl.tensor,  # [num_seqs, 2] int32: the row of query and output, the row of the tables
    items: tl.tensor,  # as in `WorkList`, like the next
    firsts: tl.tensor,
    tables: tl.tensor,  # [num_tables, table_stride] int32
    output: tl.tensor,
    sinks: tl.tensor,  # [NUM_KV_HEADS * GROUP], read if HAS_SINKS
    partial: tl.tensor,  # [num_items, NUM_KV_HEADS * GROUP, HEAD_DIM] float32
    partial_max: tl.tensor,  # [num_items, NUM_KV_HEADS * GROUP] float32, of scores in base 2
    partial_sum: tl.tensor,
    query_stride: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,  # of the scores, times log2(e)
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUANTIZED: tl.constexpr,
    DOT: tl.constexpr,
    KEYS: tl.constexpr,
    STORED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    REST: tl.constexpr,
    BOUND: tl.constexpr,  # of the scores in base 2; 0: none
    HAS_SINKS: tl.constexpr,
) -> None:
    parts_of_group: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    item, kv_head = items + 4 * tl.program_id(0), tl.program_id(1) // parts_of_group
    sequence = tl.load(item)
    if sequence < 0:
        return
    begin, end, part = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3).to(tl.int64)
    row = tl.load(places + 2 * sequence).to(tl.int64)
    table = tables + tl.load(places + 2 * sequence + 1).to(tl.int64) * table_stride
    member = tl.program_id(1) % parts_of_group * ROWS + tl.arange(0, ROWS)
    heads, exists = kv_head * GROUP + member, member < GROUP
    source = query + row * query_stride + heads[:, None] * HEAD_DIM
    queries, rest_queries = load_queries(source, exists, HEAD_DIM, WIDTH, REST, DOT)
    row_max, row_sum = first_max(sinks, heads, exists, HAS_SINKS)
    if HAS_SINKS:  # they are counted once, by the first part
        is_first = part == tl.load(firsts + sequence)
        row_max, row_sum = tl.where(is_first, row_max, float("-inf")), tl.where(is_first, row_sum, 0.0)
    sums, rest_sums = tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS, max(REST, 16)], tl.float32)
    for start in range(begin, end, KEYS):
        positions = start + tl.arange(0, KEYS)
        slot_row = key_rows(table, tl.minimum(positions, end - 1), kv_head, NUM_KV_HEADS, BLOCK_SIZE, STORED)
        scores, keys, rest, factor = score_keys(
            queries, rest_queries, slot_row, cache, scales, HEAD_DIM, WIDTH, REST, QUANTIZED, DOT
        )
        if BOUND > 0:
            scores = bounded(scores, scale, BOUND)
        scores = tl.where((positions < end)[None, :], scores, float("-inf"))
        row_max, row_sum, sums, rest_sums = add_values(
            scores, row_max, row_sum, sums, rest_sums, keys, rest, factor, slot_row + BLOCK_SIZE, cache, scales,
            1.0 if BOUND > 0 else scale, HEAD_DIM, WIDTH, REST, STORED, QUANTIZED, DOT, MASKED=False,
        )  # fmt: skip
    if tl.load(firsts + sequence + 1) - tl.load(firsts + sequence) == 1:
        total = tl.where(row_sum == 0, 1.0, row_sum)[:, None]
        target = output + (row * NUM_KV_HEADS * GROUP + heads[:, None]) * HEAD_DIM
        store_sums(target, sums / total, rest_sums / total, exists, HEAD_DIM, WIDTH, REST)
    else:
        place = part * NUM_KV_HEADS * GROUP + heads
        tl.store(partial_max + place, row_max, mask=exists)
        tl.store(partial_sum + place, row_sum, mask=exists)
        store_sums(partial + place[:, None] * HEAD_DIM, sums, rest_sums, exists, HEAD_DIM, WIDTH, REST)


@jit
def _combine(
    partial: tl.tensor,
    partial_max: tl.tensor,
    partial_sum: tl.tensor,
    places: tl.tensor,
    firsts: tl.tensor,
    output: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Combine the parts of one head of one sequence, each of which has a key."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(firsts + sequence), tl.load(firsts + sequence + 1)
    if end - first == 1:
        return
    columns = tl.arange(0, WIDTH)
    inside = columns < HEAD_DIM
    row_max = tl.full([], float("-inf"), tl.float32)
    row_sum = tl.zeros([], tl.float32)
    sums = tl.zeros([WIDTH], tl.float32)
    for start in range(first, end, PARTS):
        parts = start + tl.arange(0, PARTS)
        place = parts.to(tl.int64) * NUM_HEADS + head
        part_max = tl.load(partial_max + place, mask=parts < end, other=float("-inf"))
        part_sum = tl.load(partial_sum + place, mask=parts < end, other=0.0)
        new_max = tl.maximum(row_max, tl.max(part_max, axis=0))
        weights = tl.exp2(part_max - new_max)
        rescale = tl.exp2(row_max - new_max)
        part_sums = tl.load(
            partial + place[:, None] * HEAD_DIM + columns[None, :],
            mask=(parts < end)[:, None] & inside[None, :],
            other=0.0,
        )
        sums = sums * rescale + tl.sum(part_sums * weights[:, None], axis=0)
        row_sum = row_sum * rescale + tl.sum(part_sum * weights, axis=0)
        row_max = new_max
    row = tl.load(places + 2 * sequence).to(tl.int64)
    target = output + (row * NUM_HEADS + head) * HEAD_DIM + columns
    tl.store(target, (sums / row_sum).to(output.dtype.element_ty), mask=inside)


class DecodeScratch:
    """The memory of `num_parts` partial results."""

    def __init__(self, num_parts: int, num_heads: int, head_dim: int, device: torch.device) -> None:
        self.sums = torch.empty(num_parts * num_heads, head_dim, dtype=torch.float32, device=device)
        self.max = torch.empty(num_parts * num_heads, dtype=torch.float32, device=device)
        self.total = torch.empty_like(self.max)


def decode(
    query: torch.Tensor,
    cache: torch.Tensor,
    scales: torch.Tensor | None,
    places: torch.Tensor,
    work: WorkList,
    tables: torch.Tensor,
    output: torch.Tensor,
    scratch: DecodeScratch,
    *,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Attend one token of each sequence, and write its row of `output`; zeros for a sequence without keys.

    query `[num_tokens, num_heads, head_dim]`, heads contiguous; output `[num_tokens, num_heads * head_dim]`,
    contiguous. cache and scales as in `layer_ops.store`. places `[num_seqs, 2]`: the row of query and output, and that
    of tables `[num_tables, blocks]`; both int32. scratch: of as many parts as `work` has items. softcap bounds the
    scores; sinks `[num_heads]` are a score of no value for each head.
    """
    num_heads, head_dim = query.shape[1], query.shape[2]
    num_kv_heads, block_size = cache.shape[1], cache.shape[3]
    group, (width, rest) = num_heads // num_kv_heads, parts_of(head_dim)
    rows = heads_per_tile(group, width)
    most = _MOST_FP8_KEYS_PER_TILE if cache.dtype.itemsize == 1 else _MOST_KEYS_PER_TILE
    _decode[len(work.items), num_kv_heads * triton.cdiv(group, rows)](
        query,
        cache,
        cache if scales is None else scales,
        places,
        work.items,
        work.firsts,
        tables,
        output,
        output if sinks is None else sinks,
        scratch.sums,
        scratch.max,
        scratch.total,
        query.stride(0),
        tables.stride(0),
        _LOG2_E / math.sqrt(head_dim),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        QUANTIZED=scales is not None,
        DOT=dot_dtype(query.dtype),
        STORED=cache.shape[2],
        KEYS=keys_of_latents(cache) or keys_per_tile(width, cache.dtype.itemsize, most),
        ROWS=rows,
        WIDTH=width,
        REST=rest,
        BOUND=(softcap or 0.0) * _LOG2_E,
        HAS_SINKS=sinks is not None,
        num_warps=8 if rest and rows > 16 else 4,
        num_stages=_STAGES,
    )
    if not work.has_parts:
        return
    _combine[len(places), num_heads](
        scratch.sums,
        scratch.max,
        scratch.total,
        places,
        work.firsts,
        output,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        PARTS=_PARTS_AT_ONCE,
        WIDTH=padded(head_dim),
        num_warps=8 if rest else 4,
    )
