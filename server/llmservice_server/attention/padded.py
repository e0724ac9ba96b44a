"""Causal attention without a cache, which an embedding needs once: sequences padded to one length, or one in pieces."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention


class PaddedAttention:
    """Implements `Attend` for `num_sequences` rows of `length` tokens, padded at their end.

    A query sees only what comes before it, so padding at the end needs no mask: no real token ever sees it. `windows`
    holds each layer's sliding window, or None.
    """

    def __init__(self, num_sequences: int, length: int, windows: Sequence[int | None], device: torch.device) -> None:
        self._rows = (num_sequences, length)
        masks = {window: _mask(length, window, device) for window in {*windows} if window is not None}
        self._masks = [None if window is None else masks[window] for window in windows]

    def __call__(self, layer: int, query: torch.Tensor, key_value: torch.Tensor) -> torch.Tensor:
        queries = query.view(*self._rows, *query.shape[1:]).transpose(1, 2)
        keys, values = key_value.view(*self._rows, *key_value.shape[1:]).transpose(1, 2).chunk(2, dim=1)
        mask = self._masks[layer]
        answer = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        return answer.transpose(1, 2).flatten(2).flatten(0, 1)


class PiecewiseAttention:
    """Implements `Attend` for one sequence of which each layer is computed some tokens at a time, in their order."""

    def __init__(self, windows: Sequence[int | None]) -> None:
        self._windows = windows
        self._layer = -1
        self._stored: list[torch.Tensor] = []  # keys and values of the layer's tokens so far

    def __call__(self, layer: int, query: torch.Tensor, key_value: torch.Tensor) -> torch.Tensor:
        if layer != self._layer:
            self._layer, self._stored = layer, []
        self._stored.append(key_value)
        seen = torch.cat(self._stored)
        keys, values = seen.transpose(0, 1).unsqueeze(0).chunk(2, dim=1)
        places = torch.arange(len(seen), device=seen.device)
        distance = places[len(seen) - len(query) :, None] - places
        window = self._windows[layer]
        mask = (distance >= 0) & (distance < (len(seen) if window is None else window))
        answer = F.scaled_dot_product_attention(
            query.transpose(0, 1).unsqueeze(0), keys, values, attn_mask=mask, enable_gqa=True
        )
        return answer.squeeze(0).transpose(0, 1).flatten(1)


def _mask(length: int, window: int, device: torch.device) -> torch.Tensor | None:
    """True where a query may see a key, `[length, length]`; None where the window holds all of them."""
    if length <= window:
        return None
    tokens = torch.arange(length, device=device)
    distance = tokens[:, None] - tokens
    return (distance >= 0) & (distance < window)
