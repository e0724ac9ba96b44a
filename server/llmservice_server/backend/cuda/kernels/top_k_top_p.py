"""Top-k and top-p masks without sorting: the threshold is found bit by bit, in one pass over the row for each."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from llmservice_server.backend.cuda.kernels.jit import jit
from llmservice_server.backend.torch.sampler import WEIGHT_BITS

_TILE = 4096


@jit
def _amount_from(
    row: tl.tensor, size: tl.tensor, lowest: tl.tensor, BY_MASS: tl.constexpr, TILE: tl.constexpr
) -> tl.tensor:
    """The sum, or the number, of the weights whose bits are at least `lowest`; float64."""
    amount = tl.zeros([TILE], tl.float64)
    for start in range(0, size, TILE):
        places = start + tl.arange(0, TILE)
        weights = tl.load(row + places, mask=places < size, other=0.0)
        chosen = (weights.to(tl.int32, bitcast=True) >= lowest) & (places < size)
        if BY_MASS:
            amount += tl.where(chosen, weights, 0.0).to(tl.float64)
        else:
            amount += chosen.to(tl.float64)
    return tl.sum(amount, axis=0)


@jit
def _top_k_top_p(
    weights: tl.tensor,
    wanted: tl.tensor,
    size: tl.tensor,
    BY_MASS: tl.constexpr,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    row = weights + tl.program_id(0).to(tl.int64) * size
    target = tl.load(wanted + tl.program_id(0))
    cut = tl.zeros([], tl.int32)
    for place in range(BITS):
        higher = cut + (1 << (BITS - 1 - place))
        cut = tl.where(_amount_from(row, size, higher, BY_MASS, TILE) >= target, higher, cut)
    num_equal = target - _amount_from(row, size, cut + 1, BY_MASS, TILE)
    if BY_MASS:
        num_equal = num_equal / tl.maximum(cut.to(tl.float32, bitcast=True), 1e-38).to(tl.float64)
    num_equal = tl.maximum(num_equal, 1.0)
    num_before = tl.zeros([], tl.int32)
    for start in range(0, size, TILE):
        places = start + tl.arange(0, TILE)
        part = tl.load(row + places, mask=places < size, other=0.0)
        bits = part.to(tl.int32, bitcast=True)
        equal = (bits == cut).to(tl.int32)
        earlier = num_before + tl.cumsum(equal, axis=0) - equal
        kept = (bits > cut) | ((equal == 1) & (earlier.to(tl.float64) < num_equal))
        tl.store(row + places, tl.where(kept, part, 0.0), mask=places < size)
        num_before += tl.sum(equal, axis=0)


def top_k_top_p(weights: torch.Tensor, wanted: torch.Tensor, by_mass: bool) -> torch.Tensor:
    """Implements `TopKTopP`, in place: `weights` float32 `[num_rows, size]`, contiguous; `wanted` float64 `[num_rows]`.

    Bytes: reads each row 32 times, mostly from the L2 cache, and writes it once.
    """
    num_rows, size = weights.shape
    grid: tuple[Any, ...] = (num_rows,)
    aligned = wanted.clone()  # Triton compiles another kernel for a pointer that is not a multiple of 16 bytes
    _top_k_top_p[grid](weights, aligned, size, BY_MASS=by_mass, BITS=WEIGHT_BITS, TILE=_TILE, num_warps=16)
    return weights
