"""Sampling in plain torch, on any device: rows that are cut alike are taken together."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch

from llmservice_server.sampling.sampling_batch import SamplingBatch

_FIRST_CANDIDATES = 1024  # most nuclei are far smaller than a vocabulary; a row whose nucleus is not gets sorted whole


def choose(logits: torch.Tensor, batch: SamplingBatch) -> list[int]:
    """The next token of each row of float32 logits `[num_rows, vocab_size]`, which are overwritten.

    -1 where a logit is NaN or infinite, or all are minus infinity.
    """
    best, token_ids = logits.max(dim=-1)  # NaN is greater than everything, so it shows here
    if rows := np.flatnonzero(batch.temperature).tolist():
        _draw_rows(logits, rows, batch, token_ids)
    token_ids.masked_fill_(~best.isfinite(), -1)
    return token_ids.tolist()


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """The parameters of a batch's rows, each float64 `[num_rows]` on the device; one transfer brings them all."""

    temperature: torch.Tensor
    top_k: torch.Tensor  # the vocabulary's size where it is off
    top_p: torch.Tensor
    min_p: torch.Tensor
    uniforms: torch.Tensor  # the numbers in [0, 1) that choose the tokens

    @classmethod
    def of(cls, batch: SamplingBatch, rows: list[int], vocab_size: int, device: torch.device) -> SamplingTensors:
        top_k = np.where(batch.top_k == 0, vocab_size, batch.top_k)
        columns = np.stack((batch.temperature, top_k, batch.top_p, batch.min_p, batch.uniforms()))
        return cls(*torch.from_numpy(columns[:, rows]).to(device).unbind())

    def rows(self, index: torch.Tensor) -> SamplingTensors:
        return SamplingTensors(*(getattr(self, name)[index] for name in self.__slots__))


def _draw_rows(logits: torch.Tensor, rows: list[int], batch: SamplingBatch, token_ids: torch.Tensor) -> None:
    """Write the tokens of `rows` of `logits` into `token_ids`.

    Rows are taken together that have equally many candidates: how many depends on the row alone, so ties always break
    the same way.
    """
    vocab_size = logits.shape[-1]
    parameters = SamplingTensors.of(batch, rows, vocab_size, logits.device)
    groups: dict[int | None, list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        groups[_num_ranked(int(batch.top_k[row]), float(batch.top_p[row]), vocab_size)].append(place)
    for num_ranked, places in groups.items():
        rows_of_group = torch.tensor([rows[place] for place in places], device=logits.device)
        group = parameters if len(groups) == 1 else parameters.rows(torch.tensor(places, device=logits.device))
        weights = _weights(logits[rows_of_group], group)
        if any(batch.min_p[rows[place]] > 0 for place in places):
            weights.masked_fill_(weights < group.min_p[:, None], 0)  # the likeliest token's weight is 1
        token_ids[rows_of_group] = _draw_group(weights, group, num_ranked)


def _num_ranked(top_k: int, top_p: float, vocab_size: int) -> int | None:
    """How many of the likeliest tokens are to be sorted: few sizes, so that rows share a group.

    0: none, as nothing is cut off; None: nobody knows yet, as many as the nucleus has.
    """
    if 0 < top_k < vocab_size:
        return min(vocab_size, 1 << (top_k - 1).bit_length())
    return None if top_p < 1 else 0


def _weights(logits: torch.Tensor, parameters: SamplingTensors) -> torch.Tensor:
    """What each token weighs beside the likeliest, which weighs 1, at its row's temperature; `logits`' shape."""
    # Shifting by the maximum first keeps a tiny temperature from overflowing to infinity.
    shifted = logits - logits.max(dim=-1, keepdim=True).values
    return shifted.div_(parameters.temperature.float()[:, None]).exp_()


def _draw_group(weights: torch.Tensor, parameters: SamplingTensors, num_ranked: int | None) -> torch.Tensor:
    """One token id per row of `weights` `[num_rows, vocab_size]`."""
    if num_ranked == 0:
        return _invert(weights, parameters.uniforms)
    if num_ranked is not None:
        ranked, ids = weights.topk(num_ranked, dim=-1)
        places = torch.arange(num_ranked, device=weights.device)
        ranked.masked_fill_(places >= parameters.top_k[:, None], 0)
        return _draw_nucleus(ranked, ids, ranked.sum(dim=-1), parameters)
    total = weights.sum(dim=-1)
    ranked, ids = weights.topk(min(weights.shape[-1], _FIRST_CANDIDATES), dim=-1)
    drawn = _draw_nucleus(ranked, ids, total, parameters)
    wide = (ranked.sum(dim=-1) < parameters.top_p * total).nonzero()[:, 0]
    if len(wide) > 0:  # these nuclei may reach beyond the candidates: sort whole rows, but of no one else
        ranked, ids = weights[wide].sort(dim=-1, descending=True, stable=True)
        drawn[wide] = _draw_nucleus(ranked, ids, total[wide], parameters.rows(wide))
    return drawn


def _draw_nucleus(
    ranked: torch.Tensor, ids: torch.Tensor, total: torch.Tensor, parameters: SamplingTensors
) -> torch.Tensor:
    """One of `ids` per row, by the weights `ranked` (largest first) of which `total` is the whole; top-p cuts them."""
    before = ranked.cumsum(dim=-1) - ranked  # a token stays while those before it do not reach top_p
    beyond = before >= (parameters.top_p * total)[:, None]
    beyond[:, 0] = False  # top_p = 0 still leaves the likeliest
    return ids.gather(1, _invert(ranked.masked_fill(beyond, 0), parameters.uniforms)[:, None])[:, 0]


def _invert(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The first index at which each row's cumulative weight exceeds its uniform's share of the whole.

    In float64: a float32 sum over a vocabulary is off by more than a rare token weighs.
    """
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    wanted = uniforms.double() * cumulative[:, -1]
    index = torch.searchsorted(cumulative, wanted[:, None], right=True)[:, 0]
    last = (
        weights.shape[-1] - 1 - (weights.flip(-1) > 0).int().argmax(dim=-1)
    )  # rounding must not reach a weight of zero
    return torch.minimum(index, last)
