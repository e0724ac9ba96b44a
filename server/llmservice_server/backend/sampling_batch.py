"""The sampling parameters of a batch as arrays, built once and kept while the same requests run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from llmservice_server.backend.step_input import Int64Array
from llmservice_server.types.messages import SamplingParams

Float64Array = npt.NDArray[np.float64]
UInt64Array = npt.NDArray[np.uint64]
_MASK = 0xFFFF_FFFF_FFFF_FFFF
GOLDEN_GAMMA = np.uint64(0x9E37_79B9_7F4A_7C15)
_FIRST_FACTOR, _SECOND_FACTOR = np.uint64(0xBF58_476D_1CE4_E5B9), np.uint64(0x94D0_49BB_1331_11EB)


def stream_states(seeds: Sequence[int]) -> UInt64Array:
    """The state of each seed's random stream; only the lower 64 bits of a seed are used."""
    return mix64(_as_uint64(seeds) ^ GOLDEN_GAMMA) + GOLDEN_GAMMA


def uniforms(states: UInt64Array, positions: Int64Array) -> Float64Array:
    """Numbers in [0, 1) at positions of streams: SplitMix64 (Steele et al., 2014) of `stream_states` and positions."""
    mixed = mix64(states + GOLDEN_GAMMA * positions.view(np.uint64))
    numbers: Float64Array = (mixed >> np.uint64(11)) / float(1 << 53)
    return numbers


def _as_uint64(seeds: Sequence[int]) -> UInt64Array:
    return np.array([seed & _MASK for seed in seeds], np.uint64)


def mix64(values: UInt64Array) -> UInt64Array:
    """SplitMix64's output function, of arrays or, compiled by numba, of numbers."""
    values = (values ^ (values >> np.uint64(30))) * _FIRST_FACTOR
    values = (values ^ (values >> np.uint64(27))) * _SECOND_FACTOR
    return values ^ (values >> np.uint64(31))


_MIN_TEMPERATURE = 1e-6  # equivalent to greedy, without a division by zero


class PenaltyHistory(Protocol):
    """The distinct tokens that a request's penalties concern, and how often each was generated."""

    ids: Int64Array  # [most_places], of which the first `num_places` are used
    counts: Int64Array  # likewise
    num_places: int
    most_places: int
    changed: Sequence[int]  # places that the device does not know yet


@dataclass(frozen=True, slots=True)
class PenalizedRows:
    """Rows of logits with penalties, on the device; a row of `ids` and `counts` for each slot."""

    rows: torch.Tensor  # int64 [num_rows], of the logits
    slots: torch.Tensor  # int64 [num_rows]
    parameters: torch.Tensor  # float32 [3, num_rows]: repetition, presence, frequency
    ids: torch.Tensor  # int32 [num_slots, width]: distinct tokens, of which the first `num_places` are used
    counts: torch.Tensor  # int32 [num_slots, width]: how often each was generated; 0: it is in the prompt only
    num_places: torch.Tensor  # int64 [num_rows]
    most_places: int  # of a row


class SampledRequest(Protocol):
    """What sampling reads of a request; implemented by the engine's `Request`."""

    @property
    def sampling(self) -> SamplingParams: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_output_tokens(self) -> int: ...
    @property
    def stop_token_ids(self) -> frozenset[int]: ...
    @property
    def allowed_token_ids(self) -> Int64Array | None: ...
    @property
    def seed(self) -> int: ...
    @property
    def is_plain(self) -> bool: ...
    @property
    def history(self) -> PenaltyHistory | None: ...
    @property
    def grammar(self) -> object | None: ...


@dataclass(frozen=True, slots=True, eq=False)
class SamplingBatch:
    """Each array and list has one entry per request."""

    requests: list[SampledRequest]
    parameters: Float64Array  # [num_rows, 4]: temperature (0: greedy), top-k (0: off), top-p, min-p
    token_ids: Sequence[Sequence[int]]  # the requests' own lists, which grow while they run
    num_prompt_tokens: Int64Array
    streams: UInt64Array  # of `stream_states`
    is_greedy: bool
    is_plain: bool = True  # no request changes its logits
    with_logprobs: list[int] = field(default_factory=list)  # the rows with log-probabilities
    masked: list[int] = field(default_factory=list)  # the rows with a grammar

    @classmethod
    def of(cls, requests: Sequence[SampledRequest]) -> SamplingBatch:
        sampling = [request.sampling for request in requests]
        temperatures = [each.temperature and max(each.temperature, _MIN_TEMPERATURE) for each in sampling]
        rows = [
            (temperature, each.top_k, each.top_p, each.min_p)
            for temperature, each in zip(temperatures, sampling, strict=True)
        ]
        return cls(
            requests=list(requests),
            parameters=np.array(rows, np.float64).reshape(-1, 4),
            token_ids=[request.token_ids for request in requests],
            num_prompt_tokens=np.array([request.num_prompt_tokens for request in requests], np.int64),
            streams=stream_states([request.seed for request in requests]),
            is_greedy=not any(temperatures),
            is_plain=all(request.is_plain for request in requests),
            with_logprobs=[row for row, each in enumerate(sampling) if each.logprobs is not None],
            masked=[row for row, request in enumerate(requests) if request.grammar is not None],
        )

    @classmethod
    def identical(cls, num_rows: int, temperature: float = 0.0, top_p: float = 1.0) -> SamplingBatch:
        """Equal rows without requests, for warm-up and profiling."""
        parameters = np.tile([temperature, 0.0, top_p, 0.0], (num_rows, 1))
        return cls(
            requests=[],
            parameters=parameters,
            token_ids=[()] * num_rows,
            num_prompt_tokens=np.zeros(num_rows, np.int64),
            streams=np.zeros(num_rows, np.uint64),
            is_greedy=temperature == 0,
        )

    @classmethod
    def largest(cls, num_rows: int) -> SamplingBatch:
        """The batch that needs most memory: a greedy row and one without top-p, so that all others are copied twice."""
        batch = cls.identical(num_rows, temperature=1.0, top_p=0.9)
        if num_rows > 2:
            batch.parameters[0, 0] = 0  # greedy
            batch.parameters[1, 2] = 1  # top-p
        return batch

    def is_of(self, requests: Sequence[SampledRequest]) -> bool:
        """Whether the batch is of these requests, compared by identity."""
        return self.requests == list(requests)

    def uniforms(self) -> Float64Array:
        """The random number in [0, 1) of each row's next token."""
        return uniforms(self.streams, self.positions())

    def positions(self) -> Int64Array:
        """The position of each row's next token in its output; 0 if all rows are greedy."""
        if self.is_greedy:
            return np.zeros(len(self.streams), np.int64)
        # faster than `num_output_tokens`, for every sequence of every step
        num_tokens = np.fromiter(map(len, self.token_ids), np.int64, len(self.token_ids))
        return num_tokens - self.num_prompt_tokens
