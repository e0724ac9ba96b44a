"""The numbers that choose tokens: each depends on its request's seed and the token's place in the answer alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]
UInt64Array = npt.NDArray[np.uint64]

_MASK = 0xFFFF_FFFF_FFFF_FFFF
_GOLDEN_GAMMA = np.uint64(0x9E37_79B9_7F4A_7C15)
_FIRST_FACTOR, _SECOND_FACTOR = np.uint64(0xBF58_476D_1CE4_E5B9), np.uint64(0x94D0_49BB_1331_11EB)


def stream_seed(seed: int, order: int) -> int:
    """A seed for the request that arrived as number `order` and brings none of its own."""
    return int(_mix64(_mix64(as_uint64([seed])) ^ as_uint64([order]))[0])


def uniforms(seeds: UInt64Array, positions: npt.NDArray[np.int64]) -> Float64Array:
    """Numbers in [0, 1) for places in streams: SplitMix64 (Steele et al., 2014) over seed and position."""
    states = _mix64(seeds ^ _GOLDEN_GAMMA)
    mixed = _mix64(states + _GOLDEN_GAMMA * (positions.astype(np.uint64) + np.uint64(1)))
    numbers: Float64Array = (mixed >> np.uint64(11)) / float(1 << 53)
    return numbers


def as_uint64(seeds: list[int]) -> UInt64Array:
    """The lower 64 bits of each."""
    return np.array([seed & _MASK for seed in seeds], np.uint64)


def _mix64(values: UInt64Array) -> UInt64Array:
    values = (values ^ (values >> np.uint64(30))) * _FIRST_FACTOR
    values = (values ^ (values >> np.uint64(27))) * _SECOND_FACTOR
    return values ^ (values >> np.uint64(31))
