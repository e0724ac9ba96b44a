"""Fits the coefficients of the planner's latency model to measured step times.

All coefficients but one enter linearly; the exception is the ridge, the number of tokens from which arithmetic takes
longer than reading the weights. For each ridge of a grid the others follow by non-negative least squares of the
relative errors (Lawson and Hanson, "Solving Least Squares Problems", 1974, chapter 23), with the weights of Huber's
loss, so that a step that something else interrupted does not count more than others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from llmservice_planner.sizing.latency import LatencyModel, StepBatch

Kind = Literal["decode", "prefill", "mixed"]
KINDS: tuple[Kind, ...] = ("decode", "prefill", "mixed")
Array = npt.NDArray[np.float64]

HUBER = 0.05
"""Relative errors above it count linearly instead of by their square."""
_REWEIGHTINGS = 4
_RIDGES = np.geomspace(1, 16384, 50)
_REFINEMENTS = 3


@dataclass(frozen=True, slots=True)
class Sample:
    """The measured time of consecutive steps, and what each computed."""

    kind: Kind
    batches: tuple[StepBatch, ...]
    seconds: float
    requests: int = 0
    """Requests whose way through HTTP, tokenizer and queue is in `seconds`, as it is in a time to first token."""

    phase: str = ""
    """What was measured: the samples of one phase are held out together."""


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of predictions: |predicted / measured - 1|."""

    count: int
    median: float
    p90: float

    @classmethod
    def of(cls, errors: Sequence[float]) -> Errors:
        return cls(len(errors), float(np.median(errors)), float(np.quantile(errors, 0.9)))


@dataclass(frozen=True, slots=True)
class Fit:
    model: LatencyModel
    request_s: float
    """Per request, outside of steps."""
    errors: Mapping[Kind, Errors]
    """Of the samples that the model was fitted to."""
    held_out: Mapping[Kind, Errors]
    """Of each phase, with a model fitted to all other phases."""


class TooFewSamplesError(ValueError):
    """The samples do not determine the coefficients."""


def fit(samples: Sequence[Sample], known: LatencyModel) -> Fit:
    """Fits the coefficients; `known` has those of the model's shape (experts, windows). Raises `TooFewSamplesError`."""
    phases = {sample.phase: None for sample in samples}
    if len(phases) < _LEAST_PHASES:
        raise TooFewSamplesError(
            f"{len(phases)} different compositions of steps were measured, at least {_LEAST_PHASES} are needed"
        )
    problem = _Problem.of(samples, known)
    everything = np.ones(len(samples), dtype=bool)
    model, request_s, best = problem.solve(everything, _RIDGES)
    near = np.geomspace(best.ridge / 2, best.ridge * 2, 9)
    unseen: list[tuple[Sample, float]] = []
    for phase in phases:
        of_phase = np.array([sample.phase == phase for sample in samples])
        without, its_request_s, _ = problem.solve(~of_phase, near, best.coefficients)
        held = (sample for sample in samples if sample.phase == phase)
        unseen += [(sample, predicted(without, its_request_s, sample)) for sample in held]
    seen = [(sample, predicted(model, request_s, sample)) for sample in samples]
    return Fit(model, request_s, _by_kind(seen), _by_kind(unseen))


def predicted(model: LatencyModel, request_s: float, sample: Sample) -> float:
    return sum(model.seconds(batch) for batch in sample.batches) + request_s * sample.requests


def _by_kind(predictions: Iterable[tuple[Sample, float]]) -> dict[Kind, Errors]:
    errors: dict[Kind, list[float]] = {}
    for sample, seconds in predictions:
        errors.setdefault(sample.kind, []).append(abs(seconds / sample.seconds - 1))
    return {kind: Errors.of(errors[kind]) for kind in KINDS if kind in errors}


_LEAST_PHASES = 8  # as many as coefficients, with those of a token, a request and the ridge
_LINEAR = ("step_s", "mixed_s", "sequence_s", "kv_token_s", "pair_s")


class _Found(NamedTuple):
    """The coefficients that explain the samples best with one ridge."""

    loss: float
    ridge: float
    coefficients: Array


@dataclass(frozen=True, slots=True)
class _Problem:
    """The equations `columns @ coefficients = seconds`, a row per sample; the last column follows from the ridge."""

    zero: LatencyModel
    columns: Array
    seconds: Array
    read: Array
    """Of each sample's steps, the share of the weights that is read; 0 where it has fewer steps than others."""
    tokens: Array

    @classmethod
    def of(cls, samples: Sequence[Sample], known: LatencyModel) -> _Problem:
        zero = replace(
            known, step_s=0, sequence_s=0, weights_s=0, token_s=0, kv_token_s=0, pair_s=0, mixed_s=0, transfer_s=0
        )
        units = [LatencyModel.from_dict({**zero.to_dict(), name: 1.0}) for name in _LINEAR]
        reading, computing = replace(zero, weights_s=1.0), replace(zero, token_s=1.0)
        most = max(len(sample.batches) for sample in samples)
        read, tokens = np.zeros((2, len(samples), most))
        for row, sample in enumerate(samples):
            for column, batch in enumerate(sample.batches):
                read[row, column], tokens[row, column] = reading.seconds(batch), computing.seconds(batch)
        linear = [[predicted(unit, 0.0, sample) for unit in units] + [sample.requests] for sample in samples]
        return cls(zero, np.array(linear, dtype=float), np.array([s.seconds for s in samples]), read, tokens)

    def solve(
        self, rows: npt.NDArray[np.bool_], ridges: Array, start: Array | None = None
    ) -> tuple[LatencyModel, float, _Found]:
        """The model and the time of a request that explain these rows best; the search begins at `start`."""
        best = min((self._at(rows, ridge, start) for ridge in ridges), key=lambda each: each.loss)
        step = float(ridges[1] / ridges[0])
        for _ in range(_REFINEMENTS):
            near = np.geomspace(best.ridge / step, best.ridge * step, 9)
            nearer = [self._at(rows, ridge, best.coefficients) for ridge in near]
            best = min((best, *nearer), key=lambda each: each.loss)
            step **= 0.25
        *linear, request_s, token_s = (float(value) for value in best.coefficients)
        fitted = dict(zip(_LINEAR, linear, strict=True), weights_s=best.ridge * token_s, token_s=token_s)
        return LatencyModel.from_dict({**self.zero.to_dict(), **fitted}), request_s, best

    def _at(self, rows: npt.NDArray[np.bool_], ridge: float, start: Array | None) -> _Found:
        column = np.maximum(ridge * self.read, self.tokens).sum(axis=1)
        matrix = np.column_stack([self.columns, column]) / self.seconds[:, None]
        loss, found = _robust(matrix[rows], start)
        return _Found(loss, float(ridge), found)


def _robust(rows: Array, start: Array | None) -> tuple[float, Array]:
    """Non-negative coefficients with rows @ coefficients close to 1, and their Huber loss."""
    weights = np.ones(len(rows))
    scale = np.maximum(np.abs(rows).max(axis=0), np.finfo(float).tiny)
    rows = rows / scale
    found = None if start is None else start * scale
    for _ in range(_REWEIGHTINGS):
        found = nnls(rows * weights[:, None], weights, found)
        errors = np.abs(rows @ found - 1)
        weights = np.sqrt(HUBER / np.maximum(errors, HUBER))
    loss = np.where(errors < HUBER, errors**2 / 2, HUBER * (errors - HUBER / 2)).sum()
    return float(loss), found / scale


def nnls(matrix: Array, target: Array, start: Array | None = None) -> Array:
    """The non-negative x with the least |matrix @ x - target|, by Lawson and Hanson's active sets.

    Few steps are needed from a non-negative `start` near it.
    """
    size = matrix.shape[1]
    x = np.zeros(size) if start is None else start
    passive = x > 0
    tolerance = 1e-12 * max(1.0, float(np.abs(matrix.T @ target).max()))
    for _ in range(3 * size):
        while True:
            solved = np.zeros(size)
            solved[passive] = np.linalg.lstsq(matrix[:, passive], target, rcond=None)[0]
            blocking = passive & (solved <= 0)
            if not blocking.any():
                x = solved
                break
            step = float((x[blocking] / np.maximum(x[blocking] - solved[blocking], 1e-300)).min())
            x = x + step * (solved - x)
            passive &= x > 1e-14
            x[~passive] = 0.0
        gradient = np.where(passive, -np.inf, matrix.T @ (target - matrix @ x))
        entering = int(gradient.argmax())
        if passive.all() or gradient[entering] <= tolerance:
            break
        passive[entering] = True
    return x
