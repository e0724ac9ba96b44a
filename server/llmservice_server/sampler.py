"""From logits to tokens: greedy, temperature, top-k, top-p; one batch of rows, each with its own parameters.

Each row takes one uniform number, which depends only on its request's seed and the token's place in the answer, and
inverts the cumulative distribution with it. So a seeded request gets the same tokens whoever shares its batch, and
again after a preemption.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from llmservice_server.messages import SamplingParams
from llmservice_server.request import Request

_FIRST_CANDIDATES = 1024  # most nuclei are far smaller than a vocabulary; a row whose nucleus is not gets sorted whole
_MASK = 0xFFFF_FFFF_FFFF_FFFF
_GOLDEN_GAMMA = 0x9E37_79B9_7F4A_7C15


def sample(logits: torch.Tensor, requests: Sequence[Request]) -> list[int | None]:
    """The next token of each request, from float32 logits `[num_requests, vocab_size]`; None where a logit is NaN.

    Overwrites `logits`.
    """
    best, best_ids = logits.max(dim=-1)  # NaN is greater than everything, so it shows here
    tokens: list[int | None] = best_ids.tolist()
    if not bool(best.isfinite().all()):
        for row, finite in enumerate(best.isfinite().tolist()):
            if not finite:
                tokens[row] = None
    rows = [row for row, request in enumerate(requests) if request.sampling.temperature > 0 and tokens[row] is not None]
    for group in _groups(rows, requests, logits.shape[-1]):
        chosen = _sample_group(logits[group], [requests[row] for row in group])
        for row, token in zip(group, chosen, strict=True):
            tokens[row] = token
    return tokens


def _groups(rows: Sequence[int], requests: Sequence[Request], vocab_size: int) -> list[list[int]]:
    """Rows with equally many candidates: how many depends on the row alone, so ties always break the same way."""
    groups: dict[int, list[int]] = defaultdict(list)
    for row in rows:
        groups[_num_candidates(requests[row].sampling, vocab_size)].append(row)
    return list(groups.values())


def _num_candidates(sampling: SamplingParams, vocab_size: int) -> int:
    """How many of the likeliest tokens are to be sorted; 0: none, as nothing is cut off."""
    if 0 < sampling.top_k < vocab_size:
        return min(vocab_size, 1 << (sampling.top_k - 1).bit_length())  # few sizes, so that rows share a group
    return min(vocab_size, _FIRST_CANDIDATES) if sampling.top_p < 1 else 0


def _sample_group(logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
    vocab_size = logits.shape[-1]
    device = logits.device
    temperature = torch.tensor([request.sampling.temperature for request in requests], device=device)
    uniforms = torch.tensor([uniform(request.seed, request.num_output_tokens) for request in requests], device=device)
    # Shifting by the maximum first keeps a tiny temperature from overflowing to infinity.
    scaled = (logits - logits.max(dim=-1, keepdim=True).values) / temperature[:, None].clamp_min(1e-6)
    num_candidates = _num_candidates(requests[0].sampling, vocab_size)
    if num_candidates == 0:
        return _invert(scaled.softmax(dim=-1), uniforms).tolist()
    top_k = torch.tensor([request.sampling.top_k or vocab_size for request in requests], device=device)
    top_p = torch.tensor([request.sampling.top_p for request in requests], device=device)
    ranked, ids = scaled.topk(num_candidates, dim=-1)
    weights = ranked.exp()
    total = scaled.exp().sum(dim=-1)
    if requests[0].sampling.top_k == 0 and bool((weights.sum(dim=-1) < top_p * total).any()):
        ranked, ids = scaled.sort(dim=-1, descending=True, stable=True)
        weights = ranked.exp()
    weights.masked_fill_(torch.arange(weights.shape[-1], device=device) >= top_k[:, None], 0)
    mass = torch.where(top_k < vocab_size, weights.sum(dim=-1), total)
    before = weights.cumsum(dim=-1) - weights  # a token stays while those before it do not reach top_p
    weights.masked_fill_(before >= (top_p * mass)[:, None], 0)
    weights[:, 0] = ranked[:, 0].exp()  # top_p = 0 still leaves the likeliest
    return ids.gather(1, _invert(weights, uniforms)[:, None])[:, 0].tolist()


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
