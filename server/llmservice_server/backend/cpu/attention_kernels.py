"""Paged attention on a CPU, compiled by numba when it first runs: decodes, and tiles of several query tokens.

Arrays are those of `as_array`; a layer's cache is `[num_blocks, num_kv_heads, stored, block_size, head_dim]`: keys, and
values where they are others. Softmax is online and in float32 (arXiv:1805.02867; FlashAttention-2, arXiv:2307.08691):
keys and values are read once, a tile at a time, with a running maximum and sum for each query head.

A decode's tile is `[lanes, head_dim]` keys of one block, read in place by vector code for a fixed `group` (query heads
that share a key head) and head size, so that sums stay in registers; numba's own loops know these numbers only at run
time. Tiles of several query tokens are computed by the matrix product of `linear_kernels.py`: 64 keys, gathered from
their blocks, are packed as its weights are, and serve every row of the tile.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils

from llmservice_server.backend.cpu import llvm
from llmservice_server.backend.cpu.compiled import compiled, compiled_inner, for_each, intrinsic
from llmservice_server.backend.cpu.layer_ops import rotate_and_store_heads
from llmservice_server.backend.cpu.linear_kernels import COLUMNS, add_products, multiply_columns
from llmservice_server.backend.cpu.llvm import convert, exp, exp2, from_float32, pair, to_float32

LOWEST = np.float32(-3e38)
_LOG2_E = math.log2(math.e)
_LANES = 16  # of AVX-512; on narrower CPUs LLVM uses two registers for one of these vectors
_SUM_VECTORS = 24  # that are added up at a time, of the CPU's 32 registers
_QUERY_VECTORS = 20  # that stay in registers, beside those of a key

HeadShape = npt.NDArray[np.void]
Dtypes = tuple[npt.NDArray[Any], npt.NDArray[Any]]


def head_shape(group: int, head_dim: int) -> HeadShape:
    """An array whose dtype carries three numbers into compiled code, as the lengths of the fields `group`, `vectors`
    and `lanes`: a head is `vectors` vectors of `lanes` float32, and a decode's tile has `lanes` keys."""
    lanes = next(lanes for lanes in (_LANES, 8, 4, 2, 1) if head_dim % lanes == 0)
    lengths = {"group": group, "vectors": head_dim // lanes, "lanes": lanes}
    return np.zeros(1, [(name, np.uint8, (length,)) for name, length in lengths.items()])


class _TileCode(llvm.Arguments):
    """Those of an intrinsic whose last argument is a `HeadShape`."""

    def __init__(self, context: Any, builder: Any, signature: Any, values: Any) -> None:
        super().__init__(context, builder, signature, values)
        fields = signature.args[-1].dtype.fields
        self.group, self.vectors, self.lanes = (fields[name].type.shape[0] for name in ("group", "vectors", "lanes"))

    def load(self, array: int, *index: Any) -> Any:
        """A vector of successive elements, in float32."""
        dtype = self.kinds[array].dtype
        bits = llvm.load(self.builder, self.address(array, *index), dtype, self.lanes)
        return llvm.bits_to_float32(self.builder, bits, dtype)

    def store(self, vector: Any, array: int, *index: Any) -> None:
        llvm.store(self.builder, vector, self.address(array, *index))

    def scalar(self, array: int, *index: Any) -> Any:
        """The address of a float32."""
        return self.builder.bitcast(self.address(array, *index), llvm.FLOAT.as_pointer())

    def prefetch_row(self, array: int, row: Any) -> None:
        start, element_bytes = self.address(array, row, 0), self.kinds[array].dtype.bitwidth // 8
        for offset in range(0, self.vectors * self.lanes * element_bytes, llvm.CACHE_LINE_BYTES):
            llvm.prefetch(self.builder, self.builder.gep(start, [ir.Constant(llvm.INT32, offset)]))


@intrinsic
def multiply_tile(context: Any, queries: Any, keys: Any, next_keys: Any, parts: Any, shape: Any) -> Any:
    """Write the products of `queries` `[group, head_dim]` with `keys` `[at most lanes, head_dim]` to `parts`.

    parts: `[group, lanes, lanes]`, the lanes of each product, which `sum_tile` adds up. With each key a row of
    `next_keys`, which has as many rows or more, is prefetched, so that computation overlaps with reading memory.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code = _TileCode(context, builder, signature, arguments)
        places = [(head, code.lanes * part) for head in range(code.group) for part in range(code.vectors)]
        kept = {place: code.load(0, *place) for place in places[:_QUERY_VECTORS]}  # the others are loaded for each key
        with cgutils.for_range(builder, code.shape(1)[0]) as loop:
            code.prefetch_row(2, loop.index)
            key = [code.load(1, loop.index, code.lanes * part) for part in range(code.vectors)]
            for head in range(code.group):
                query = [kept.get(place) or code.load(0, *place) for place in places if place[0] == head]
                total = builder.fmul(key[0], query[0])
                for part in range(1, code.vectors):
                    total = llvm.fma(builder, key[part], query[part], total)
                code.store(total, 3, head, loop.index, 0)
        return context.get_dummy_value()

    return types.void(queries, keys, next_keys, parts, shape), generate


@intrinsic
def sum_tile(context: Any, parts: Any, num_keys: Any, scores: Any, maxima: Any, shape: Any) -> Any:
    """Add up the lanes of `parts` to `scores` `[group, lanes]`, which are LOWEST from `num_keys` on.

    Write the maximum of each row to `maxima` `[group]`; any number of the row if there is NaN among them.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code = _TileCode(context, builder, signature, arguments)
        lane = ir.Constant(ir.VectorType(llvm.INT32, code.lanes), list(range(code.lanes)))
        end = llvm.broadcast(builder, builder.trunc(arguments[1], llvm.INT32), code.lanes)
        is_key = builder.icmp_signed("<", lane, end)
        for head in range(code.group):
            sums = llvm.reduce_add(builder, [code.load(0, head, key, 0) for key in range(code.lanes)])
            sums = builder.select(is_key, sums, llvm.splat(llvm.FLOAT, float(LOWEST), code.lanes))
            code.store(sums, 2, head, 0)
            builder.store(llvm.reduce_max(builder, sums), code.scalar(3, head))
        return context.get_dummy_value()

    return types.void(parts, types.intp, scores, maxima, shape), generate


@intrinsic
def add_tile(context: Any, weights: Any, values: Any, next_values: Any, sums: Any, shape: Any) -> Any:
    """Add the `values` `[num_keys, head_dim]`, weighted by `weights` `[group, lanes]`, to `sums` `[group, head_dim]`.

    next_values: prefetched as in `multiply_tile`.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code = _TileCode(context, builder, signature, arguments)
        at_a_time = max(1, _SUM_VECTORS // code.group)
        for first in range(0, code.vectors, at_a_time):
            places = [code.lanes * part for part in range(first, min(first + at_a_time, code.vectors))]
            totals = {
                (head, place): cgutils.alloca_once_value(builder, code.load(3, head, place))
                for place in places
                for head in range(code.group)
            }
            with cgutils.for_range(builder, code.shape(1)[0]) as loop:
                if first == 0:
                    code.prefetch_row(2, loop.index)
                value = {place: code.load(1, loop.index, place) for place in places}
                for head in range(code.group):
                    weight = llvm.broadcast(builder, builder.load(code.scalar(0, head, loop.index)), code.lanes)
                    for place in places:
                        total = totals[head, place]
                        builder.store(llvm.fma(builder, weight, value[place], builder.load(total)), total)
            for (head, place), total in totals.items():
                code.store(builder.load(total), 3, head, place)
        return context.get_dummy_value()

    return types.void(weights, values, next_values, sums, shape), generate


@compiled(nogil=True)
def decode(query: Any, cache: Any, decodes: Any, rule: Any, output: Any, shape: Any) -> None:
    """Attention of one token of each of several sequences, on the blocks of their tables.

    query: `[num_tokens, num_heads or more, head_dim]`, of which the first are queries. output: `[num_tokens, num_heads,
    head_dim]`. decodes: `sequences` `[num_seqs, 3]` (row of query and output, first entry of the block table in
    `blocks`, number of keys); `blocks`; `parts`, into which the key heads of each sequence are divided. shape: of
    `head_shape`. Threads share sequences times parts.

    rule: `window`, `softcap`, `sinks`. A token sees the last `window` keys. A score becomes softcap * tanh(score /
    softcap), unless that is 0. sinks: `[num_heads]`, scores of no value that take part in the softmax; or empty.
    """
    sequences, _, parts = decodes
    for_each(_decode_part, len(sequences) * parts, (query, cache, decodes, rule, output, shape))


@compiled_inner()
def _decode_part(number: int, query: Any, cache: Any, decodes: Any, rule: Any, output: Any, shape: Any) -> None:
    row, table, key_range, head_range = _part_of(number, cache, decodes, rule[0])
    decode_heads(query[row], cache, table, key_range, head_range, rule, output[row], shape)


@compiled_inner(owns_arrays=True)
def _part_of(number: int, cache: Any, decodes: Any, window: int) -> Any:
    """Row and block table of a sequence; first and end of the keys that it sees; first and number of its key heads."""
    sequences, blocks, parts = decodes
    heads_each = cache.shape[1] // parts
    place = number // parts
    row, first_block, end = sequences[place, 0], sequences[place, 1], sequences[place, 2]
    return row, blocks[first_block:], (max(0, end - window), end), (number % parts * heads_each, heads_each)


@compiled_inner(nogil=True)
def rotate_and_decode(heads: Any, rotation: Any, cache: Any, decodes: Any, rule: Any, output: Any, shape: Any) -> None:
    """`rotate_and_store` and `decode` in one, if every token of `heads` is one of the `decodes`."""
    sequences, _, parts = decodes
    arguments = heads, rotation, cache, decodes, rule, output, shape
    for_each(_rotate_and_decode_part, len(sequences) * parts, arguments)


@compiled_inner()
def _rotate_and_decode_part(
    number: int, heads: Any, rotation: Any, cache: Any, decodes: Any, rule: Any, output: Any, shape: Any
) -> None:
    weight, eps, cos, sin = rotation
    row, table, key_range, head_range = _part_of(number, cache, decodes, rule[0])
    position, block_size = key_range[1] - 1, cache.shape[3]
    slot = table[position // block_size] * block_size + position % block_size
    rotate_and_store_heads(heads[row], (weight, eps, cos[row], sin[row]), slot, output.shape[1], head_range, cache)
    decode_heads(heads[row], cache, table, key_range, head_range, rule, output[row], shape)


@compiled_inner(owns_arrays=True)
def decode_heads(
    query: Any, cache: Any, table: Any, key_range: Any, head_range: Any, rule: Any, output: Any, shape: Any
) -> None:
    """One sequence and some of its key heads, with the queries that share them.

    key_range: the first key, and the one after the last. head_range: the first key head, and the number of key heads.
    """
    (first, end), (first_head, num_kv_heads), (_, softcap, sinks) = key_range, head_range, rule
    block_size, head_dim, values = cache.shape[3], cache.shape[4], cache.shape[2] - 1
    group, lanes = output.shape[0] // cache.shape[1], shape[0].lanes.size
    num_heads = num_kv_heads * group
    queries = np.empty((num_heads, head_dim), np.float32)
    for head in range(num_heads):
        for index in range(head_dim):
            value = to_float32(query[first_head * group + head, index])
            queries[head, index] = value * np.float32(1 / math.sqrt(head_dim))
    sums = np.zeros((num_heads, head_dim), np.float32)
    weight_sum = np.zeros(num_heads, np.float32)
    score_max = np.full(num_heads, LOWEST, np.float32)
    if len(sinks):
        for head in range(num_heads):  # no slices: numba takes seconds to compile their error about shapes
            score_max[head], weight_sum[head] = sinks[first_head * group + head], 1
    parts, scores = np.zeros((group, lanes, lanes), np.float32), np.empty((group, lanes), np.float32)
    tile_max = np.empty(group, np.float32)
    last = (end - 1) // block_size
    for number in range(first // block_size, last + 1):
        start = max(0, first - number * block_size)
        stop = min(block_size, end - number * block_size)
        block, next_block = cache[table[number]], cache[table[min(number + 1, last)]]
        for kv_head in range(num_kv_heads):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            now, later = block[first_head + kv_head], next_block[first_head + kv_head]
            for place in range(start, stop, lanes):
                tile = slice(place, min(place + lanes, stop))
                multiply_tile(queries[heads], now[0, tile], later[0, tile], parts, shape)
                sum_tile(parts, tile.stop - tile.start, scores, tile_max, shape)
                if softcap > 0:
                    _bound_lanes(scores, tile_max, softcap)
                _softmax_lanes(scores, tile_max, score_max[heads], weight_sum[heads], sums[heads], shape)
                add_tile(scores, now[values, tile], later[values, tile], sums[heads], shape)
    for head in range(num_heads):
        for index in range(head_dim):
            place = first_head * group + head
            output[place, index] = from_float32(sums[head, index] / weight_sum[head], output[place, index])


@compiled_inner()
def _bound(score: Any, softcap: Any) -> Any:
    """softcap * tanh(score / softcap); NaN stays NaN."""
    share = exp(np.float32(-2) * abs(score) / softcap)
    bounded = softcap * (np.float32(1) - share) / (np.float32(1) + share)
    return -bounded if score < 0 else bounded


@compiled_inner()
def _bound_lanes(scores: Any, tile_max: Any, softcap: Any) -> None:
    for head in range(scores.shape[0]):
        tile_max[head] = _bound(tile_max[head], softcap)
        for place in range(scores.shape[1]):
            if scores[head, place] != LOWEST:
                scores[head, place] = _bound(scores[head, place], softcap)


@compiled_inner()
def _softmax_lanes(scores: Any, tile_max: Any, score_max: Any, weight_sum: Any, sums: Any, shape: Any) -> None:
    """Replace a tile's scores by weights relative to the running maximum, and rescale the sums if that has risen.

    A score of LOWEST weighs 2^-125 at most.
    """
    group, lanes = shape[0].group.size, shape[0].lanes.size
    for head in range(group):
        before = score_max[head]
        if tile_max[head] > before:  # false for NaN, which makes the weights NaN
            score_max[head] = tile_max[head]
            rescale = np.float32(math.exp(before - tile_max[head]))
            weight_sum[head] *= rescale
            for index in range(sums.shape[1]):
                sums[head, index] *= rescale
        maximum = score_max[head]
        total = np.float32(0)
        for place in range(lanes):
            weight = exp(scores[head, place] - maximum)
            scores[head, place] = weight
            total += weight
        weight_sum[head] += total


def product_dtypes(query: npt.NDArray[Any], cache: npt.NDArray[Any]) -> Dtypes:
    """The dtypes of `attend_tiles`' products, of empty arrays: an element, and what the product takes, which is a pair
    of elements if query and cache are bfloat16. Everything else is converted to float32."""
    if query.dtype == cache.dtype == np.uint16 and cache.shape[-1] % 2 == 0:
        return np.empty(0, np.uint16), np.empty(0, np.int32)
    return np.empty(0, np.float32), np.empty(0, np.float32)


@compiled(nogil=True)
def attend_tiles(
    query: Any, cache: Any, tiles: Any, blocks: Any, rule: Any, output: Any, shape: Any, dtypes: Any
) -> None:
    """Causal attention of each of the `tiles`, whose keys and values are in the cache already.

    query: `[num_tokens, num_heads or more, head_dim]`, of which the first are queries. output: `[num_tokens, num_heads,
    head_dim]`. tiles: `[num_tiles, 5]` (first row of query and output, number of tokens, end of the last token's keys,
    first entry of the block table in `blocks`, key head). rule: as of `decode`. shape: of `head_shape`. dtypes: of
    `product_dtypes`. A tile of a single token is computed as a decode.
    """
    for_each(_attend_tile, len(tiles), (query, cache, (tiles, blocks), rule, output, shape, dtypes))


@compiled_inner()
def _attend_tile(
    number: int, query: Any, cache: Any, tables: Any, rule: Any, output: Any, shape: Any, dtypes: Any
) -> None:
    tiles, blocks = tables
    group = output.shape[1] // cache.shape[1]
    row, num_tokens, end, first_block, kv_head = tiles[number]
    table = blocks[first_block:]
    if num_tokens == 1:
        key_range, head_range = (max(0, end - rule[0]), end), (np.int64(kv_head), np.int64(1))
        decode_heads(query[row], cache, table, key_range, head_range, rule, output[row], shape)
    else:
        rows, heads = slice(row, row + num_tokens), slice(kv_head * group, (kv_head + 1) * group)
        _attend_tokens(query[rows, heads], cache[:, kv_head], table, (end, heads, rule), output[rows, heads], dtypes)


@compiled_inner(owns_arrays=True)
def _attend_tokens(query: Any, cache: Any, table: Any, visible: Any, output: Any, dtypes: Any) -> None:
    """query, output: `[num_tokens, group, head_dim]`. cache: `[num_blocks, stored, block_size, head_dim]`. visible: the
    end of the last token's keys, the heads, and the rule."""
    (element, operand), (end, heads, (window, softcap, sinks)) = dtypes, visible
    num_tokens, group, head_dim = output.shape
    num_rows, position = num_tokens * group, end - num_tokens
    packed = operand.itemsize // element.itemsize
    queries = _query_rows(query, element).view(operand.dtype)
    gathered = np.empty((COLUMNS, head_dim), element.dtype)
    keys = np.empty((head_dim // packed, COLUMNS), operand.dtype)
    values = np.empty((-(-head_dim // COLUMNS), COLUMNS // packed, COLUMNS), operand.dtype)
    values[:] = 0
    scores, weights = np.empty((num_rows, COLUMNS), np.float32), np.empty((num_rows, COLUMNS), element.dtype)
    sums, softmax = np.empty((len(values), num_rows, COLUMNS), np.float32), np.empty((2, num_rows), np.float32)
    sums[:], softmax[0], softmax[1] = 0, LOWEST, 0
    if len(sinks):
        for row in range(num_rows):
            softmax[0, row], softmax[1, row] = sinks[heads.start + row % group] * np.float32(_LOG2_E), 1
    scale = np.float32(_LOG2_E / math.sqrt(head_dim))
    bound = np.float32(softcap * math.sqrt(head_dim))  # of a score before it is scaled
    for first in range(max(0, position + 1 - window), end, COLUMNS):
        stop = min(first + COLUMNS, end)
        _gather(cache[:, 0], table, first, stop, gathered)
        _pack_keys(gathered.view(operand.dtype), keys)
        _gather(cache[:, cache.shape[1] - 1], table, first, stop, gathered)
        _pack_values(gathered, values, packed)
        # of the tokens that see any of these keys
        rows = slice(max(0, first - position) * group, min(num_tokens, stop - 1 + window - position) * group)
        multiply_columns(queries[rows], keys, scores[rows])
        _softmax_rows(scores, rows, (position - first, group, window), (scale, bound), (softmax, sums), weights)
        for part in range(len(values)):
            add_products(weights[rows].view(operand.dtype)[:, :], values[part], sums[part, rows])
    for row in range(num_rows):
        target = output[row // group, row % group]
        inverse = np.float32(1) / softmax[1, row]
        for index in range(head_dim):
            target[index] = from_float32(sums[index // COLUMNS, row, index % COLUMNS] * inverse, target[index])


@compiled_inner(owns_arrays=True)
def _query_rows(query: Any, element: Any) -> Any:
    """`[num_tokens * group, head_dim]`, contiguous."""
    num_tokens, group, head_dim = query.shape
    rows = np.empty((num_tokens * group, head_dim), element.dtype)
    for row in range(len(rows)):
        source, target = query[row // group, row % group], rows[row]
        for index in range(head_dim):
            target[index] = convert(source[index], target[index])
    return rows


@compiled_inner()
def _gather(cache: Any, table: Any, first: int, stop: int, gathered: Any) -> None:
    """Copy the positions [first, stop) of `cache` `[num_blocks, block_size, head_dim]`; zeros follow."""
    block_size = cache.shape[1]
    for position in range(first, stop):
        source, target = cache[table[position // block_size], position % block_size], gathered[position - first]
        for index in range(len(target)):
            target[index] = convert(source[index], target[index])
    gathered[stop - first :] = 0


@compiled_inner()
def _pack_keys(rows: Any, keys: Any) -> None:
    """Transpose."""
    for line in range(keys.shape[0]):
        for row in range(keys.shape[1]):
            keys[line, row] = rows[row, line]


@compiled_inner()
def _pack_values(rows: Any, values: Any, packed: int) -> None:
    """`[COLUMNS, head_dim]` to `[parts, COLUMNS / packed, COLUMNS]`; a packed pair is of two successive rows."""
    for line in range(values.shape[1]):
        first, second = rows[line * packed], rows[(line + 1) * packed - 1]
        for part in range(values.shape[0]):
            start, target = part * COLUMNS, values[part, line]
            for index in range(min(COLUMNS, len(first) - start)):
                target[index] = pair(first[start + index], second[start + index], target[index])


@intrinsic
def row_max(context: Any, row: Any) -> Any:
    """`llvm.reduce_max` of COLUMNS contiguous float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        start = llvm.element_address(context, builder, signature.args[0], arguments[0], 0)
        return llvm.reduce_max(builder, llvm.load(builder, start, types.float32, COLUMNS))

    return types.float32(row), generate


@compiled_inner()
def _softmax_rows(scores: Any, rows: slice, visible: Any, scaling: Any, state: Any, weights: Any) -> None:
    """Write the weights of the scores relative to the running maximum, and rescale the sums if that has risen.

    visible: the first token's distance from the first key, the rows of a token, and the window. scaling: the scores'
    factor, and their bound before it, or 0. state: maximum and sum `[2, num_rows]`, and weighted sums. This is one
    function with loops of constant length, which LLVM vectorizes.
    """
    (distance, group, window), (scale, bound), (softmax, sums) = visible, scaling, state
    for row in range(rows.start, rows.stop):
        line, weight_line = scores[row], weights[row]
        stop = distance + row // group + 1
        if bound > 0:
            for place in range(COLUMNS):
                line[place] = _bound(line[place], bound)
        if stop < COLUMNS or stop > window:
            for place in range(COLUMNS):
                if place >= stop or place < stop - window:
                    line[place] = LOWEST
        before, maximum = softmax[0, row], row_max(line) * scale
        if maximum > before:
            softmax[0, row], rescale = maximum, exp2(before - maximum)
            softmax[1, row] *= rescale
            for part in range(len(sums)):
                sum_line = sums[part, row]
                for index in range(COLUMNS):
                    sum_line[index] *= rescale
        else:
            maximum = before
        total = np.float32(0)
        for place in range(COLUMNS):
            weight = exp2(line[place] * scale - maximum)
            weight_line[place] = from_float32(weight, weight_line[place])
            total += weight
        softmax[1, row] += total
