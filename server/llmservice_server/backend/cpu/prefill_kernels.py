"""Attention of several tokens of a sequence on a CPU, compiled by numba when it first runs.

A tile is some of them and one key head, with a row for each of their query heads that share it. Keys and values come
from their blocks as many at a time as a panel is wide, and are laid out as panels, each of which serves every row of
the tile: so scores and weighted sums are products of rows with a panel, by the kernel that multiplies with the weights'
panels, in pairs where all is bfloat16. Softmax is online and in float32 (FlashAttention-2, arXiv:2307.08691).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from llmservice_server.backend.cpu.attention_kernels import decode_heads
from llmservice_server.backend.cpu.compiled import compiled, compiled_inner, for_each
from llmservice_server.backend.cpu.element import converted, exp2, joined, narrowed
from llmservice_server.backend.cpu.panel_product import PANEL, add_products, multiply_panel
from llmservice_server.backend.cpu.row import highest_of

_LOWEST = np.float32(-3e38)
_LOG2_E = math.log2(math.e)

Kinds = tuple[npt.NDArray[Any], npt.NDArray[Any]]


def kinds_of(query: npt.NDArray[Any], cache: npt.NDArray[Any]) -> Kinds:
    """What products are made of, as empty arrays: an element, and a lane, which is a pair of elements where queries
    and cache are bfloat16. Everything else is widened to float32."""
    if query.dtype == cache.dtype == np.uint16 and cache.shape[-1] % 2 == 0:
        return np.empty(0, np.uint16), np.empty(0, np.int32)
    return np.empty(0, np.float32), np.empty(0, np.float32)


@compiled(nogil=True)
def attend(
    query: Any, cache: Any, tiles: Any, blocks: Any, window: int, answer: Any, constants: Any, kinds: Any
) -> None:
    """Causal attention of each of the `tiles`, whose keys and values are in the cache already.

    query: `[num_tokens, num_heads or more, head_dim]`, of which the first are queries. answer: `[num_tokens, num_heads,
    head_dim]`. cache: a layer's, `[num_blocks, num_kv_heads, 2, block_size, head_dim]`. tiles: `[num_tiles, 5]`, of
    each its first row in these two, the number of rows, the position behind the last one's, where its sequence's table
    begins in `blocks`, and its key head. A token sees as many positions as `window` says. constants: those of
    `cpu_tile.constants_of`. kinds: those of `kinds_of`. A tile of a single token is computed as decodes are.
    """
    for_each(_attend_one, len(tiles), (query, cache, (tiles, blocks), window, answer, constants, kinds))


@compiled_inner()
def _attend_one(
    number: int, query: Any, cache: Any, tables: Any, window: int, answer: Any, constants: Any, kinds: Any
) -> None:
    tiles, blocks = tables
    group = answer.shape[1] // cache.shape[1]
    row, num_tokens, end, first_block, kv_head = tiles[number]
    table = blocks[first_block:]
    if num_tokens == 1:
        seen, mine = (max(0, end - window), end), (np.int64(kv_head), np.int64(1))
        decode_heads(query[row], cache, table, seen, mine, answer[row], constants)
    else:
        rows, heads = slice(row, row + num_tokens), slice(kv_head * group, (kv_head + 1) * group)
        _attend_tile(query[rows, heads], cache[:, kv_head], table, (end, window), answer[rows, heads], kinds)


@compiled_inner()
def _attend_tile(query: Any, cache: Any, table: Any, sees: Any, answer: Any, kinds: Any) -> None:
    """query, answer: `[num_tokens, group, head_dim]`. cache: `[num_blocks, 2, block_size, head_dim]`. sees: the
    position behind the last token's, and how many positions a token sees."""
    (element, lane), (end, window) = kinds, sees
    num_tokens, group, head_dim = answer.shape
    num_rows, position = num_tokens * group, end - num_tokens
    elements_a_lane = lane.itemsize // element.itemsize
    queries = _rows_of(query, element).view(lane.dtype)
    brought = np.empty((PANEL, head_dim), element.dtype)
    keys = np.empty((head_dim // elements_a_lane, PANEL), lane.dtype)
    values = np.empty((-(-head_dim // PANEL), PANEL // elements_a_lane, PANEL), lane.dtype)
    values[:] = 0
    scores, weights = np.empty((num_rows, PANEL), np.float32), np.empty((num_rows, PANEL), element.dtype)
    sums, so_far = np.empty((len(values), num_rows, PANEL), np.float32), np.empty((2, num_rows), np.float32)
    sums[:], so_far[0], so_far[1] = 0, _LOWEST, 0
    scale = np.float32(_LOG2_E / math.sqrt(head_dim))
    for first in range(max(0, position + 1 - window), end, PANEL):
        stop = min(first + PANEL, end)
        _bring(cache[:, 0], table, first, stop, brought)
        _transpose(brought.view(lane.dtype), keys)
        _bring(cache[:, 1], table, first, stop, brought)
        _join(brought, values, elements_a_lane)
        # the tokens that see any of these keys
        mine = slice(max(0, first - position) * group, min(num_tokens, stop - 1 + window - position) * group)
        multiply_panel(queries[mine], keys, scores[mine])
        _weigh(scores, mine, (position - first, group, window), scale, (so_far, sums), weights)
        for part in range(len(values)):
            add_products(weights[mine].view(lane.dtype)[:, :], values[part], sums[part, mine])
    for row in range(num_rows):
        target = answer[row // group, row % group]
        inverse = np.float32(1) / so_far[1, row]
        for index in range(head_dim):
            target[index] = narrowed(sums[index // PANEL, row, index % PANEL] * inverse, target[index])


@compiled_inner()
def _rows_of(query: Any, element: Any) -> Any:
    """`[num_tokens * group, head_dim]`, the heads of a token side by side."""
    num_tokens, group, head_dim = query.shape
    rows = np.empty((num_tokens * group, head_dim), element.dtype)
    for row in range(len(rows)):
        source, target = query[row // group, row % group], rows[row]
        for index in range(head_dim):
            target[index] = converted(source[index], target[index])
    return rows


@compiled_inner()
def _bring(cache: Any, table: Any, first: int, stop: int, brought: Any) -> None:
    """The positions from `first` up to `stop` of `cache` `[num_blocks, block_size, head_dim]`, then zeros."""
    block_size = cache.shape[1]
    for position in range(first, stop):
        source, target = cache[table[position // block_size], position % block_size], brought[position - first]
        for index in range(len(target)):
            target[index] = converted(source[index], target[index])
    brought[stop - first :] = 0


@compiled_inner()
def _transpose(rows: Any, panel: Any) -> None:
    for line in range(panel.shape[0]):
        for row in range(panel.shape[1]):
            panel[line, row] = rows[row, line]


@compiled_inner()
def _join(rows: Any, panels: Any, elements_a_lane: int) -> None:
    """Rows to lines of panels; where a lane has two elements, they come from two rows."""
    for line in range(panels.shape[1]):
        first = rows[line * elements_a_lane]
        second = rows[(line + 1) * elements_a_lane - 1]
        for part in range(panels.shape[0]):
            start, target = part * PANEL, panels[part, line]
            for index in range(min(PANEL, len(first) - start)):
                target[index] = joined(first[start + index], second[start + index], target[index])


@compiled_inner()
def _weigh(scores: Any, mine: slice, sees: Any, scale: Any, summed: Any, weights: Any) -> None:
    """Turn scores into weights beside each row's highest so far; bring what was added up before into line with it.

    The rows are those of `mine`. sees: how far behind the first key the first token is, how many rows a token has, and
    how many keys it sees. All in one function, whose loops of constant length the compiler turns into vector code.
    """
    (behind, group, window), (so_far, sums) = sees, summed
    for row in range(mine.start, mine.stop):
        line, weight_line = scores[row], weights[row]
        stop = behind + row // group + 1
        if stop < PANEL or stop > window:
            for place in range(PANEL):
                if place >= stop or place < stop - window:
                    line[place] = _LOWEST
        before, high = so_far[0, row], highest_of(line) * scale
        if high > before:
            so_far[0, row], shrink = high, exp2(before - high)
            so_far[1, row] *= shrink
            for part in range(len(sums)):
                sum_line = sums[part, row]
                for index in range(PANEL):
                    sum_line[index] *= shrink
        else:
            high = before
        total = np.float32(0)
        for place in range(PANEL):
            weight = exp2(line[place] * scale - high)
            weight_line[place] = narrowed(weight, weight_line[place])
            total += weight
        so_far[1, row] += total
