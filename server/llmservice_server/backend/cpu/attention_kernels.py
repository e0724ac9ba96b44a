"""What attention on a CPU does to the cache's blocks, compiled by numba when it first runs: store and decode.

Arrays are those of `as_array`: elements are the bits of a bfloat16 or float16, or a float32.

A layer's cache is `[num_blocks, num_kv_heads, 2, block_size, head_dim]`, keys before values: what one head reads of a
block is one stream of memory.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from llmservice_server.backend.cpu.compiled import compiled, compiled_inner, for_each
from llmservice_server.backend.cpu.element import exp, narrowed, widened
from llmservice_server.backend.cpu.tile import LOWEST, add_tile, multiply_tile, sum_tile


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


@compiled(nogil=True)
def rotate_and_store(heads: Any, turns: Any, slots: Any, num_heads: int, cache: Any) -> None:
    """Norm and rotate the queries and keys of `heads` in place, and store keys and values.

    heads: `[num_tokens, num_heads + 2 * num_kv_heads, head_dim]`. turns: the weights of the norm, `[num_heads +
    num_kv_heads, head_dim]`, or empty where a model has no such norm; its epsilon; cosines and sines, `[num_tokens,
    head_dim]`, the first half of the sines negated.
    """
    for_each(_rotate_and_store_token, len(heads), (heads, turns, slots, num_heads, cache))


@compiled_inner()
def _rotate_and_store_token(token: int, heads: Any, turns: Any, slots: Any, num_heads: int, cache: Any) -> None:
    norm, eps, cos, sin = turns
    turn = (norm, eps, cos[token], sin[token])
    every_head = np.int64(0), cache.shape[1]  # a 0 as it stands is a type of its own, to be compiled for once more
    rotate_and_store_heads(heads[token], turn, slots[token], num_heads, every_head, cache)


@compiled_inner()
def rotate_and_store_heads(heads: Any, turn: Any, slot: int, num_heads: int, mine: Any, cache: Any) -> None:
    """One token's key heads, from the first of `mine` on as many as its second, and the queries that share them."""
    norm, eps, cos, sin = turn
    first_head, num_kv_heads = mine
    block_size = cache.shape[3]
    block, offset = slot // block_size, slot % block_size
    group = num_heads // cache.shape[1]
    for head in range(first_head * group, (first_head + num_kv_heads) * group):
        _rotate_head(heads[head], norm[head : head + 1], eps, cos, sin)
    for kv_head in range(first_head, first_head + num_kv_heads):
        head = num_heads + kv_head
        _rotate_head(heads[head], norm[head : head + 1], eps, cos, sin)
        _copy(heads[head], cache[block, kv_head, 0, offset])
        _copy(heads[head + cache.shape[1]], cache[block, kv_head, 1, offset])


@compiled_inner()
def _copy(source: Any, target: Any) -> None:
    """Elements of maybe another kind."""
    for index in range(len(source)):
        target[index] = narrowed(widened(source[index]), target[index])


@compiled_inner()
def _rotate_head(head: Any, norm: Any, eps: Any, cos: Any, sin: Any) -> None:
    """In place. `norm` `[1, head_dim]` are the weights of an RMS norm that comes first, or it is empty."""
    half = len(head) // 2
    scale = np.float32(1)
    if len(norm):
        total = np.float32(0)
        for index in range(len(head)):
            total += widened(head[index]) * widened(head[index])
        scale /= np.sqrt(total / np.float32(len(head)) + eps)
    for index in range(half):
        first, second = widened(head[index]) * scale, widened(head[half + index]) * scale
        if len(norm):
            first *= widened(norm[0, index])
            second *= widened(norm[0, half + index])
        turned = first * widened(cos[index]) + second * widened(sin[index])
        turned_second = second * widened(cos[half + index]) + first * widened(sin[half + index])
        head[index] = narrowed(turned, head[index])
        head[half + index] = narrowed(turned_second, head[half + index])


@compiled(nogil=True)
def decode(query: Any, cache: Any, decodes: Any, window: int, answer: Any, constants: Any) -> None:
    """Attention of one token for each of several sequences, straight from the blocks of their tables.

    query: `[num_tokens, num_heads or more, head_dim]`, of which the first are queries. answer: `[num_tokens, num_heads,
    head_dim]`. decodes: `sequences` `[num_seqs, 3]`, of each its row in these two, where its table begins in `blocks`,
    and the position behind the last that it sees; these `blocks`; and `parts`. A token sees as many positions as
    `window` says. The threads share the sequences, or, where these are few, the `parts` of each, which divide its key
    heads.
    """
    sequences, _, parts = decodes
    for_each(_decode_piece, len(sequences) * parts, (query, cache, decodes, window, answer, constants))


@compiled_inner()
def _decode_piece(piece: int, query: Any, cache: Any, decodes: Any, window: int, answer: Any, constants: Any) -> None:
    sequences, blocks, parts = decodes
    heads_each = cache.shape[1] // parts
    place = piece // parts
    row, first_block, end = sequences[place, 0], sequences[place, 1], sequences[place, 2]
    seen, mine = (max(0, end - window), end), (piece % parts * heads_each, heads_each)
    decode_heads(query[row], cache, blocks[first_block:], seen, mine, answer[row], constants)


@compiled_inner(nogil=True)
def rotate_and_decode(
    heads: Any, turns: Any, cache: Any, decodes: Any, window: int, answer: Any, constants: Any
) -> None:
    """`rotate_and_store` and `decode` in one, where every token of `heads` is one of the `decodes`."""
    sequences, _, parts = decodes
    arguments = heads, turns, cache, decodes, window, answer, constants
    for_each(_rotate_and_decode_piece, len(sequences) * parts, arguments)


@compiled_inner()
def _rotate_and_decode_piece(
    piece: int, heads: Any, turns: Any, cache: Any, decodes: Any, window: int, answer: Any, constants: Any
) -> None:
    norm, eps, cos, sin = turns
    sequences, blocks, parts = decodes
    heads_each = cache.shape[1] // parts
    place = piece // parts
    row, first_block, end = sequences[place, 0], sequences[place, 1], sequences[place, 2]
    seen, mine = (max(0, end - window), end), (piece % parts * heads_each, heads_each)
    table, turn = blocks[first_block:], (norm, eps, cos[row], sin[row])
    slot = table[(end - 1) // cache.shape[3]] * cache.shape[3] + (end - 1) % cache.shape[3]
    rotate_and_store_heads(heads[row], turn, slot, answer.shape[1], mine, cache)
    decode_heads(heads[row], cache, table, seen, mine, answer[row], constants)


@compiled_inner()
def decode_heads(query: Any, cache: Any, table: Any, keys_seen: Any, mine: Any, answer: Any, constants: Any) -> None:
    """One sequence, for its key heads from the first of `mine` on, as many as its second, and the queries that share
    them. keys_seen: the first position and the one behind the last. constants: those of `constants_of`.

    Goes over the keys and values once, a tile at a time, with a running maximum and sum: online softmax, Milakov and
    Gimelshein, 2018.
    """
    (first, end), (first_head, num_kv_heads) = keys_seen, mine
    block_size, head_dim = cache.shape[3], cache.shape[4]
    group, lanes = answer.shape[0] // cache.shape[1], constants[0].lanes.size
    num_heads = num_kv_heads * group
    queries = np.empty((num_heads, head_dim), np.float32)
    for head in range(num_heads):
        for index in range(head_dim):
            value = widened(query[first_head * group + head, index])
            queries[head, index] = value * np.float32(1 / math.sqrt(head_dim))
    sums = np.zeros((num_heads, head_dim), np.float32)
    total = np.zeros(num_heads, np.float32)
    highest = np.full(num_heads, LOWEST, np.float32)
    by_lane, scores = np.zeros((group, lanes, lanes), np.float32), np.empty((group, lanes), np.float32)
    tops = np.empty(group, np.float32)
    last = (end - 1) // block_size
    for number in range(first // block_size, last + 1):
        start = max(0, first - number * block_size)
        stop = min(block_size, end - number * block_size)
        block, upcoming = cache[table[number]], cache[table[min(number + 1, last)]]
        for kv_head in range(num_kv_heads):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            here, ahead = block[first_head + kv_head], upcoming[first_head + kv_head]
            for place in range(start, stop, lanes):
                tile = slice(place, min(place + lanes, stop))
                multiply_tile(queries[heads], here[0, tile], ahead[0, tile], by_lane, constants)
                sum_tile(by_lane, tile.stop - tile.start, scores, tops, constants)
                _weigh(scores, tops, highest[heads], total[heads], sums[heads], constants)
                add_tile(scores, here[1, tile], ahead[1, tile], sums[heads], constants)
    for head in range(num_heads):
        for index in range(head_dim):
            place = first_head * group + head
            answer[place, index] = narrowed(sums[head, index] / total[head], answer[place, index])


@compiled_inner()
def _weigh(scores: Any, tops: Any, highest: Any, total: Any, sums: Any, constants: Any) -> None:
    """Turn scores into weights beside the highest so far, and bring what was added up before into line with it.

    tops: each row's highest score. A score that is none, because no key is there, weighs 2^-125 at most.
    """
    group, lanes = constants[0].group.size, constants[0].lanes.size
    for head in range(group):
        before = highest[head]
        if tops[head] > before:  # not so of NaN, which the weights will be
            highest[head] = tops[head]
            shrink = np.float32(math.exp(before - tops[head]))
            total[head] *= shrink
            for index in range(sums.shape[1]):
                sums[head, index] *= shrink
        most = highest[head]
        weights = np.float32(0)
        for place in range(lanes):
            weight = exp(scores[head, place] - most)
            scores[head, place] = weight
            weights += weight
        total[head] += weights
