"""The vector of each input: by the generating model's layers, without its KV cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from llmservice_server.backend.base import Attend, Model
from llmservice_server.backend.torch.attention import attend_otherwise
from llmservice_server.runtime.vector_format import VectorFormat


class PaddedAttention:
    """Implements `Attend` for `num_sequences` rows of `length` tokens, padded at their end.

    A query sees only what comes before it, so padding at the end needs no mask: no real token ever sees it. `windows`
    holds each layer's sliding window, or the size of the chunks that it sees (`in_chunks`), or None.
    """

    def __init__(
        self,
        num_sequences: int,
        length: int,
        windows: Sequence[int | None],
        device: torch.device,
        softcap: float | None = None,
        *,
        in_chunks: bool = False,
    ) -> None:
        self._rows = (num_sequences, length)
        self._softcap = softcap
        self._masks: dict[int | None, torch.Tensor] = {
            window: _mask(length, length, window, device, in_chunks=in_chunks)
            for window in {*windows}
            if window is not None and window < length
        }
        self._windows = windows

    def __call__(
        self, layer: int, query: torch.Tensor, key_value: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        queries, key_values = (each.view(*self._rows, *each.shape[1:]) for each in (query, key_value))
        mask = self._masks.get(self._windows[layer])
        return _attended(queries, key_values, mask, self._softcap, sinks)


class PiecewiseAttention:
    """Implements `Attend` for one sequence of which each layer is computed some tokens at a time, in their order."""

    def __init__(self, windows: Sequence[int | None], softcap: float | None = None, *, in_chunks: bool = False) -> None:
        """Otherwise as `PaddedAttention`."""
        self._windows = windows
        self._in_chunks = in_chunks
        self._softcap = softcap
        self._layer = -1
        self._stored: list[torch.Tensor] = []  # keys and values of the layer's tokens so far

    def __call__(
        self, layer: int, query: torch.Tensor, key_value: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        if layer != self._layer:
            self._layer, self._stored = layer, []
        self._stored.append(key_value)
        seen = torch.cat(self._stored)
        mask = _mask(len(query), len(seen), self._windows[layer], seen.device, in_chunks=self._in_chunks)
        return _attended(query[None], seen[None], mask, self._softcap, sinks)


def _attended(
    queries: torch.Tensor,
    key_values: torch.Tensor,
    mask: torch.Tensor | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """`[all queries, num_heads * head_dim]`. mask: `[num_queries, num_keys]`; None: each query sees those before it.

    queries: `[num_sequences, num_queries, num_heads, head_dim]`. key_values: `[num_sequences, num_keys, 2 *
    num_kv_heads, head_dim]`.
    """
    by_head, (keys, values) = queries.transpose(1, 2), key_values.transpose(1, 2).chunk(2, dim=1)
    if softcap is None and sinks is None:
        answer = F.scaled_dot_product_attention(
            by_head, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
    else:
        mask = _mask(queries.shape[1], keys.shape[2], None, queries.device) if mask is None else mask
        answer = attend_otherwise(by_head, keys, values, mask, softcap=softcap, sinks=sinks)
    return answer.transpose(1, 2).flatten(2).flatten(0, 1)


def _mask(
    num_queries: int, num_keys: int, window: int | None, device: torch.device, *, in_chunks: bool = False
) -> torch.Tensor:
    """True where a query may see a key, `[num_queries, num_keys]`; the queries are those of the last keys."""
    places = torch.arange(num_keys, device=device)
    queries = places[num_keys - num_queries :, None]
    distance = queries - places
    if in_chunks and window is not None:
        return (distance >= 0) & (queries // window == places // window)
    return (distance >= 0) & (distance < (num_keys if window is None else window))


class VectorModel(Protocol):
    """Computes a vector of each input: an embedding, or the logits of a cross-encoder.

    `type_ids` says of each token which text of a pair it belongs to; empty where there are no pairs.
    """

    @property
    def size(self) -> int:
        """Numbers in a vector."""

    @property
    def takes_pairs(self) -> bool: ...

    def embed(self, inputs: Sequence[Sequence[int]], type_ids: Sequence[Sequence[int]] = ()) -> torch.Tensor:
        """Float32, `[num_inputs, size]`, on the CPU; inputs are padded to the longest."""

    def embed_by_piece(
        self, inputs: Sequence[Sequence[int]], rows: int | None = None, type_ids: Sequence[Sequence[int]] = ()
    ) -> Iterator[torch.Tensor | None]:
        """Yields None after each piece of the work, `rows` tokens of a single input; then what `embed` returns."""


class EmbeddingModel:
    """Shares the generating model's weights."""

    def __init__(self, model: Model, vector_format: VectorFormat) -> None:
        self._model = model
        self._format = vector_format
        self.takes_pairs = False

    @property
    def size(self) -> int:
        """Numbers in a vector."""
        return self._format.size

    def embed(self, inputs: Sequence[Sequence[int]], type_ids: Sequence[Sequence[int]] = ()) -> torch.Tensor:
        *_, vectors = self.embed_by_piece(inputs)
        assert vectors is not None  # noqa: S101  # the last ones are
        return vectors

    @torch.inference_mode()
    def embed_by_piece(
        self, inputs: Sequence[Sequence[int]], rows: int | None = None, type_ids: Sequence[Sequence[int]] = ()
    ) -> Iterator[torch.Tensor | None]:
        """Yields None after each layer, or of a single input after `rows` tokens of one; then what `embed` returns."""
        model, longest = self._model, max(map(len, inputs))
        padded = [[*ids, *([0] * (longest - len(ids)))] for ids in inputs]
        windows, softcap, in_chunks = model.config.windows, model.config.softcap, model.config.in_chunks
        attend: Attend = PiecewiseAttention(windows, softcap, in_chunks=in_chunks)
        if rows is None or len(inputs) > 1:
            rows = None
            attend = PaddedAttention(len(inputs), longest, windows, model.device, softcap, in_chunks=in_chunks)
        token_ids = torch.tensor(padded, device=model.device).flatten()
        positions = torch.arange(longest, device=model.device).repeat(len(inputs))
        for states in model.forward_by_piece(token_ids, positions, attend, rows):
            if states is None:
                yield None
            else:
                normed = model.norm_states(states).view(len(inputs), longest, -1)
                yield self._format.vectors(normed, [len(ids) for ids in inputs]).cpu()
