"""A mixture of experts: each token is multiplied with the few experts that its router chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from llmservice_server.backend.base import Activation, DenseMlp, LayerOps, Linear
from llmservice_server.backend.torch.layer_ops import TorchLinear


@dataclass(slots=True)
class Experts:
    """The experts' matrices, and their products in a loop over the experts, on any device.

    A backend's own implementation overrides `multiply`.
    """

    gate_up: list[Linear]  # of each expert
    down: list[Linear]
    activation: Activation = "silu"

    def __call__(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, ops: LayerOps
    ) -> torch.Tensor:
        """The weighted sums `[num_tokens, hidden_size]` of what the chosen experts make of `hidden`, of the same shape.

        chosen: int64 `[num_tokens, top_k]`. weights: float32, likewise.
        """
        order = chosen.flatten().argsort()
        counts = chosen.new_zeros(len(self.gate_up)).scatter_add_(0, chosen.flatten(), torch.ones_like(order))
        rows = hidden.index_select(0, order // chosen.shape[1])
        products = self.multiply(rows, counts, ops)
        by_token = torch.index_select(products, 0, order.argsort(), out=rows).view(*chosen.shape, -1)
        return torch.bmm(weights.to(hidden.dtype)[:, None], by_token).squeeze(1)

    def multiply(self, rows: torch.Tensor, counts: torch.Tensor, ops: LayerOps) -> torch.Tensor:
        """The products of `rows` `[num_rows, hidden_size]`: the first `counts[0]` of them with the first expert, ..."""
        products, first = torch.empty_like(rows), 0
        for expert, count in enumerate(counts.tolist()):
            if count:
                part = slice(first, first + count)
                gated = ops.gated(self.gate_up[expert](rows[part]), self.activation)
                products[part] = self.down[expert](gated)
                first += count
        return products

    def map_linears(self, convert: Callable[[Linear], Linear]) -> None:
        """Replace every matrix, all of a kind after the other."""
        self.gate_up = [convert(linear) for linear in self.gate_up]
        self.down = [convert(linear) for linear in self.down]

    @property
    def nbytes(self) -> int:
        return sum(linear.nbytes for linear in (*self.gate_up, *self.down))


class Mixture(Protocol):
    """What holds a layer's experts, which a backend may replace."""

    experts: Experts


@dataclass(slots=True)
class ExpertsMlp:
    """Implements `Mlp`. The weights of the chosen experts are the softmax of the router's scores.

    The softmax is of the chosen ones if it `normalizes`; otherwise of all of them, so that the sum is less than 1.
    """

    router: Linear
    experts: Experts
    top_k: int
    normalizes: bool = True
    shared: DenseMlp | None = None  # an expert of all tokens
    shared_gate: Linear | None = None  # the sigmoid of its only output is the shared expert's weight

    def __call__(self, normed: torch.Tensor, ops: LayerOps) -> torch.Tensor:
        scores = self.router(normed).float()
        best, chosen = scores.topk(self.top_k, sorted=False)
        total = best if self.normalizes else scores
        delta = self.experts(normed, chosen, (best - total.logsumexp(-1, keepdim=True)).exp_(), ops)
        if self.shared is not None:
            shared = self.shared(normed, ops)
            delta += shared if self.shared_gate is None else self.shared_gate(normed).sigmoid_() * shared
        return delta

    def linears(self) -> tuple[Linear, ...]:
        shared = () if self.shared is None else self.shared.linears()
        return self.router, *shared, *(() if self.shared_gate is None else (self.shared_gate,))

    def map_linears(self, convert: Callable[[Linear], Linear]) -> None:
        self.router = convert(self.router)
        self.experts.map_linears(convert)
        if self.shared is not None:
            self.shared.map_linears(convert)
        if self.shared_gate is not None:
            self.shared_gate = convert(self.shared_gate)

    @property
    def nbytes(self) -> int:
        return self.experts.nbytes + sum(linear.nbytes for linear in self.linears())


def stack_of(linears: Sequence[Linear]) -> torch.Tensor | None:
    """The tensor `[experts, out, in]` whose parts, in order, are the experts' matrices; None if there is none."""
    first = linears[0].weight
    for number, linear in enumerate(linears):
        if not isinstance(linear, TorchLinear) or not linear.weight.is_contiguous():
            return None
        shares = linear.weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not shares or linear.weight.storage_offset() != first.storage_offset() + number * first.numel():
            return None
    return first.as_strided((len(linears), *first.shape), (first.numel(), *first.stride()))
