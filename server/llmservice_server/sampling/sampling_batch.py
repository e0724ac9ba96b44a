"""How the rows of a batch are to be sampled, column by column. Made once, and kept while the same requests run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from llmservice_server.engine.request import Request
from llmservice_server.sampling.uniforms import Float64Array, UInt64Array, as_uint64, uniforms

Int64Array = npt.NDArray[np.int64]

_MIN_TEMPERATURE = 1e-6  # as good as greedy, and no division by zero


@dataclass(frozen=True, slots=True, eq=False)
class SamplingBatch:
    """One entry of each column per request."""

    requests: list[Request]
    temperature: Float64Array  # 0: the likeliest token
    top_k: Int64Array  # 0: off
    top_p: Float64Array
    min_p: Float64Array
    seeds: UInt64Array
    is_plain: bool = True  # their logits are sampled as they are
    told: list[int] = field(default_factory=list)  # the rows whose probabilities are asked for
    masked: list[int] = field(default_factory=list)  # the rows with a grammar

    @classmethod
    def of(cls, requests: Sequence[Request]) -> SamplingBatch:
        sampling = [request.sampling for request in requests]
        return cls(
            requests=list(requests),
            temperature=np.array([each.temperature and max(each.temperature, _MIN_TEMPERATURE) for each in sampling]),
            top_k=np.array([each.top_k for each in sampling], np.int64),
            top_p=np.array([each.top_p for each in sampling], np.float64),
            min_p=np.array([each.min_p for each in sampling], np.float64),
            seeds=as_uint64([request.seed for request in requests]),
            is_plain=all(request.is_plain for request in requests),
            told=[row for row, each in enumerate(sampling) if each.logprobs is not None],
            masked=[row for row, request in enumerate(requests) if request.grammar is not None],
        )

    @classmethod
    def alike(cls, num_rows: int, temperature: float = 0.0, top_p: float = 1.0) -> SamplingBatch:
        """For nobody in particular: what a step is warmed up with."""
        zeros = np.zeros(num_rows)
        none = zeros.astype(np.int64)
        return cls([], zeros + temperature, none, zeros + top_p, zeros, none.astype(np.uint64))

    @classmethod
    def widest(cls, num_rows: int) -> SamplingBatch:
        """What takes the most memory: a greedy row and one that is not cut, so that all others are copied twice."""
        batch = cls.alike(num_rows, temperature=1.0, top_p=0.9)
        if num_rows > 2:
            batch.temperature[0] = 0
            batch.top_p[1] = 1
        return batch

    def is_of(self, requests: Sequence[Request]) -> bool:
        """Whether these are the requests; they are compared by identity."""
        return self.requests == list(requests)

    def uniforms(self) -> Float64Array:
        """The numbers in [0, 1) that choose the rows' next tokens; 0 where nobody asks for chance."""
        if not self.temperature.any():
            return np.zeros_like(self.temperature)
        # not `num_output_tokens`: this is done for every sequence of every step
        places = [len(request.token_ids) - request.num_prompt_tokens for request in self.requests]
        return uniforms(self.seeds, np.array(places or [0] * len(self.seeds), np.int64))
