"""A decoder that is assembled from the layers of an architecture. It knows tokens and positions, nothing of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from llmservice_server.backend.base import Attend, PlainMatrix, Rotation, each_linear, rotates
from llmservice_server.backend.experts import ExpertsMlp, Mixture
from llmservice_server.backend.layers import DecoderLayer, LayerOps, Linear, linears_of
from llmservice_server.backend.torch.layer_ops import TorchLayerOps, TorchLinear
from llmservice_server.models.config import ModelConfig
from llmservice_server.models.lora import LoraLinear
from llmservice_server.models.rope import RopeConfig, RotaryEmbedding, rotate
from llmservice_server.models.weights import Weights

BuildLayer = Callable[[ModelConfig, Weights, int], DecoderLayer]
"""An architecture: builds the layer of an index, of `Weights` within that layer of the checkpoint."""


class DecoderModel:
    """Its weights are allocated when it is built, and filled by the loader."""

    def __init__(self, config: ModelConfig, weights: Weights, build_layer: BuildLayer) -> None:
        self.config = config
        self.dtype = weights.dtype
        self.device = weights.device
        self.ops: LayerOps = TorchLayerOps()
        ropes = [config.rope] if config.local_rope is None else [config.rope, config.local_rope]
        self.rotaries = [self._rotary(rope) for rope in ropes]
        self.embed_tokens = weights.tensor("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.layers = [
            build_layer(config, weights.at(f"model.layers.{index}"), index) for index in range(config.num_layers)
        ]
        self.norm = weights.norm("model.norm", config.hidden_size, less_one=config.is_gemma)
        self.lm_head: Linear = (
            TorchLinear(self.embed_tokens)
            if config.tied_embeddings
            else weights.linear({"lm_head": config.vocab_size}, config.hidden_size)
        )
        weights.modules[id(self.lm_head)] = {"lm_head": config.vocab_size}  # also where it is the embedding
        self.modules = [weights.modules.get(id(linear), {}) for linear in each_linear(self)]

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """The last layer's states `[num_tokens, hidden_size]`, not yet normed; arguments as of `forward_by_piece`."""
        *_, states = self.forward_by_piece(token_ids, positions, attend)
        assert states is not None  # noqa: S101  # the last one is
        return states

    def forward_by_piece(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend, rows: int | None = None
    ) -> Iterator[torch.Tensor | None]:
        """Yields None after each piece, and then the last layer's states `[num_tokens, hidden_size]`, not yet normed.

        `token_ids` and `positions` are int64 `[num_tokens]`, the sequences of a step laid end to end; `attend` stores
        each layer's keys and values and knows which tokens may see which. A piece is a layer, or where `rows` is given
        so many tokens of one: those before them come first, which `attend` has to remember.
        """
        eps = self.config.rms_norm_eps
        rotations = self.rotations(positions)
        rotating = attend if rotates(attend) else None
        hidden = self.embed(token_ids)
        deltas: list[torch.Tensor | None] = [None]
        pieces = [(hidden, rotations)]
        if rows is not None:
            parts = [slice(first, first + rows) for first in range(0, len(token_ids), rows)]
            pieces = [(hidden[part], [(cos[part], sin[part]) for cos, sin in rotations]) for part in parts]
            deltas *= len(parts)
        for index, layer in enumerate(self.layers):
            qk_norm = None if layer.attention.qk_norm is None else (layer.attention.qk_norm, eps)
            for number, (states, rotations) in enumerate(pieces):
                heads = self.project(index, states, deltas[number])
                rotation = Rotation(*rotations[self.rotary_of(index)], qk_norm)
                if rotating is not None:
                    attended = rotating.rotate_and_attend(index, heads, rotation, layer.attention.sinks)
                else:
                    attended = self._rotate_and_attend(index, heads, rotation, attend)
                deltas[number] = self.finish(index, states, attended)
                yield None
        for (states, *_), delta in zip(pieces, deltas, strict=True):
            if delta is not None:
                states.add_(delta)
        yield hidden

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The states before the first layer, `[num_tokens, hidden_size]`."""
        states = F.embedding(token_ids, self.embed_tokens)
        if self.config.embedding_scale != 1.0:
            states.mul_(torch.tensor(self.config.embedding_scale, dtype=self.dtype))  # rounded, as in training
        return states

    def rotations(self, positions: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Cosines and signed sines of `positions`, of each of the `rotaries`."""
        return [rotary.at(positions) for rotary in self.rotaries]

    def rotary_of(self, index: int) -> int:
        """Which of the `rotaries` a layer has."""
        return 0 if self.config.windows[index] is None else len(self.rotaries) - 1

    def _rotary(self, rope: RopeConfig) -> RotaryEmbedding:
        """Queries and keys get half of the scores' scale each."""
        config = self.config
        frequencies, scale = rope.inverse_frequencies(config.head_dim, config.max_position_embeddings)
        return RotaryEmbedding(frequencies, scale * config.score_scale**0.5, self.dtype, self.device)

    def project(self, index: int, states: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        layer = self.layers[index]
        normed = self.ops.add_norm(states, delta, layer.input_norm, self.config.rms_norm_eps)
        return layer.attention.qkv(normed).view(len(states), -1, self.config.head_dim)

    def finish(self, index: int, states: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        layer = self.layers[index]
        delta = layer.attention.o(attended)
        if layer.attention_delta_norm is not None:
            delta = self.ops.add_norm(delta, None, layer.attention_delta_norm, self.config.rms_norm_eps)
        normed = self.ops.add_norm(states, delta, layer.post_attention_norm, self.config.rms_norm_eps)
        delta = layer.mlp(normed, self.ops)
        if layer.mlp_delta_norm is not None:
            delta = self.ops.add_norm(delta, None, layer.mlp_delta_norm, self.config.rms_norm_eps)
        return delta

    def _rotate_and_attend(self, index: int, heads: torch.Tensor, rotation: Rotation, attend: Attend) -> torch.Tensor:
        num_heads = self.config.num_heads
        queries_keys = heads[:, : num_heads + self.config.num_kv_heads]
        if rotation.qk_norm is not None:
            weight, eps = rotation.qk_norm
            queries_keys.copy_(F.rms_norm(queries_keys, (self.config.head_dim,), eps=eps).mul_(weight))
        rotate(queries_keys, rotation.cos, rotation.sin)
        return attend(index, heads[:, :num_heads], heads[:, num_heads:], self.layers[index].attention.sinks)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits `[num_rows, vocab_size]` of the given rows of `forward`'s result."""
        head = self.lm_head
        if isinstance(head, LoraLinear):
            logits = self.ops.logits(hidden, self.norm, self.config.rms_norm_eps, head.base)
            head.add_to(logits, partial(self.norm_states, hidden))
        else:
            logits = self.ops.logits(hidden, self.norm, self.config.rms_norm_eps, head)
        if (bound := self.config.logit_softcap) is not None:
            logits = logits.div_(bound).tanh_().mul_(bound)
        return logits

    def norm_states(self, hidden: torch.Tensor) -> torch.Tensor:
        """The model's last states, `[num_rows, hidden_size]`, of the given rows of `forward`'s result."""
        return self.ops.add_norm(hidden, None, self.norm, self.config.rms_norm_eps)

    def map_linears(self, convert: Callable[[Linear], Linear]) -> None:
        """Replace every matrix, one after the other, so that only one is held twice."""
        for layer in self.layers:
            layer.attention.map_linears(convert)
            layer.mlp.map_linears(convert)
        self.lm_head = convert(self.lm_head)

    def mixtures(self) -> Iterator[Mixture]:
        return (layer.mlp for layer in self.layers if isinstance(layer.mlp, ExpertsMlp))

    def plain_matrices(self) -> Iterator[PlainMatrix]:
        return iter(())

    def renamed(self, module: str) -> list[str]:
        """Our names are the checkpoint's."""
        return [module]

    def linears(self) -> Iterator[Linear]:
        """Every matrix that all tokens are multiplied with, the head last."""
        for layer in self.layers:
            yield from linears_of(layer)
        yield self.lm_head

    @property
    def weight_bytes(self) -> int:
        """A tied head that is packed is a second copy of the embedding."""
        own_head = self.lm_head.weight is not self.embed_tokens
        parts = self.embed_tokens, self.norm, *((self.lm_head,) if own_head else ()), *self.layers
        return sum(part.nbytes for part in parts)
