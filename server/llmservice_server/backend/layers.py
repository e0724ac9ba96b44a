"""The weights of a decoder's layers, which models are assembled from and a fused decode path reads too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

Activation = Literal["silu", "gelu_tanh", "clamped_silu"]
"""Of an MLP's gate. `clamped_silu` bounds gate and up as well, and adds 1 to up (gpt-oss)."""
CLAMPED_LIMIT, CLAMPED_SLOPE = 7.0, 1.702
"""The bound, and the factor in the sigmoid, of `clamped_silu`."""


class Linear(Protocol):
    """A weight matrix and its bias."""

    bias: torch.Tensor | None

    @property
    def weight(self) -> torch.Tensor:
        """`[out, in]`, in any layout."""

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[num_rows, in]` to `[num_rows, out]`."""

    @property
    def nbytes(self) -> int:
        """Of the matrix, in its layout, and the bias."""


class LayerOps(Protocol):
    """The operations of a decoder between its matrix products and attention."""

    def add_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add `delta` to `hidden` `[num_tokens, size]` in place, if there is one; return the sum's RMS norm."""

    def gated(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """`activation(gate) * up` `[num_tokens, size]` of `gate_up` `[num_tokens, 2 * size]`; may overwrite it."""

    def logits(self, hidden: torch.Tensor, norm: torch.Tensor, eps: float, head: Linear) -> torch.Tensor:
        """Float32 `[num_rows, vocab_size]` of the last layer's states `[num_rows, size]`, before the final norm."""


@dataclass(slots=True)
class SelfAttention:
    """A layer's weights around the attention itself."""

    qkv: Linear
    qk_norm: torch.Tensor | None  # [num_heads + num_kv_heads, head_dim]
    o: Linear
    sinks: torch.Tensor | None = None  # [num_heads]

    def linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.o

    def map_linears(self, convert: Callable[[Linear], Linear]) -> None:
        self.qkv, self.o = convert(self.qkv), convert(self.o)

    @property
    def nbytes(self) -> int:
        others = sum(each.nbytes for each in (self.qk_norm, self.sinks) if each is not None)
        return self.qkv.nbytes + self.o.nbytes + others


class Mlp(Protocol):
    """What a layer computes of each token by itself."""

    def __call__(self, normed: torch.Tensor, ops: LayerOps) -> torch.Tensor:
        """What the layer adds to its states, `[num_tokens, hidden_size]`, as is `normed`."""

    def linears(self) -> tuple[Linear, ...]:
        """Its matrices that every token is multiplied with, in the order in which they are used."""

    def map_linears(self, convert: Callable[[Linear], Linear]) -> None:
        """Replace them, one after the other."""

    @property
    def nbytes(self) -> int:
        """Of all its weights."""


@dataclass(slots=True)
class DenseMlp:
    """Implements `Mlp`: a gated product, all of it for every token."""

    gate_up: Linear
    down: Linear
    activation: Activation = "silu"

    def __call__(self, normed: torch.Tensor, ops: LayerOps) -> torch.Tensor:
        return self.down(ops.gated(self.gate_up(normed), self.activation))

    def linears(self) -> tuple[Linear, ...]:
        return self.gate_up, self.down

    def map_linears(self, convert: Callable[[Linear], Linear]) -> None:
        self.gate_up, self.down = convert(self.gate_up), convert(self.down)

    @property
    def nbytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes


@dataclass(slots=True)
class DecoderLayer:
    """The weights of one layer, which a fused decode path reads as well as the model."""

    input_norm: torch.Tensor
    attention: SelfAttention
    post_attention_norm: torch.Tensor  # of the states, before the MLP
    mlp: Mlp
    attention_delta_norm: torch.Tensor | None = None  # of what attention adds to the states
    mlp_delta_norm: torch.Tensor | None = None  # of what the MLP adds to them

    @property
    def is_plain(self) -> bool:
        """Whether it is a layer of Llama's: two norms, no sinks, and a dense MLP with SiLU."""
        others = self.attention_delta_norm, self.mlp_delta_norm, self.attention.sinks
        return isinstance(self.mlp, DenseMlp) and self.mlp.activation == "silu" and all(each is None for each in others)

    @property
    def nbytes(self) -> int:
        norms = self.input_norm, self.post_attention_norm, self.attention_delta_norm, self.mlp_delta_norm
        return self.attention.nbytes + self.mlp.nbytes + sum(each.nbytes for each in norms if each is not None)


def linears_of(layer: DecoderLayer) -> tuple[Linear, ...]:
    """Its matrices that every token is multiplied with, in the order in which they are used."""
    return *layer.attention.linears(), *layer.mlp.linears()
