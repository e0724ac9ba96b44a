"""Top-k and top-p masks by radix select, and draws by inversion: without sorting, several programs for each row.

Masses are integers, multiples of `1 / _units_per_one(vocab_size)`: their sums are exact, so results are bitwise the
same in whichever order atomic operations add, and for any number of programs. With 151936 tokens the unit is 2^-44.
Weights below half of a unit have no mass: they are never drawn, and add nothing to the mass of a top-p mask.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from llmservice_server.backend.cuda.kernels.jit import jit, jit_for_any, padded
from llmservice_server.backend.torch.sampler import WEIGHT_BITS

_TILE = 4096
_PROGRAMS = 1024  # of a pass over a few rows: several for each processor of a large GPU
_DIGIT_BITS = 10  # 3 passes; a histogram of 8 KiB is half of a tile's bytes
_NUM_DIGITS = WEIGHT_BITS // _DIGIT_BITS
_NUM_WARPS = 8


@jit
def _amounts(weights: tl.tensor, units_per_one: tl.tensor, BY_MASS: tl.constexpr) -> tl.tensor:
    """What each weight adds to an amount, int64: its mass in units, or 1."""
    if BY_MASS:
        return (weights * units_per_one + 0.5).to(tl.int64)
    return tl.full(weights.shape, 1, tl.int64)


@jit
def _threshold(
    histograms: tl.tensor, wanted: tl.tensor, num_digits: tl.tensor, DIGIT_BITS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The first digits of the threshold, and the amount wanted of the weights that start with them."""
    cut, left = tl.zeros([], tl.int32), tl.ceil(tl.load(wanted)).to(tl.int64)
    digits = tl.arange(0, 1 << DIGIT_BITS)
    for place in range(num_digits):
        amounts = tl.load(histograms + (place << DIGIT_BITS) + digits)
        of_larger = tl.sum(amounts, axis=0) - tl.cumsum(amounts, axis=0)
        digit = tl.maximum(tl.sum((of_larger + amounts >= left).to(tl.int32), axis=0) - 1, 0)
        left -= tl.sum(tl.where(digits == digit, of_larger, 0), axis=0)
        cut = (cut << DIGIT_BITS) + digit
    return cut, left


@jit_for_any("place")
def _add_to_histograms(
    weights: tl.tensor,
    wanted: tl.tensor,
    histograms: tl.tensor,
    size: tl.tensor,
    slice_size: tl.tensor,
    units_per_one: tl.tensor,
    place: tl.tensor,
    BY_MASS: tl.constexpr,
    DIGIT_BITS: tl.constexpr,
    NUM_DIGITS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Add the weights that start with the threshold's first digits to the sums of their next digit, at `place`.

    Digit 0 has no sum: it is chosen where no other is, and of most masked rows nearly all weights are 0.
    """
    row = tl.program_id(1).to(tl.int64)
    histograms += row * (NUM_DIGITS << DIGIT_BITS)
    cut, _ = _threshold(histograms, wanted + row, place, DIGIT_BITS)
    shift = (NUM_DIGITS - 1 - place) * DIGIT_BITS
    start = tl.program_id(0) * slice_size
    for first in range(start, tl.minimum(start + slice_size, size), TILE):
        places = first + tl.arange(0, TILE)
        part = tl.load(weights + row * size + places, mask=places < size, other=0.0)
        leading = part.to(tl.int32, bitcast=True) >> shift
        digits = leading & ((1 << DIGIT_BITS) - 1)
        counted = (leading >> DIGIT_BITS == cut) & (digits > 0)  # not NaN, whose bits are too high
        amounts = _amounts(part, units_per_one, BY_MASS)
        tl.atomic_add(histograms + (place << DIGIT_BITS) + digits, amounts, mask=counted, sem="relaxed")


@jit
def _count_equal(
    weights: tl.tensor,
    wanted: tl.tensor,
    histograms: tl.tensor,
    thresholds: tl.tensor,
    num_equal: tl.tensor,
    size: tl.tensor,
    slice_size: tl.tensor,
    units_per_one: tl.tensor,
    BY_MASS: tl.constexpr,
    DIGIT_BITS: tl.constexpr,
    NUM_DIGITS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(1).to(tl.int64)
    cut, left = _threshold(histograms + row * (NUM_DIGITS << DIGIT_BITS), wanted + row, NUM_DIGITS, DIGIT_BITS)
    each = tl.maximum(_amounts(cut.to(tl.float32, bitcast=True), units_per_one, BY_MASS), 1)
    tl.store(thresholds + row * 2, cut.to(tl.int64))
    tl.store(thresholds + row * 2 + 1, (left + each - 1) // each)
    equal = tl.zeros([TILE], tl.int32)
    start = tl.program_id(0) * slice_size
    for first in range(start, tl.minimum(start + slice_size, size), TILE):
        places = first + tl.arange(0, TILE)
        part = tl.load(weights + row * size + places, mask=places < size, other=0.0)
        equal += (part.to(tl.int32, bitcast=True) == cut).to(tl.int32)
    tl.store(num_equal + row * tl.num_programs(0) + tl.program_id(0), tl.sum(equal, axis=0))


@jit
def _mask(
    weights: tl.tensor,
    thresholds: tl.tensor,
    num_equal: tl.tensor,
    size: tl.tensor,
    slice_size: tl.tensor,
    SLICES: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(1).to(tl.int64)
    cut, num_kept = tl.load(thresholds + row * 2).to(tl.int32), tl.load(thresholds + row * 2 + 1)
    slices = tl.arange(0, SLICES)
    before = tl.load(num_equal + row * tl.num_programs(0) + slices, mask=slices < tl.program_id(0), other=0)
    num_before = tl.sum(before, axis=0)
    start = tl.program_id(0) * slice_size
    for first in range(start, tl.minimum(start + slice_size, size), TILE):
        places = first + tl.arange(0, TILE)
        part = tl.load(weights + row * size + places, mask=places < size, other=0.0)
        bits = part.to(tl.int32, bitcast=True)
        equal = (bits == cut).to(tl.int32)
        earlier = num_before + tl.cumsum(equal, axis=0) - equal
        kept = (bits > cut) | ((equal == 1) & (earlier < num_kept))
        tl.store(weights + row * size + places, tl.where(kept, part, 0.0), mask=places < size)
        num_before += tl.sum(equal, axis=0)


def top_k_top_p(weights: torch.Tensor, wanted: torch.Tensor, by_mass: bool) -> torch.Tensor:
    """Implements `TopKTopP`, in place: `weights` float32 `[num_rows, size]`, contiguous; `wanted` float64 `[num_rows]`.

    A pass for each digit of the threshold sums the weights by that digit, one counts the weights equal to it, one
    writes. Bytes: reads each row 5 times, mostly from the L2 cache, and writes it once; 24 KiB of histograms per row.
    """
    num_rows, size = weights.shape
    num_tiles = triton.cdiv(size, _TILE)
    slice_size = _TILE * triton.cdiv(num_tiles, max(1, _PROGRAMS // num_rows))
    num_slices = triton.cdiv(size, slice_size)
    grid = (num_slices, num_rows)
    units = _units_per_one(size)
    wanted = wanted * (units if by_mass else 1.0)  # a tensor of its own: aligned, so that Triton compiles one kernel
    histograms = weights.new_zeros(num_rows, _NUM_DIGITS << _DIGIT_BITS, dtype=torch.int64)
    thresholds = weights.new_empty(num_rows, 2, dtype=torch.int64)
    num_equal = weights.new_empty(num_rows, num_slices, dtype=torch.int32)
    digits = {"DIGIT_BITS": _DIGIT_BITS, "NUM_DIGITS": _NUM_DIGITS, "TILE": _TILE, "num_warps": _NUM_WARPS}
    for place in range(_NUM_DIGITS):
        _add_to_histograms[grid](weights, wanted, histograms, size, slice_size, units, place, BY_MASS=by_mass, **digits)
    _count_equal[grid](
        weights, wanted, histograms, thresholds, num_equal, size, slice_size, units, BY_MASS=by_mass, **digits
    )
    _mask[grid](
        weights, thresholds, num_equal, size, slice_size,
        SLICES=padded(num_tiles), TILE=_TILE, num_warps=_NUM_WARPS,
    )  # fmt: skip
    return weights


@jit
def _sum_tiles(
    weights: tl.tensor, masses: tl.tensor, size: tl.tensor, units_per_one: tl.tensor, TILE: tl.constexpr
) -> None:
    row = tl.program_id(1).to(tl.int64)
    places = tl.program_id(0) * TILE + tl.arange(0, TILE)
    part = tl.load(weights + row * size + places, mask=places < size, other=0.0)
    mass = tl.sum(_amounts(part, units_per_one, True), axis=0)
    tl.store(masses + row * tl.num_programs(0) + tl.program_id(0), mass)


@jit
def _find(
    weights: tl.tensor,
    uniforms: tl.tensor,
    masses: tl.tensor,
    indices: tl.tensor,
    size: tl.tensor,
    units_per_one: tl.tensor,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    tiles, num_tiles = tl.arange(0, TILES), tl.cdiv(size, TILE)
    each = tl.load(masses + row * num_tiles + tiles, mask=tiles < num_tiles, other=0)
    total = tl.sum(each, axis=0)
    passed = tl.minimum((tl.load(uniforms + row) * total.to(tl.float64)).to(tl.int64), total - 1)
    ended = tl.cumsum(each, axis=0) <= passed
    passed -= tl.sum(tl.where(ended, each, 0), axis=0)
    start = tl.sum(ended.to(tl.int32), axis=0) * TILE
    places = start + tl.arange(0, TILE)
    part = tl.load(weights + row * size + places, mask=places < size, other=0.0)
    ended = tl.cumsum(_amounts(part, units_per_one, True), axis=0) <= passed
    index = tl.minimum(start + tl.sum(ended.to(tl.int32), axis=0), size - 1)  # of a row with NaN: any
    tl.store(indices + row, index.to(tl.int64))


def invert(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Implements `Invert`: `weights` contiguous. Bytes: reads each row once, and one tile of it again."""
    num_rows, size = weights.shape
    num_tiles, units = triton.cdiv(size, _TILE), _units_per_one(size)
    masses = weights.new_empty(num_rows, num_tiles, dtype=torch.int64)
    indices = weights.new_empty(num_rows, dtype=torch.int64)
    _sum_tiles[num_tiles, num_rows](weights, masses, size, units, TILE=_TILE, num_warps=_NUM_WARPS)
    _find[(num_rows,)](
        weights, uniforms.clone(), masses, indices, size, units,  # aligned by the copy
        TILES=padded(num_tiles), TILE=_TILE, num_warps=_NUM_WARPS,
    )  # fmt: skip
    return indices


def _units_per_one(size: int) -> float:
    """A power of two such that the masses of `size` weights of 1 stay below 2^62."""
    return float(1 << (62 - size.bit_length()))
