"""Sampling on a CPU: one pass over a row finds its weights, and a cut is found without sorting.

Compiled by numba when the module is imported, or read from where it keeps compiled code (NUMBA_CACHE_DIR). A row is
computed by one thread and independent of the other rows, so it yields the same token alone and in any batch.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from llmservice_server.backend.cpu.compiled import compiled, compiled_inner, for_each, use_threads
from llmservice_server.backend.cpu.element import exp2
from llmservice_server.backend.sampling_batch import GOLDEN_GAMMA, SamplingBatch, mix64

_LOG2_E = np.float32(math.log2(math.e))
_BLOCK = 256  # weights that are computed, and added up, together
_DIGIT_BITS, _LOWEST_SHIFTS = 10, (20, 10, 0)  # a weight of 1 or less has 30 bits: three digits
_DIGITS = 1 << _DIGIT_BITS
_GROUPS = 512  # of tokens; the k-th of their largest weights is no larger than the k-th of all
_INFINITY, _MINUS_INFINITY = 0x7F80_0000, -0x7F80_0001  # as `_key` orders them


def choose(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """The next token of each row of float32 logits `[num_rows, vocab_size]`, which are overwritten: int64 `[num_rows]`.

    -1 where a logit is NaN or infinite, or all are minus infinity.
    """
    token_ids = np.empty(logits.shape[0], np.int64)
    rows = logits.contiguous().numpy()
    num_threads = use_threads(torch.get_num_threads())
    _choose(rows, batch.parameters, batch.streams, batch.places(), min(num_threads, len(rows)), token_ids)
    return torch.from_numpy(token_ids)


@compiled("int64(int32[::1])")
def _likeliest(bits: Any) -> int:
    """The first place of the largest of the floats with these bits; -1 where there is none, or one is no number.

    As integers, because a maximum of floats, which may be NaN, does not run in vector registers.
    """
    highest, lowest = np.int32(-(2**31)), np.int32(2**31 - 1)
    for place in range(len(bits)):
        key = bits[place] ^ ((bits[place] >> 31) & np.int32(0x7FFF_FFFF))  # as ordered as the floats
        highest, lowest = max(highest, key), min(lowest, key)
    if highest >= _INFINITY or highest <= _MINUS_INFINITY or lowest < _MINUS_INFINITY:
        return -1
    wanted = highest ^ ((highest >> 31) & np.int32(0x7FFF_FFFF))
    for place in range(len(bits)):
        if bits[place] == wanted:
            return place
    return -1


@compiled_inner("void(float32[::1], float32, float32, float32, float64[::1])")
def _weigh(row: Any, highest: Any, temperature: Any, min_p: Any, sums: Any) -> None:
    """Replace each logit by exp((logit - highest) / temperature), or by 0 below `min_p`; `sums` is of each block.

    Below 2^-125 it is 0, so that what is barred stays barred.
    """
    scale = _LOG2_E / temperature
    for block in range(len(sums)):
        part = row[block * _BLOCK : min(len(row), (block + 1) * _BLOCK)]
        for place in range(len(part)):
            power = (part[place] - highest) * scale
            part[place] = exp2(power) if power >= -125 else np.float32(0)
        total: Any = 0.0
        for place in range(len(part)):
            weight = min(part[place], np.float32(1))
            weight = weight if weight >= min_p else np.float32(0)
            part[place] = weight
            total += weight
        sums[block] = total


@compiled("int64(float32[::1], float32, int32[::1])")
def _gather(weights: Any, floor: Any, ids: Any) -> int:
    """Write the ids of the tokens that weigh something, and `floor` at least; returns how many they are."""
    count = 0
    for token in range(len(weights)):
        ids[count] = token
        count += (weights[token] >= floor) & (weights[token] > 0)
    return count


@compiled("int64(float32[::1], int32[::1], int64, boolean, float64)")
def _cut(weights: Any, ids: Any, count: int, by_mass: bool, wanted: float) -> int:
    """Keep of `ids[:count]` the heaviest, each while those before it make less than `wanted`; returns how many stay.

    What they make is their mass, or their number. Of equal ones the first stay, and the order of the ids stays. The
    place of the cut is narrowed down digit by digit of the weights' bits, which are as ordered as the weights.
    """
    bits = weights.view(np.int32)
    counts, masses = np.empty(_DIGITS, np.int64), np.empty(_DIGITS, np.float64)
    prefix = np.int32(0)
    before = 0.0
    for shift in _LOWEST_SHIFTS:
        counts[:] = 0
        masses[:] = 0.0
        for place in range(count):
            token = ids[place]
            if (bits[token] >> shift) >> _DIGIT_BITS == prefix:
                digit = (bits[token] >> shift) & (_DIGITS - 1)
                counts[digit] += 1
                masses[digit] += weights[token]
        cut = lowest = _DIGITS
        for digit in range(_DIGITS - 1, -1, -1):
            if counts[digit]:
                made = masses[digit] if by_mass else float(counts[digit])
                lowest = digit
                if before + made >= wanted:
                    cut = digit
                    break
                before += made
        if cut == _DIGITS:  # all of them together make less, but for rounding of the last: none is cut off
            cut = lowest
            before -= masses[cut] if by_mass else float(counts[cut])
        prefix = (prefix << _DIGIT_BITS) | cut
    equal = counts[prefix & (_DIGITS - 1)]
    made = masses[prefix & (_DIGITS - 1)] / equal if by_mass else 1.0
    equal = min(equal, max(1, math.ceil((wanted - before) / made)))
    kept = 0
    for place in range(count):
        token = ids[place]
        if bits[token] > prefix or (bits[token] == prefix and equal > 0):
            equal -= bits[token] == prefix
            ids[kept] = token
            kept += 1
    return kept


@compiled("float32(float32[::1], int64)")
def _floor_of_top_k(weights: Any, top_k: int) -> Any:
    """No token lighter than this is among the `top_k` heaviest; 0 where nothing is known."""
    if top_k > _GROUPS or len(weights) < 2 * _GROUPS:
        return np.float32(0)
    size = len(weights) // _GROUPS
    heaviest, groups = np.empty(_GROUPS, np.float32), np.empty(_GROUPS, np.int32)
    for group in range(_GROUPS):
        groups[group] = group
        most = np.float32(0)
        for place in range(group * size, (group + 1) * size):
            most = max(most, weights[place])
        heaviest[group] = most
    floor = np.float32(1)
    for place in range(_cut(heaviest, groups, _GROUPS, False, float(top_k))):  # to sort them takes a second to compile
        floor = min(floor, heaviest[groups[place]])
    return floor


@compiled_inner("int64(float32[::1], int32[::1], int64, float64)")
def _invert_kept(weights: Any, ids: Any, count: int, uniform: float) -> Any:
    """The token at which the cumulative weight of `ids[:count]` exceeds its uniform's share of the whole."""
    total = 0.0
    for place in range(count):
        total += weights[ids[place]]
    wanted, cumulative = uniform * total, 0.0
    for place in range(count):
        cumulative += weights[ids[place]]
        if cumulative > wanted:
            return ids[place]
    return ids[count - 1]  # rounding must not reach beyond


@compiled_inner("int64(float32[::1], float64[::1], float64)")
def _invert_all(weights: Any, sums: Any, uniform: float) -> int:
    """The same over all tokens, block by block."""
    wanted, cumulative, last = uniform * sums.sum(), 0.0, 0
    for block in range(len(sums)):
        if cumulative + sums[block] > wanted or block == len(sums) - 1:
            for token in range(block * _BLOCK, min(len(weights), (block + 1) * _BLOCK)):
                cumulative += weights[token]
                if weights[token] > 0:
                    last = token
                    if cumulative > wanted:
                        return token
            if last >= block * _BLOCK:  # rounding must not reach a weight of zero
                return last
        else:
            cumulative += sums[block]
    for token in range(len(weights)):
        if weights[token] > 0:
            last = token
    return last


@compiled_inner("int64(float32[::1], float64[::1], float64, float64[::1], int32[::1])")
def _choose_one(row: Any, parameters: Any, uniform: float, sums: Any, ids: Any) -> Any:
    temperature, top_k, top_p, min_p = parameters[0], int(parameters[1]), parameters[2], parameters[3]
    best = _likeliest(row.view(np.int32))
    if best < 0 or temperature == 0:
        return best
    _weigh(row, row[best], np.float32(temperature), np.float32(min_p), sums)
    cuts_rank = 0 < top_k < len(row)
    if not cuts_rank and top_p >= 1:
        return _invert_all(row, sums, uniform)
    total = sums.sum()
    if cuts_rank:
        count = _cut(row, ids, _gather(row, _floor_of_top_k(row, top_k), ids), False, float(top_k))
        total = 0.0
        for place in range(count):
            total += row[ids[place]]
    else:  # the tokens lighter than this make less than what top-p cuts off, all together
        count = _gather(row, np.float32((1 - top_p) * total / len(row) * 0.999), ids)
    if top_p < 1:
        count = _cut(row, ids, count, True, max(top_p * total, 1e-300))  # top_p = 0 still leaves the likeliest
    return _invert_kept(row, ids, count, uniform)


_mix64 = compiled_inner("uint64(uint64)")(mix64)


@compiled_inner("float64(uint64, int64)")
def _uniform(stream: Any, place: int) -> Any:
    """`uniforms.uniforms` of one place."""
    return (_mix64(stream + GOLDEN_GAMMA * np.uint64(place)) >> np.uint64(11)) * 2.0**-53


@compiled_inner()
def _choose_part(
    part: int, logits: Any, parameters: Any, streams: Any, places: Any, num_parts: int, token_ids: Any
) -> None:
    num_rows, vocab_size = logits.shape
    sums = np.empty(-(-vocab_size // _BLOCK), np.float64)
    ids = np.empty(vocab_size + 1, np.int32)  # the one behind the last is written, and not read
    for row in range(part, num_rows, num_parts):
        uniform = _uniform(streams[row], places[row])
        token_ids[row] = _choose_one(logits[row], parameters[row], uniform, sums, ids)


@compiled("void(float32[:, ::1], float64[:, ::1], uint64[::1], int64[::1], int64, int64[::1])", nogil=True)
def _choose(logits: Any, parameters: Any, streams: Any, places: Any, num_parts: int, token_ids: Any) -> None:
    """`parameters`, `streams` and `places` are those of a `SamplingBatch`."""
    for_each(_choose_part, num_parts, (logits, parameters, streams, places, num_parts, token_ids))
