"""A batch of token ids to one vector each: the decoder's last states, pooled and normalised."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from llmservice_server.attention.base import Attend
from llmservice_server.attention.padded import PaddedAttention, PiecewiseAttention
from llmservice_server.engine.config import Pooling
from llmservice_server.models.llama import LlamaModel


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
