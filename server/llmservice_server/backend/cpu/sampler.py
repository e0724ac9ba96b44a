"""Sampling on a CPU: one pass over a row computes its weights; top-k and top-p are masked without sorting.

Compiled by numba when the module is imported, or loaded from its cache (NUMBA_CACHE_DIR). A row is computed by one
thread and is independent of the other rows, so it yields the same token alone and in any batch.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from llmservice_server.backend.cpu.compiled import compiled, compiled_inner, for_each, use_threads
from llmservice_server.backend.cpu.llvm import exp2
from llmservice_server.backend.sampling_batch import GOLDEN_GAMMA, PenalizedRows, SamplingBatch, mix64

_LOG2_E = np.float32(math.log2(math.e))
_BLOCK = 256  # weights that are computed and summed together
_DIGIT_BITS, _LOWEST_SHIFTS = 10, (20, 10, 0)  # the bits of a weight in [0, 1] are three digits
_DIGITS = 1 << _DIGIT_BITS
_GROUPS = 512  # of tokens: the k-th of the groups' maxima is at most the k-th of all weights
_INFINITY, _MINUS_INFINITY = 0x7F80_0000, -0x7F80_0001  # as `_key` orders them


def choose(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """The next token of each row of float32 logits `[num_rows, vocab_size]`, which are overwritten: int64 `[num_rows]`.

    -1 if a logit is NaN or infinite, or all are minus infinity.
    """
    token_ids = np.empty(logits.shape[0], np.int64)
    rows = logits.contiguous().numpy()
    num_threads = use_threads(torch.get_num_threads())
    _choose(rows, batch.parameters, batch.streams, batch.positions(), min(num_threads, len(rows)), token_ids)
    return torch.from_numpy(token_ids)


def penalize(logits: torch.Tensor, penalized: PenalizedRows) -> None:
    """Implements `Backend.penalize`."""
    numbers = np.stack([each.numpy() for each in (penalized.rows, penalized.slots, penalized.num_places)])
    use_threads(torch.get_num_threads())
    _penalize(logits.numpy(), numbers, penalized.parameters.numpy(), penalized.ids.numpy(), penalized.counts.numpy())


@compiled_inner()
def _penalize_row(number: int, logits: Any, numbers: Any, parameters: Any, ids: Any, counts: Any) -> None:
    repetition, presence, frequency = parameters[0, number], parameters[1, number], parameters[2, number]
    row, slot = logits[numbers[0, number]], numbers[1, number]
    for place in range(numbers[2, number]):
        token, count = ids[slot, place], np.float32(counts[slot, place])
        if not 0 <= token < len(row):
            continue
        value = row[token]
        value = value / repetition if value > 0 else value * repetition
        row[token] = value - (presence if count > 0 else np.float32(0)) - frequency * count


@compiled("void(float32[:, ::1], int64[:, ::1], float32[:, ::1], int32[:, ::1], int32[:, ::1])", nogil=True)
def _penalize(logits: Any, numbers: Any, parameters: Any, ids: Any, counts: Any) -> None:
    """numbers: of each row, its row of logits, its slot and the number of its places."""
    for_each(_penalize_row, numbers.shape[1], (logits, numbers, parameters, ids, counts))


@compiled("int64(int32[::1])")
def _argmax(bits: Any) -> int:
    """The first index of the largest of the floats with these bits; -1 if all are minus infinity, or one is not finite.

    Computed on integers, because a maximum of floats, which may be NaN, is not vectorized.
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
def _softmax_weights(row: Any, largest: Any, temperature: Any, min_p: Any, sums: Any) -> None:
    """Replace each logit by exp((logit - largest) / temperature), or by 0 below `min_p`; write the sum of each block.

    A weight below 2^-125 is 0, so that banned tokens stay banned.
    """
    scale = _LOG2_E / temperature
    for block in range(len(sums)):
        part = row[block * _BLOCK : min(len(row), (block + 1) * _BLOCK)]
        for place in range(len(part)):
            power = (part[place] - largest) * scale
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
    """Write the ids of the tokens with a positive weight of at least `floor`; returns their number."""
    count = 0
    for token in range(len(weights)):
        ids[count] = token
        count += (weights[token] >= floor) & (weights[token] > 0)
    return count


@compiled("int64(float32[::1], int32[::1], int64, boolean, float64)")
def _top_k_top_p(weights: Any, ids: Any, count: int, by_mass: bool, wanted: float) -> int:
    """Keep the ids of the largest weights in `ids[:count]`; returns their number.

    An id is kept if the sum of the larger weights (`by_mass`), or their number, is less than `wanted`; of equal weights
    the first are kept. The order of the ids is unchanged. The threshold is found digit by digit of the weights' bits,
    which have the order of the weights.
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
                amount = masses[digit] if by_mass else float(counts[digit])
                lowest = digit
                if before + amount >= wanted:
                    cut = digit
                    break
                before += amount
        if cut == _DIGITS:  # all together are less, up to rounding: all are kept
            cut = lowest
            before -= masses[cut] if by_mass else float(counts[cut])
        prefix = (prefix << _DIGIT_BITS) | cut
    equal = counts[prefix & (_DIGITS - 1)]
    amount = masses[prefix & (_DIGITS - 1)] / equal if by_mass else 1.0
    equal = min(equal, max(1, math.ceil((wanted - before) / amount)))
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
    """A lower bound of the `top_k` largest weights; 0 if none is known."""
    if top_k > _GROUPS or len(weights) < 2 * _GROUPS:
        return np.float32(0)
    size = len(weights) // _GROUPS
    maxima, groups = np.empty(_GROUPS, np.float32), np.empty(_GROUPS, np.int32)
    for group in range(_GROUPS):
        groups[group] = group
        maximum = np.float32(0)
        for place in range(group * size, (group + 1) * size):
            maximum = max(maximum, weights[place])
        maxima[group] = maximum
    floor = np.float32(1)
    for place in range(_top_k_top_p(maxima, groups, _GROUPS, False, float(top_k))):  # a sort takes a second to compile
        floor = min(floor, maxima[groups[place]])
    return floor


@compiled_inner("int64(float32[::1], int32[::1], int64, float64)")
def _invert_kept(weights: Any, ids: Any, count: int, uniform: float) -> Any:
    """The token at which the cumulative weight of `ids[:count]` exceeds `uniform` times their sum."""
    total = 0.0
    for place in range(count):
        total += weights[ids[place]]
    wanted, cumulative = uniform * total, 0.0
    for place in range(count):
        cumulative += weights[ids[place]]
        if cumulative > wanted:
            return ids[place]
    return ids[count - 1]  # rounding must not go beyond the last


@compiled_inner("int64(float32[::1], float64[::1], float64)")
def _invert_all(weights: Any, sums: Any, uniform: float) -> int:
    """The same for all tokens, block by block."""
    wanted, cumulative, last = uniform * sums.sum(), 0.0, 0
    for block in range(len(sums)):
        if cumulative + sums[block] > wanted or block == len(sums) - 1:
            for token in range(block * _BLOCK, min(len(weights), (block + 1) * _BLOCK)):
                cumulative += weights[token]
                if weights[token] > 0:
                    last = token
                    if cumulative > wanted:
                        return token
            if last >= block * _BLOCK:  # rounding must not select a weight of zero
                return last
        else:
            cumulative += sums[block]
    for token in range(len(weights)):
        if weights[token] > 0:
            last = token
    return last


@compiled_inner("int64(float32[::1], float64[::1], float64, float64[::1], int32[::1])")
def _choose_token(row: Any, parameters: Any, uniform: float, sums: Any, ids: Any) -> Any:
    temperature, top_k, top_p, min_p = parameters[0], int(parameters[1]), parameters[2], parameters[3]
    best = _argmax(row.view(np.int32))
    if best < 0 or temperature == 0:
        return best
    _softmax_weights(row, row[best], np.float32(temperature), np.float32(min_p), sums)
    cuts_rank = 0 < top_k < len(row)
    if not cuts_rank and top_p >= 1:
        return _invert_all(row, sums, uniform)
    total = sums.sum()
    if cuts_rank:
        count = _top_k_top_p(row, ids, _gather(row, _floor_of_top_k(row, top_k), ids), False, float(top_k))
        total = 0.0
        for place in range(count):
            total += row[ids[place]]
    else:  # all tokens below this floor together are less than what top-p masks
        count = _gather(row, np.float32((1 - top_p) * total / len(row) * 0.999), ids)
    if top_p < 1:
        count = _top_k_top_p(row, ids, count, True, max(top_p * total, 1e-300))  # top_p = 0 keeps the largest
    return _invert_kept(row, ids, count, uniform)


_mix64 = compiled_inner("uint64(uint64)")(mix64)


@compiled_inner("float64(uint64, int64)")
def _uniform(stream: Any, place: int) -> Any:
    """`sampling_batch.uniforms` of one position."""
    return (_mix64(stream + GOLDEN_GAMMA * np.uint64(place)) >> np.uint64(11)) * 2.0**-53


@compiled_inner(owns_arrays=True)
def _choose_part(
    part: int, logits: Any, parameters: Any, streams: Any, positions: Any, num_parts: int, token_ids: Any
) -> None:
    num_rows, vocab_size = logits.shape
    sums = np.empty(-(-vocab_size // _BLOCK), np.float64)
    ids = np.empty(vocab_size + 1, np.int32)  # `_gather` writes one element beyond the last, which is not read
    for row in range(part, num_rows, num_parts):
        uniform = _uniform(streams[row], positions[row])
        token_ids[row] = _choose_token(logits[row], parameters[row], uniform, sums, ids)


@compiled("void(float32[:, ::1], float64[:, ::1], uint64[::1], int64[::1], int64, int64[::1])", nogil=True)
def _choose(logits: Any, parameters: Any, streams: Any, positions: Any, num_parts: int, token_ids: Any) -> None:
    """parameters, streams, positions: of a `SamplingBatch`."""
    for_each(_choose_part, num_parts, (logits, parameters, streams, positions, num_parts, token_ids))
