"""The Llama family's decoder: Llama 2 and 3, Mistral, Qwen2, Qwen3. It knows tokens and positions, nothing of batches.

Query, key and value weights are fused into one matrix, as are gate and up: one large product is faster than several
small.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from llmservice_server.backend.base import Attend, DecoderLayer, LayerOps, Linear, Rotation, linears_of, rotates
from llmservice_server.backend.torch.layer_ops import TorchLayerOps, TorchLinear
from llmservice_server.models.config import ModelConfig
from llmservice_server.models.rope import RotaryEmbedding, rotate


@dataclass(frozen=True, slots=True)
class LinearPlace:
    """Where a model has a matrix: an attribute of `owner`, fused of modules of the checkpoint."""

    owner: LlamaModel | DecoderLayer
    attribute: str
    parts: dict[str, int]  # by the module's name, its outputs, in order

    @property
    def linear(self) -> Linear:
        linear: Linear = getattr(self.owner, self.attribute)
        return linear

    def put(self, linear: Linear) -> None:
        setattr(self.owner, self.attribute, linear)


class LlamaModel:
    """Weights are allocated uninitialised; `checkpoint_tensors` says which of the checkpoint's tensors go where.

    The weights of modules of the checkpoint that are `quantized` get no memory: the loader replaces their matrices.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, quantized: Collection[str] = ()
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.ops: LayerOps = TorchLayerOps()
        frequencies, scale = config.rope.inverse_frequencies(config.head_dim, config.max_position_embeddings)
        self.rotary = RotaryEmbedding(frequencies, scale, dtype, device)
        self.embed_tokens = self._empty(config.vocab_size, config.hidden_size)
        self.layers: list[DecoderLayer] = []
        self.quantized: list[LinearPlace] = []
        for index in range(config.num_layers):
            self.layers.append(self._layer())
            self._release(self._places(index), quantized)
        self.norm = self._empty(config.hidden_size)
        self.lm_head: Linear = TorchLinear(
            self.embed_tokens if config.tied_embeddings else self._empty(config.vocab_size, config.hidden_size)
        )
        self._release([LinearPlace(self, "lm_head", {"lm_head": config.vocab_size})], quantized)

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
        cos, sin = self.rotary.at(positions)
        rotating = attend if rotates(attend) else None
        hidden = F.embedding(token_ids, self.embed_tokens)
        deltas: list[torch.Tensor | None] = [None]
        pieces = [(hidden, cos, sin)]
        if rows is not None:
            parts = [slice(first, first + rows) for first in range(0, len(token_ids), rows)]
            pieces = [(hidden[part], cos[part], sin[part]) for part in parts]
            deltas *= len(parts)
        for index, layer in enumerate(self.layers):
            qk_norm = None if layer.qk_norm is None else (layer.qk_norm, eps)
            for number, (states, cosines, sines) in enumerate(pieces):
                heads = self.project(index, states, deltas[number])
                rotation = Rotation(cosines, sines, qk_norm)
                if rotating is not None:
                    attended = rotating.rotate_and_attend(index, heads, rotation)
                else:
                    attended = self._rotate_and_attend(index, heads, rotation, attend)
                deltas[number] = self.finish(index, states, attended)
                yield None
        for (states, *_), delta in zip(pieces, deltas, strict=True):
            if delta is not None:
                states.add_(delta)
        yield hidden

    def project(self, index: int, states: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        layer = self.layers[index]
        normed = self.ops.add_norm(states, delta, layer.input_norm, self.config.rms_norm_eps)
        return layer.qkv(normed).view(len(states), -1, self.config.head_dim)

    def finish(self, index: int, states: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        layer = self.layers[index]
        delta = layer.o(attended)
        normed = self.ops.add_norm(states, delta, layer.post_attention_norm, self.config.rms_norm_eps)
        return layer.down(self.ops.silu_mul(layer.gate_up(normed)))

    def _rotate_and_attend(self, index: int, heads: torch.Tensor, rotation: Rotation, attend: Attend) -> torch.Tensor:
        num_heads = self.config.num_heads
        queries_keys = heads[:, : num_heads + self.config.num_kv_heads]
        if rotation.qk_norm is not None:
            weight, eps = rotation.qk_norm
            queries_keys.copy_(F.rms_norm(queries_keys, (self.config.head_dim,), eps=eps).mul_(weight))
        rotate(queries_keys, rotation.cos, rotation.sin)
        return attend(index, heads[:, :num_heads], heads[:, num_heads:])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits `[num_rows, vocab_size]` of the given rows of `forward`'s result."""
        return self.ops.logits(hidden, self.norm, self.config.rms_norm_eps, self.lm_head)

    def norm_states(self, hidden: torch.Tensor) -> torch.Tensor:
        """The model's last states, `[num_rows, hidden_size]`, of the given rows of `forward`'s result."""
        return self.ops.add_norm(hidden, None, self.norm, self.config.rms_norm_eps)

    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        """The checkpoint's tensor names, each with the (part of a) weight that it fills."""
        tensors = {"model.embed_tokens.weight": self.embed_tokens, "model.norm.weight": self.norm}
        if not self.config.tied_embeddings and self.lm_head.weight.device.type != "meta":
            tensors["lm_head.weight"] = self.lm_head.weight
        for index, layer in enumerate(self.layers):
            tensors.update((f"model.layers.{index}.{name}", tensor) for name, tensor in self._layer_tensors(layer))
            for place in self._places(index):
                tensors.update(_rows(place.linear, place.parts))
        return tensors

    def finish_loading(self) -> None:
        """Spread what the checkpoint holds once and the layers use by head. To be called once."""
        num_heads = self.config.num_heads
        for layer in self.layers:
            if layer.qk_norm is not None:
                layer.qk_norm[1:num_heads] = layer.qk_norm[0]
                layer.qk_norm[num_heads + 1 :] = layer.qk_norm[num_heads]

    def map_linears(self, convert: Callable[[Linear], Linear]) -> None:
        """Replace every matrix, one after the other, so that only one is held twice."""
        for layer in self.layers:
            layer.qkv, layer.o = convert(layer.qkv), convert(layer.o)
            layer.gate_up, layer.down = convert(layer.gate_up), convert(layer.down)
        self.lm_head = convert(self.lm_head)

    def linears(self) -> Iterator[Linear]:
        """Every matrix, the head last."""
        for layer in self.layers:
            yield from linears_of(layer)
        yield self.lm_head

    def places(self) -> Iterator[LinearPlace]:
        """Where the layers have their matrices."""
        for index in range(len(self.layers)):
            yield from self._places(index)

    @property
    def weight_bytes(self) -> int:
        """A tied head that is packed is a second copy of the embedding."""
        own_head = self.lm_head.weight is not self.embed_tokens
        parts: list[torch.Tensor | Linear] = [self.embed_tokens, self.norm, *((self.lm_head,) if own_head else ())]
        for layer in self.layers:
            parts += [layer.input_norm, layer.post_attention_norm, layer.qkv, layer.o, layer.gate_up, layer.down]
            parts += [] if layer.qk_norm is None else [layer.qk_norm]
        return sum(part.nbytes for part in parts)

    def _layer_tensors(self, layer: DecoderLayer) -> Iterator[tuple[str, torch.Tensor]]:
        yield "input_layernorm.weight", layer.input_norm
        yield "post_attention_layernorm.weight", layer.post_attention_norm
        if layer.qk_norm is not None:
            yield "self_attn.q_norm.weight", layer.qk_norm[0]
            yield "self_attn.k_norm.weight", layer.qk_norm[self.config.num_heads]

    def _places(self, index: int) -> list[LinearPlace]:
        """The matrices of a layer, in the order in which they are used."""
        config, layer, prefix = self.config, self.layers[index], f"model.layers.{index}"
        query_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        return [
            LinearPlace(
                layer,
                "qkv",
                {f"{attention}.q_proj": query_rows, f"{attention}.k_proj": kv_rows, f"{attention}.v_proj": kv_rows},
            ),
            LinearPlace(layer, "o", {f"{attention}.o_proj": config.hidden_size}),
            LinearPlace(
                layer,
                "gate_up",
                {f"{mlp}.gate_proj": config.intermediate_size, f"{mlp}.up_proj": config.intermediate_size},
            ),
            LinearPlace(layer, "down", {f"{mlp}.down_proj": config.hidden_size}),
        ]

    def _release(self, places: list[LinearPlace], quantized: Collection[str]) -> None:
        """Free the memory of those that are `quantized`, and note them."""
        for place in places:
            if not place.parts.keys().isdisjoint(quantized):
                place.put(TorchLinear(place.linear.weight.to("meta"), place.linear.bias))
                self.quantized.append(place)

    def _layer(self) -> DecoderLayer:
        config = self.config
        num_qk_heads = config.num_heads + config.num_kv_heads
        return DecoderLayer(
            input_norm=self._empty(config.hidden_size),
            qkv=self._linear(
                (num_qk_heads + config.num_kv_heads) * config.head_dim, config.hidden_size, config.qkv_bias
            ),
            qk_norm=self._empty(num_qk_heads, config.head_dim) if config.qk_norm else None,
            o=self._linear(config.hidden_size, config.num_heads * config.head_dim, config.o_bias),
            post_attention_norm=self._empty(config.hidden_size),
            gate_up=self._linear(2 * config.intermediate_size, config.hidden_size, config.mlp_bias),
            down=self._linear(config.hidden_size, config.intermediate_size, config.mlp_bias),
        )

    def _linear(self, out_features: int, in_features: int, bias: bool) -> TorchLinear:
        return TorchLinear(self._empty(out_features, in_features), self._empty(out_features) if bias else None)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)


def _rows(linear: Linear, names: dict[str, int]) -> Iterator[tuple[str, torch.Tensor]]:
    """The rows of a fused matrix under the checkpoint's names; `names` gives each its number of rows, in order."""
    sizes = list(names.values())
    if linear.weight.device.type != "meta":
        for name, weight in zip(names, torch.split(linear.weight, sizes), strict=True):
            yield f"{name}.weight", weight
    if linear.bias is not None:
        for name, bias in zip(names, torch.split(linear.bias, sizes), strict=True):
            yield f"{name}.bias", bias
