"""What attention on a CPU does to the cache's blocks, compiled by numba when it first runs: store, gather, decode.

A layer's cache is `[num_blocks, num_kv_heads, 2, block_size, head_dim]`, keys before values: what one head reads of a
block is one stream of memory.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np

from llmservice_server.cpu.compiled import compiled
from llmservice_server.cpu.element import exp, widened

_UNROLLED = 4
"""Values that are added up at a time, so that the sums are written a quarter as often."""
_LOWEST = np.float32(-3e38)


@compiled()
def store(key_value: Any, slots: Any, cache: Any) -> None:
    """Put `key_value` `[num_tokens, 2 * num_kv_heads, head_dim]` into the `slots` `[num_tokens]` of `cache`."""
    num_kv_heads, block_size = cache.shape[1], cache.shape[3]
    for token in range(len(slots)):
        block, offset = slots[token] // block_size, slots[token] % block_size
        for head in range(num_kv_heads):
            for index in range(cache.shape[4]):
                cache[block, head, 0, offset, index] = key_value[token, head, index]
                cache[block, head, 1, offset, index] = key_value[token, num_kv_heads + head, index]


@compiled(parallel=True)
def gather(cache: Any, table: Any, first: int, gathered: Any) -> None:
    """Fill `gathered` `[2, num_kv_heads, num_keys, head_dim]` with a sequence's keys and values from `first` on."""
    num_kv_heads, block_size = cache.shape[1], cache.shape[3]
    for row in numba.prange(2 * num_kv_heads):
        part, head = row // num_kv_heads, row % num_kv_heads
        for place in range(gathered.shape[2]):
            position = first + place
            source = cache[table[position // block_size], head, part, position % block_size]
            for index in range(source.shape[0]):
                gathered[part, head, place, index] = source[index]


@compiled(parallel=True)
def decode(query: Any, cache: Any, sequences: Any, blocks: Any, parts: int, answer: Any) -> None:
    """Attention of one token for each of several sequences, straight from the blocks of their tables.

    query and answer: float32 `[num_tokens, num_heads, head_dim]`. sequences: `[num_seqs, 4]`, of each its row in these
    two, where its table begins in `blocks`, and the positions that it sees: the first, and the one behind the last. The
    threads share the sequences, or, where these are few, the `parts` of each, which divide its key heads.

    Goes over the keys and values once, a block at a time, with a running maximum and sum: online softmax, Milakov and
    Gimelshein, 2018.
    """
    heads_each = cache.shape[1] // parts
    for piece in numba.prange(len(sequences) * parts):
        row, first_block, first, end = sequences[piece // parts]
        first_head = piece % parts * heads_each
        _decode_heads(query[row], cache, blocks[first_block:], first, end, first_head, heads_each, answer[row])


@compiled()
def _decode_heads(
    query: Any, cache: Any, table: Any, first: int, end: int, first_head: int, num_kv_heads: int, answer: Any
) -> None:
    """One sequence, for `num_kv_heads` of the key heads and the query heads that share them."""
    block_size, head_dim = cache.shape[3], cache.shape[4]
    group = query.shape[0] // cache.shape[1]
    mine = slice(first_head * group, (first_head + num_kv_heads) * group)
    queries = query[mine] * np.float32(1 / math.sqrt(head_dim))
    num_heads = queries.shape[0]
    sums = np.zeros((num_heads, head_dim), np.float32)
    total = np.zeros(num_heads, np.float32)
    highest = np.full(num_heads, _LOWEST, np.float32)
    scores = np.empty((group, -(-block_size // _UNROLLED) * _UNROLLED), np.float32)
    for number in range(first // block_size, -(-end // block_size)):
        start = max(0, first - number * block_size)
        stop = min(block_size, end - number * block_size)
        for kv_head in range(num_kv_heads):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            keys = cache[table[number], first_head + kv_head, 0, start:stop]
            values = cache[table[number], first_head + kv_head, 1, start:stop]
            _score(queries[heads], keys, scores)
            _weigh(scores, keys.shape[0], highest[heads], total[heads], sums[heads])
            _add_weighted(scores, values, sums[heads])
    for head in range(num_heads):
        for index in range(head_dim):
            answer[first_head * group + head, index] = sums[head, index] / total[head]


@compiled()
def _score(queries: Any, keys: Any, scores: Any) -> None:
    """Write the products of `queries` `[group, head_dim]` and `keys` `[num_keys, head_dim]`."""
    for place in range(keys.shape[0]):
        for head in range(queries.shape[0]):
            score = np.float32(0)
            for index in range(queries.shape[1]):
                score += queries[head, index] * widened(keys[place, index])
            scores[head, place] = score


@compiled()
def _weigh(scores: Any, num_keys: int, highest: Any, total: Any, sums: Any) -> None:
    """Turn scores into weights beside the highest so far, and bring what was added up before into line with it."""
    for head in range(scores.shape[0]):
        before = highest[head]
        for place in range(num_keys):
            if scores[head, place] > highest[head]:  # noqa: PLR1730 - max() would be undecided about NaN
                highest[head] = scores[head, place]
        if highest[head] > before:
            shrink = np.float32(math.exp(before - highest[head]))
            total[head] *= shrink
            for index in range(sums.shape[1]):
                sums[head, index] *= shrink
        weights = np.float32(0)
        for place in range(num_keys):
            scores[head, place] = exp(scores[head, place] - highest[head])
            weights += scores[head, place]
        total[head] += weights
        for place in range(num_keys, scores.shape[1]):
            scores[head, place] = 0


@compiled()
def _add_weighted(weights: Any, values: Any, sums: Any) -> None:
    """Add the weighted `values` `[num_keys, head_dim]` to `sums` `[group, head_dim]`; surplus weights are 0."""
    last = values.shape[0] - 1
    for place in range(0, values.shape[0], _UNROLLED):
        value_0, value_1 = values[place], values[min(place + 1, last)]
        value_2, value_3 = values[min(place + 2, last)], values[min(place + 3, last)]
        for head in range(sums.shape[0]):
            weight_0, weight_1 = weights[head, place], weights[head, place + 1]
            weight_2, weight_3 = weights[head, place + 2], weights[head, place + 3]
            for index in range(sums.shape[1]):
                sums[head, index] += (
                    weight_0 * widened(value_0[index])
                    + weight_1 * widened(value_1[index])
                    + weight_2 * widened(value_2[index])
                    + weight_3 * widened(value_3[index])
                )
