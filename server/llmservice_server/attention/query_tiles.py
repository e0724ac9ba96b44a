"""How a step's attention is shared out among a CPU's threads."""

from __future__ import annotations

import numpy as np

from llmservice_server.attention.base import Int32Array, Int64Array, JoinedTables, firsts_of

_ROWS = 256
"""Of a tile, about: each key that is brought to it serves so many, whose scores and sums stay in a core's own cache."""

_BRINGING = 8
"""A key's way into a tile costs as much as the products of so many tokens with it."""


def query_tiles(
    starts: Int64Array, counts: Int64Array, tables: JoinedTables, *, num_kv_heads: int, group: int, num_threads: int
) -> Int32Array:
    """The runs [start, start + count) of several sequences, laid end to end, in tiles as `cpu_prefill.attend` takes
    them, `[num_tiles, 5]`: a tile's first row, number of rows, the position behind its last, where its table
    begins, and its key head. They are in an order in which equal parts are about equal work.
    """
    tiles_each = -(-counts * group // _ROWS)
    sizes = -(-counts // tiles_each)
    tiles_each = -(-counts // sizes)
    sequence = np.repeat(np.arange(len(counts)), tiles_each)
    behind = (np.arange(len(sequence)) - firsts_of(tiles_each)[sequence]) * sizes[sequence]
    num_tokens = np.minimum(sizes[sequence], counts[sequence] - behind)
    ends = starts[sequence] + behind + num_tokens
    columns = (firsts_of(counts)[sequence] + behind, num_tokens, ends, tables.firsts[sequence])
    tiles = np.empty((len(sequence), num_kv_heads, 5), np.int32)
    for number, column in enumerate(columns):
        tiles[:, :, number] = column[:, None]
    tiles[:, :, 4] = np.arange(num_kv_heads)
    work = ends * (num_tokens + _BRINGING)
    return tiles.reshape(-1, 5)[dealt(np.repeat(work, num_kv_heads), num_threads)]


def dealt(work: Int64Array | Int32Array, num_hands: int) -> Int64Array:
    """The places of `work`, dealt like cards, most work first, from the first hand to the last and back again."""
    if len(work) <= num_hands:
        return np.arange(len(work))
    laps = np.full((-(-len(work) // num_hands), num_hands), -1)  # a card of each for every hand, maybe too many
    laps.ravel()[: len(work)] = np.argsort(-work, kind="stable")
    laps[1::2] = laps[1::2, ::-1]
    hands = laps.T.ravel()
    return hands[hands >= 0]
