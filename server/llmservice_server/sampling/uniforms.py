"""The numbers that choose tokens: each depends on its request's seed and the token's place in the answer alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]
UInt64Array = npt.NDArray[np.uint64]

_MASK = 0xFFFF_FFFF_FFFF_FFFF
GOLDEN_GAMMA = np.uint64(0x9E37_79B9_7F4A_7C15)
_FIRST_FACTOR, _SECOND_FACTOR = np.uint64(0xBF58_476D_1CE4_E5B9), np.uint64(0x94D0_49BB_1331_11EB)


def stream_seed(seed: int, order: int) -> int:
    """A seed for the request that arrived as number `order` and brings none of its own."""
    return int(mix64(mix64(_as_uint64([seed])) ^ _as_uint64([order]))[0])


def stream_states(seeds: Sequence[int]) -> UInt64Array:
    """What all numbers of a seed's stream have in common; of the seeds the lower 64 bits count."""
    return mix64(_as_uint64(seeds) ^ GOLDEN_GAMMA) + GOLDEN_GAMMA


def uniforms(states: UInt64Array, positions: npt.NDArray[np.int64]) -> Float64Array:
    """Numbers in [0, 1) for places in streams: SplitMix64 (Steele et al., 2014) over `stream_states` and positions."""
    mixed = mix64(states + GOLDEN_GAMMA * positions.view(np.uint64))
    numbers: Float64Array = (mixed >> np.uint64(11)) / float(1 << 53)
    return numbers


def _as_uint64(seeds: Sequence[int]) -> UInt64Array:
    return np.array([seed & _MASK for seed in seeds], np.uint64)


def mix64(values: UInt64Array) -> UInt64Array:
    """SplitMix64's output function. As arrays or, compiled, number by number."""
    values = (values ^ (values >> np.uint64(30))) * _FIRST_FACTOR
    values = (values ^ (values >> np.uint64(27))) * _SECOND_FACTOR
    return values ^ (values >> np.uint64(31))
