"""A batch of token ids to one vector each: the decoder's last states, pooled and normalised."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from llmservice_server.backend.base import Attend
from llmservice_server.engine.config import Pooling
from llmservice_server.models.llama import LlamaModel


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


class EmbeddingModel:
    """Shares the generating model's weights. `last` takes the last token's state, `mean` the mean of all."""

    def __init__(self, model: LlamaModel, pooling: Pooling) -> None:
        self._model = model
        self._pooling = pooling

    @property
    def size(self) -> int:
        """Numbers in a vector."""
        return self._model.config.hidden_size

    def embed(self, inputs: Sequence[Sequence[int]]) -> torch.Tensor:
        """Float32 vectors of length 1, `[num_inputs, size]`, on the CPU; inputs are padded to the longest."""
        *_, vectors = self.embed_by_piece(inputs)
        assert vectors is not None  # noqa: S101  # the last ones are
        return vectors

    @torch.inference_mode()
    def embed_by_piece(self, inputs: Sequence[Sequence[int]], rows: int | None = None) -> Iterator[torch.Tensor | None]:
        """Yields None after each layer, or of a single input after `rows` tokens of one; then what `embed` returns."""
        model, longest = self._model, max(map(len, inputs))
        padded = [[*ids, *([0] * (longest - len(ids)))] for ids in inputs]
        attend: Attend
        if rows is None or len(inputs) > 1:
            rows, attend = None, PaddedAttention(len(inputs), longest, model.config.windows, model.device)
        else:
            attend = PiecewiseAttention(model.config.windows)
        token_ids = torch.tensor(padded, device=model.device).flatten()
        positions = torch.arange(longest, device=model.device).repeat(len(inputs))
        for states in model.forward_by_piece(token_ids, positions, attend, rows):
            if states is None:
                yield None
            else:
                normed = model.norm_states(states).view(len(inputs), longest, -1)
                yield F.normalize(self._pool(normed, [len(ids) for ids in inputs]), dim=-1).cpu()

    def _pool(self, states: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        """`states`: `[num_inputs, longest, size]`; float32 `[num_inputs, size]`, the padding left out."""
        counts = torch.tensor(lengths, device=states.device)
        if self._pooling == "last":
            return states[torch.arange(len(lengths), device=states.device), counts - 1].float()
        real = torch.arange(states.shape[1], device=states.device) < counts[:, None]
        return torch.where(real[..., None], states.float(), 0.0).sum(dim=1) / counts[:, None]
