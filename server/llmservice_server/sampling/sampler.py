"""From logits to tokens: greedy, temperature, min-p, top-k, top-p; one batch of rows, each with its own parameters.

Each row takes one uniform number, which depends only on its request's seed and the token's place in the answer, and
inverts the cumulative distribution with it. So a seeded request gets the same tokens whoever shares its batch, and
again after a preemption.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import msgspec
import torch

from llmservice_server.engine.request import Request
from llmservice_server.messages import SamplingParams, TokenLogprobs
from llmservice_server.sampling.logit_adjustments import adjust
from llmservice_server.sampling.logprobs import token_logprobs
from llmservice_server.sampling.token_masks import apply_masks

_FIRST_CANDIDATES = 1024  # most nuclei are far smaller than a vocabulary; a row whose nucleus is not gets sorted whole
_MIN_TEMPERATURE = 1e-6  # as good as greedy, and no division by zero
_MASK = 0xFFFF_FFFF_FFFF_FFFF
_GOLDEN_GAMMA = 0x9E37_79B9_7F4A_7C15


class Draw(msgspec.Struct, frozen=True):
    """One step's token of one request."""

    token_id: int | None  # None: the logits are not finite
    logprobs: TokenLogprobs | None = None  # where the request asks for them


def draw(logits: torch.Tensor, requests: Sequence[Request], masks: Future[torch.Tensor] | None = None) -> list[Draw]:
    """The next token of each request, from the model's float32 logits `[num_requests, vocab_size]`; overwrites them.

    `masks` is for the requests with a grammar, in their order. Probabilities are told of the logits as they come.
    """
    told = [row for row, request in enumerate(requests) if request.sampling.logprobs is not None]
    raw = logits[told] if told else None
    adjust(logits, requests)
    if masks is not None:
        apply_masks(
            logits, [row for row, request in enumerate(requests) if request.grammar is not None], masks.result()
        )
    token_ids = sample(logits, requests)
    if raw is None:
        return [Draw(token_id) for token_id in token_ids]
    logprobs = token_logprobs(
        raw, [token_ids[row] or 0 for row in told], [requests[row].sampling.logprobs or 0 for row in told]
    )
    by_row = dict(zip(told, logprobs, strict=True))
    return [Draw(token_id, by_row.get(row)) for row, token_id in enumerate(token_ids)]


def sample(logits: torch.Tensor, requests: Sequence[Request]) -> list[int | None]:
    """The next token of each request, from float32 logits `[num_requests, vocab_size]`; None where a logit is NaN.

    Overwrites `logits`.
    """
    best, token_ids = logits.max(dim=-1)  # NaN is greater than everything, so it shows here
    rows = [row for row, request in enumerate(requests) if request.sampling.temperature > 0]
    if rows:
        _draw_rows(logits, rows, [requests[row] for row in rows], token_ids)
    token_ids.masked_fill_(~best.isfinite(), -1)
    return [None if token_id < 0 else token_id for token_id in token_ids.tolist()]


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """The parameters of a batch's rows, each float64 `[num_rows]` on the device; one transfer brings them all."""

    temperature: torch.Tensor
    top_k: torch.Tensor  # the vocabulary's size where it is off
    top_p: torch.Tensor
    min_p: torch.Tensor
    uniforms: torch.Tensor  # the numbers in [0, 1) that choose the tokens

    @classmethod
    def of(cls, requests: Sequence[Request], vocab_size: int, device: torch.device) -> SamplingTensors:
        columns = [
            (
                max(request.sampling.temperature, _MIN_TEMPERATURE),
                request.sampling.top_k or vocab_size,
                request.sampling.top_p,
                request.sampling.min_p,
                uniform(request.seed, request.num_output_tokens),
            )
            for request in requests
        ]
        return cls(*torch.tensor(columns, dtype=torch.float64, device=device).unbind(dim=1))

    def rows(self, index: torch.Tensor) -> SamplingTensors:
        return SamplingTensors(*(getattr(self, name)[index] for name in self.__slots__))


def _draw_rows(logits: torch.Tensor, rows: Sequence[int], requests: Sequence[Request], token_ids: torch.Tensor) -> None:
    """Write the tokens of `rows` of `logits`, whose requests these are, into `token_ids`.

    Rows are taken together that have equally many candidates: how many depends on the row alone, so ties always break
    the same way.
    """
    vocab_size = logits.shape[-1]
    parameters = SamplingTensors.of(requests, vocab_size, logits.device)
    groups: dict[int | None, list[int]] = defaultdict(list)
    for place, request in enumerate(requests):
        groups[_num_ranked(request.sampling, vocab_size)].append(place)
    for num_ranked, places in groups.items():
        rows_of_group = torch.tensor([rows[place] for place in places], device=logits.device)
        group = parameters if len(groups) == 1 else parameters.rows(torch.tensor(places, device=logits.device))
        weights = _weights(logits[rows_of_group], group)
        if any(requests[place].sampling.min_p > 0 for place in places):
            weights.masked_fill_(weights < group.min_p[:, None], 0)  # the likeliest token's weight is 1
        token_ids[rows_of_group] = _draw_group(weights, group, num_ranked)


def _num_ranked(sampling: SamplingParams, vocab_size: int) -> int | None:
    """How many of the likeliest tokens are to be sorted: few sizes, so that rows share a group.

    0: none, as nothing is cut off; None: nobody knows yet, as many as the nucleus has.
    """
    if 0 < sampling.top_k < vocab_size:
        return min(vocab_size, 1 << (sampling.top_k - 1).bit_length())
    return None if sampling.top_p < 1 else 0


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


def stream_seed(seed: int, order: int) -> int:
    """A seed for the request that arrived as number `order` and brings none of its own."""
    return _mix64(_mix64(seed & _MASK) ^ order)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) for a place in a stream: SplitMix64 (Steele et al., 2014) over seed and position."""
    state = _mix64((seed & _MASK) ^ _GOLDEN_GAMMA)
    return (_mix64((state + _GOLDEN_GAMMA * (position + 1)) & _MASK) >> 11) / (1 << 53)


def _mix64(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58_476D_1CE4_E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D0_49BB_1331_11EB) & _MASK
    return value ^ (value >> 31)
