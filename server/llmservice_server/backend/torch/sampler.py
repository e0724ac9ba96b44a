"""Sampling in plain torch, on any device, without synchronization: no shape depends on a number on the device."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from llmservice_server.backend.sampling_batch import PenalizedRows, SamplingBatch
from llmservice_server.backend.transfer import to_device

WEIGHT_BITS = 30  # of a float from 0 to 1; such floats are ordered as their bits are


class TopKTopP(Protocol):
    def __call__(self, weights: torch.Tensor, wanted: torch.Tensor, by_mass: bool) -> torch.Tensor:
        """`weights` float32 `[num_rows, vocab_size]` in [0, 1], with all but the largest set to 0; may overwrite them.

        A weight is kept if the sum of the larger ones (`by_mass`), or their number, is less than `wanted` (float64
        `[num_rows]`). Of equal weights the first are kept.
        """


def top_k_top_p(weights: torch.Tensor, wanted: torch.Tensor, by_mass: bool) -> torch.Tensor:
    """Implements `TopKTopP` in plain torch, without sorting: the threshold is found bit by bit."""

    def amount_of(chosen: torch.Tensor) -> torch.Tensor:
        if by_mass:
            return torch.where(chosen, weights, 0).sum(dim=-1, dtype=torch.float64)
        return chosen.sum(dim=-1).double()

    bits = weights.view(torch.int32)
    cut = torch.zeros_like(wanted, dtype=torch.int32)
    for place in reversed(range(WEIGHT_BITS)):
        higher = cut + (1 << place)
        cut = torch.where(amount_of(bits >= higher[:, None]) >= wanted, higher, cut)
    larger, equal = bits > cut[:, None], bits == cut[:, None]
    num_equal = wanted - amount_of(larger)
    if by_mass:
        num_equal = num_equal / cut.view(torch.float32).clamp_min(1e-38).double()
    earlier = equal.cumsum(dim=-1) - equal.long()
    kept = larger | (equal & (earlier < num_equal.clamp_min(1)[:, None]))
    return weights.masked_fill(~kept, 0)


class Invert(Protocol):
    def __call__(self, weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
        """The first index at which each row's cumulative weight exceeds its uniform number times the sum, int64.

        `weights` float32 `[num_rows, vocab_size]` in [0, 1]; `uniforms` float64 `[num_rows]` in [0, 1). A weight of 0
        is never chosen.
        """


ROWS_AT_ONCE = 64
"""Twice a vocabulary in float64 each: 130 MB for the largest. A row needs at most 16 more bytes per token: its logits,
its copy among the sampled rows, and its copy among the masked rows. The planner relies on that."""


def invert(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Implements `Invert` in plain torch.

    In float64, because the error of a float32 sum exceeds a rare token's weight; so a few rows at a time.
    """
    chosen = []
    for some, shares in zip(torch.split(weights, ROWS_AT_ONCE), torch.split(uniforms, ROWS_AT_ONCE), strict=True):
        cumulative = some.cumsum(dim=-1, dtype=torch.float64)
        total = cumulative[:, -1:].contiguous()
        index = torch.searchsorted(cumulative, shares[:, None] * total, right=True)
        last = torch.searchsorted(cumulative, total)  # rounding must not select a weight of zero
        chosen.append(torch.minimum(index, last)[:, 0])
    return torch.cat(chosen)


def choose(
    logits: torch.Tensor, batch: SamplingBatch, mask: TopKTopP = top_k_top_p, pick: Invert = invert
) -> torch.Tensor:
    """The next token of each row of float32 logits `[num_rows, vocab_size]`, which are overwritten: int64 `[num_rows]`.

    -1 if a logit is NaN or infinite, or all are minus infinity. `mask` computes top-k and top-p; `pick` draws.
    """
    best, token_ids = logits.max(dim=-1)  # NaN if any logit is NaN
    if len(sampled := np.flatnonzero(batch.parameters[:, 0])):
        rows = _Rows(sampled, len(logits), logits.device)
        largest = rows.take(best)
        rows.put(token_ids, _draw(rows.take(logits).sub_(largest[:, None]), sampled, batch, mask, pick))
    return token_ids.masked_fill_(~best.isfinite(), -1)


def penalize(logits: torch.Tensor, penalized: PenalizedRows) -> None:
    """Implements `Backend.penalize`."""
    width, device = penalized.most_places, logits.device
    ids, counts = (table[:, :width].index_select(0, penalized.slots) for table in (penalized.ids, penalized.counts))
    unused = torch.arange(width, device=device) >= penalized.num_places[:, None]
    ids, counts = (torch.where(unused, part[:, :1], part) for part in (ids, counts))  # the first one is written again
    index = ids + penalized.rows[:, None] * logits.shape[-1]
    flat = logits.view(-1)
    values = flat[index]
    repetition, presence, frequency = penalized.parameters[:, :, None].unbind()
    values = torch.where(values > 0, values / repetition, values * repetition)
    flat[index] = values - presence * (counts > 0) - frequency * counts


class _Rows:
    """Some rows of a matrix, without a copy if they are all rows."""

    def __init__(self, places: npt.NDArray[np.int64], num_rows: int, device: torch.device) -> None:
        self._index = to_device(places, device) if len(places) < num_rows else None

    def take(self, matrix: torch.Tensor) -> torch.Tensor:
        return matrix if self._index is None else matrix.index_select(0, self._index)

    def put(self, matrix: torch.Tensor, rows: torch.Tensor) -> None:
        if self._index is None:
            matrix.copy_(rows)
        else:
            matrix.index_copy_(0, self._index, rows)


def _draw(
    logits: torch.Tensor, sampled: npt.NDArray[np.int64], batch: SamplingBatch, mask: TopKTopP, pick: Invert
) -> torch.Tensor:
    """One token for each row of `logits`, of the `sampled` rows of the batch; the largest logit is 0."""
    device, vocab_size = logits.device, logits.shape[-1]
    columns = np.vstack((batch.parameters.T, batch.uniforms()))[:, sampled]
    _, top_k, top_p, min_p, _ = columns
    temperature, most, mass, least, uniforms = to_device(columns, device).unbind()
    weights = logits.div_(temperature.float()[:, None]).exp_()  # of the largest logit: 1
    if min_p.any():
        weights.masked_fill_(weights < least[:, None].float(), 0)
    if len(by_rank := np.flatnonzero((top_k > 0) & (top_k < vocab_size))):
        rows = _Rows(by_rank, len(weights), device)
        rows.put(weights, mask(rows.take(weights), rows.take(most), by_mass=False))
    if len(by_mass := np.flatnonzero(top_p < 1)):
        _mask_top_p(weights, _Rows(by_mass, len(weights), device), mass, mask)
    return pick(weights, uniforms)


def _mask_top_p(weights: torch.Tensor, rows: _Rows, top_p: torch.Tensor, mask: TopKTopP) -> None:
    """Set the weights of `rows` that top-p masks to 0. Its temporary memory is free when it returns."""
    nuclei = rows.take(weights)
    total = torch.cat([some.sum(dim=-1, dtype=torch.float64) for some in torch.split(nuclei, ROWS_AT_ONCE)])
    wanted = (rows.take(top_p) * total).clamp_min(1e-300)  # top_p = 0 keeps the largest
    rows.put(weights, mask(nuclei, wanted, by_mass=True))
