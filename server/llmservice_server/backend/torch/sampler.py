"""Sampling in plain torch, on any device. The host never asks the device for a number: no shape here depends on one."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from llmservice_server.backend.sampling_batch import SamplingBatch
from llmservice_server.backend.transfer import to_device

WEIGHT_BITS = 30  # of a float from 0 to 1; such floats are ordered as their bits are


class TopKTopP(Protocol):
    def __call__(self, weights: torch.Tensor, wanted: torch.Tensor, by_mass: bool) -> torch.Tensor:
        """`weights` of 0 to 1, float32 `[num_rows, vocab_size]`, 0 except for the largest; may overwrite them.

        Each stays while those before it make less than `wanted` (float64 `[num_rows]`): their mass does, or their
        number. Of equal ones the first stay.
        """


def top_k_top_p(weights: torch.Tensor, wanted: torch.Tensor, by_mass: bool) -> torch.Tensor:
    """Implements `TopKTopP` in plain torch, without sorting: the place of the cut is found bit by bit."""

    def made_by(chosen: torch.Tensor) -> torch.Tensor:
        if by_mass:
            return torch.where(chosen, weights, 0).sum(dim=-1, dtype=torch.float64)
        return chosen.sum(dim=-1).double()

    bits = weights.view(torch.int32)
    cut = torch.zeros_like(wanted, dtype=torch.int32)
    for place in reversed(range(WEIGHT_BITS)):
        higher = cut + (1 << place)
        cut = torch.where(made_by(bits >= higher[:, None]) >= wanted, higher, cut)
    heavier, equal = bits > cut[:, None], bits == cut[:, None]
    num_equal = wanted - made_by(heavier)
    if by_mass:
        num_equal = num_equal / cut.view(torch.float32).clamp_min(1e-38).double()
    earlier = equal.cumsum(dim=-1) - equal.long()
    stays = heavier | (equal & (earlier < num_equal.clamp_min(1)[:, None]))
    return weights.masked_fill(~stays, 0)


ROWS_AT_ONCE = 64
"""Of a vocabulary in float64, twice: 130 MB of the largest. Beside it a row takes 12 bytes an entry at most: its
logits, its copy among the rows that are drawn, and its copy among those that are cut. The planner counts on that."""


def choose(logits: torch.Tensor, batch: SamplingBatch, cut: TopKTopP = top_k_top_p) -> torch.Tensor:
    """The next token of each row of float32 logits `[num_rows, vocab_size]`, which are overwritten: int64 `[num_rows]`.

    -1 where a logit is NaN or infinite, or all are minus infinity. `cut` is for top-k and top-p.
    """
    best, token_ids = logits.max(dim=-1)  # NaN is greater than everything, so it shows here
    if len(drawn := np.flatnonzero(batch.parameters[:, 0])):
        rows = _Rows(drawn, len(logits), logits.device)
        likeliest = rows.take(best)
        rows.put(token_ids, _draw(rows.take(logits).sub_(likeliest[:, None]), drawn, batch, cut))
    return token_ids.masked_fill_(~best.isfinite(), -1)


class _Rows:
    """Some rows of a matrix; all of them are no copy."""

    def __init__(self, places: npt.NDArray[np.int64], num_rows: int, device: torch.device) -> None:
        self._index = to_device(places, device) if len(places) < num_rows else None

    def take(self, matrix: torch.Tensor) -> torch.Tensor:
        return matrix if self._index is None else matrix.index_select(0, self._index)

    def put(self, matrix: torch.Tensor, rows: torch.Tensor) -> None:
        if self._index is None:
            matrix.copy_(rows)
        else:
            matrix.index_copy_(0, self._index, rows)


def _draw(logits: torch.Tensor, drawn: npt.NDArray[np.int64], batch: SamplingBatch, cut: TopKTopP) -> torch.Tensor:
    """One token for each row of `logits`, which are those of the `drawn` rows of the batch; the likeliest's is 0."""
    device, vocab_size = logits.device, logits.shape[-1]
    columns = np.vstack((batch.parameters.T, batch.uniforms()))[:, drawn]
    _, top_k, top_p, min_p, _ = columns
    temperature, most, mass, least, uniforms = to_device(columns, device).unbind()
    weights = logits.div_(temperature.float()[:, None]).exp_()  # of the likeliest: 1
    if min_p.any():
        weights.masked_fill_(weights < least[:, None].float(), 0)
    if len(by_rank := np.flatnonzero((top_k > 0) & (top_k < vocab_size))):
        rows = _Rows(by_rank, len(weights), device)
        rows.put(weights, cut(rows.take(weights), rows.take(most), by_mass=False))
    if len(by_mass := np.flatnonzero(top_p < 1)):
        _keep_nuclei(weights, _Rows(by_mass, len(weights), device), mass, cut)
    return _invert(weights, uniforms)


def _keep_nuclei(weights: torch.Tensor, rows: _Rows, top_p: torch.Tensor, cut: TopKTopP) -> None:
    """Set what top-p cuts from `rows` of the weights to 0. What it needs for that is free when it returns."""
    nuclei = rows.take(weights)
    total = torch.cat([some.sum(dim=-1, dtype=torch.float64) for some in torch.split(nuclei, ROWS_AT_ONCE)])
    wanted = (rows.take(top_p) * total).clamp_min(1e-300)  # top_p = 0 still leaves the likeliest
    rows.put(weights, cut(nuclei, wanted, by_mass=True))


def _invert(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The first index at which each row's cumulative weight exceeds its uniform's share of the whole.

    In float64: a float32 sum over a vocabulary is off by more than a rare token weighs. So a few rows at a time.
    """
    chosen = []
    for some, shares in zip(torch.split(weights, ROWS_AT_ONCE), torch.split(uniforms, ROWS_AT_ONCE), strict=True):
        cumulative = some.cumsum(dim=-1, dtype=torch.float64)
        total = cumulative[:, -1:].contiguous()
        index = torch.searchsorted(cumulative, shares[:, None] * total, right=True)
        last = torch.searchsorted(cumulative, total)  # rounding must not reach a weight of zero
        chosen.append(torch.minimum(index, last)[:, 0])
    return torch.cat(chosen)
