"""Admission by predicted footprint: whether the KV cache will hold a request beside the running ones until they end.

A request grows by a token a step and frees all its blocks when it ends, so the most that several hold at once is less
than the sum of their last lengths. How long an answer will be is estimated from those that have ended.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from llmservice_planner.model.block_groups import BlockGroups
from llmservice_planner.traffic.output_lengths import NUM_LENGTH_CLASSES
from llmservice_server.engine.request import Request

FloatArray = npt.NDArray[np.float64]

_MEMORY = 128  # answers that have ended, of a class; older ones count ever less
_ENOUGH = 8  # of them, for a class to be estimated by itself
_ALL = NUM_LENGTH_CLASSES  # the row of all classes together
_MORE_CAUTION, _LESS_CAUTION = 0.15, 0.01  # after a preemption, and after a request that has ended
_LEAST_CAUTION, _MOST_CAUTION = -0.75, 2.0


class Admission:
    """Predicts the lengths of answers by their running mean and spread, for each quarter-octave of prompt length.

    `expected_tokens`, of prompt and answer, is used until enough requests have ended. `caution` is how many standard
    deviations more than expected are assumed: a preemption raises it, and each request that ends lowers it again.
    """

    def __init__(self, groups: BlockGroups, expected_tokens: int) -> None:
        self.groups = groups
        self.expected_tokens = expected_tokens
        self.caution = 0.0
        self._count, self._mean, self._mean_square = np.zeros((3, NUM_LENGTH_CLASSES + 1))
        self._spread = np.zeros(NUM_LENGTH_CLASSES + 1)  # squared coefficient of variation
        self._row = np.full(NUM_LENGTH_CLASSES, _ALL)  # whose moments are used for a class
        self._mean_prompt = 0.0  # without blocks that are shared with other requests

    def observe(self, request: Request, shared_tokens: int) -> None:
        """A request has ended, for any reason, after its first token; others hold the blocks of `shared_tokens` too."""
        length = request.num_output_tokens
        for row in (request.length_class, _ALL):
            count = self._count[row] = min(self._count[row] + 1, _MEMORY)
            mean = self._mean[row] = self._mean[row] + (length - self._mean[row]) / count
            self._mean_square[row] += (length * length - self._mean_square[row]) / count
            self._spread[row] = max(0.0, self._mean_square[row] / mean**2 - 1)
        if self._count[request.length_class] >= _ENOUGH:
            self._row[request.length_class] = request.length_class
        self._mean_prompt += (request.num_prompt_tokens - shared_tokens - self._mean_prompt) / self._count[_ALL]
        self.caution = max(_LEAST_CAUTION, self.caution - _LESS_CAUTION)

    def observe_preemption(self) -> None:
        """A request was preempted because the blocks ran out."""
        self.caution = min(_MOST_CAUTION, self.caution + _MORE_CAUTION)

    def remaining(self, requests: Sequence[Request]) -> FloatArray:
        """Tokens that each request is predicted to generate from now on, at most those that it may.

        The mean residual life of the generalised Pareto distribution with the observed mean and spread is linear in the
        tokens generated (Hall and Wellner, 1981): none is left at the end of equal lengths, always the mean of
        exponentially distributed ones, and ever more with heavier tails. Past the mean at least as much is left as the
        mean has been exceeded by, because lengths may have changed.
        """
        generated = np.array([each.num_output_tokens for each in requests], np.float64)
        most = np.array([each.sampling.max_tokens for each in requests], np.float64) - generated
        if self._count[_ALL] >= _ENOUGH:
            rows = self._row[[each.length_class for each in requests]]
            mean, spread = self._mean[rows], self._spread[rows]
            expected = np.maximum(mean + generated * (spread - 1) / (spread + 1), generated - mean)
            predicted = expected * (1 + self.caution * np.sqrt(np.minimum(1.0, spread)))
        else:
            known = np.array([each.num_tokens for each in requests], np.float64)
            predicted = np.maximum(self.expected_tokens - known, self.expected_tokens / 4)
        remaining: FloatArray = np.minimum(most, np.maximum(1.0, predicted))
        return remaining

    def peak_blocks(self, requests: Sequence[Request]) -> float:
        """The most blocks that these requests will hold at once, without those that they share with earlier ones."""
        tokens = np.array([each.num_tokens for each in requests], np.float64)
        shared = np.array([each.num_shared for each in requests], np.float64)
        own = self._held(np.ceil(tokens / self.groups.block_size)) - shared
        return peak(own, self.predicted_blocks(requests) - self._held(tokens / self.groups.block_size))

    def predicted_blocks(self, requests: Sequence[Request]) -> FloatArray:
        """Those that each request will hold when it ends, if its answer is as long as predicted."""
        tokens = np.array([each.num_tokens for each in requests], np.float64) + self.remaining(requests)
        return self._held(tokens / self.groups.block_size)

    def capacity(self, num_blocks: int) -> int:
        """How many requests like those before a pool of this size holds, at random points of their answers."""
        tokens = float(self.expected_tokens)
        if self._count[_ALL] >= _ENOUGH:  # longer answers are met more often: E[L²] / 2 E[L] tokens each
            tokens = self._mean_prompt + self._mean_square[_ALL] / (2 * self._mean[_ALL])
        return max(1, int(num_blocks / float(self._held(np.array(tokens / self.groups.block_size + 0.5)))))

    def _held(self, lengths: FloatArray) -> FloatArray:
        """The blocks of all groups that sequences hold which decode, and whose tables are so long."""
        held = np.zeros_like(lengths)
        for window in self.groups.windows:
            held += lengths if window is None else np.minimum(lengths, self.groups.of_window(window, 1))
        return held


def peak(own: FloatArray, remaining: FloatArray) -> float:
    """The most that sequences hold at once which hold `own` now, grow at the same rate by `remaining`, and end.

    When the n-th longest ends, it and those that take longer are there, and each has grown as much (Gong et al.,
    "Past-Future Scheduler", ASPLOS 2025).
    """
    order = np.argsort(-remaining)
    held = np.cumsum(own[order]) + remaining[order] * np.arange(1, len(own) + 1)
    return float(held.max(initial=0.0))
