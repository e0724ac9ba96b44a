"""A mixture of experts: each token is multiplied with the few experts that its router chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol, Self

import torch

from llmservice_server.backend.layers import Activation, DenseMlp, LayerOps, Linear
from llmservice_server.backend.torch.layer_ops import TorchLinear


class LowRankExperts(NamedTuple):
    """What a LoRA adapter adds to all experts' matrices: those of each are `up @ down`."""

    gate_up: tuple[torch.Tensor, torch.Tensor]  # down [experts, 2 * rank, in], up [experts, 2 * width, 2 * rank]
    down: tuple[torch.Tensor, torch.Tensor]  # [experts, rank, width], [experts, out, rank]

    @classmethod
    def of(cls, parts: Iterable[torch.Tensor]) -> Self:
        """Of all four in their order."""
        first, second, third, fourth = parts
        return cls((first, second), (third, fourth))


AdaptedRows = Sequence[tuple[slice, LowRankExperts | None]]
"""Successive rows, which are all of a call, with what the adapter of each adds."""


@dataclass(slots=True)
class Experts:
    """The experts' matrices, and their products in a loop over the experts, on any device.

    A backend's own implementation overrides what it computes otherwise.
    """

    gate_up: list[Linear]  # of each expert
    down: list[Linear]
    activation: Activation = "silu"
    alternates: bool = False  # a checkpoint's outputs of gate and up, where one tensor has those of all experts

    def __call__(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, ops: LayerOps
    ) -> torch.Tensor:
        """The weighted sums `[num_tokens, hidden_size]` of what the chosen experts make of `hidden`, of the same shape.

        chosen: int64 `[num_tokens, top_k]`. weights: float32, likewise.
        """
        return self.adapted(hidden, chosen, weights, ops, [(slice(len(hidden)), None)])

    def adapted(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, ops: LayerOps, rows: AdaptedRows
    ) -> torch.Tensor:
        """As a call, with what the adapters of `rows` add."""
        number = torch.empty(len(hidden), 1, dtype=chosen.dtype, device=chosen.device)
        for place, (part, _) in enumerate(rows):
            number[part] = place
        order = chosen.flatten().argsort(stable=True)
        kinds = (chosen * len(rows) + number).flatten()
        counts = torch.bincount(kinds, minlength=len(self.gate_up) * len(rows)).view(-1, len(rows))
        states = hidden.index_select(0, order // chosen.shape[1])
        products = self.multiply(states, counts, ops, rows)
        by_token = torch.index_select(products, 0, order.argsort(), out=states).view(*chosen.shape, -1)
        return torch.bmm(weights.to(hidden.dtype)[:, None], by_token).squeeze(1)

    def multiply(self, states: torch.Tensor, counts: torch.Tensor, ops: LayerOps, rows: AdaptedRows) -> torch.Tensor:
        """The products of `states` `[num_states, hidden_size]`, sorted by expert and, of an expert, by their `rows`.

        counts: int64 `[experts, len(rows)]`, of both.
        """
        products, first = torch.empty_like(states), 0
        for expert, of_expert in enumerate(counts.tolist()):
            ends = [*accumulate(of_expert, initial=0)]
            if ends[-1]:
                part = slice(first, first + ends[-1])
                changes = [(slice(*ends[at : at + 2]), change) for at, (_, change) in enumerate(rows)]
                products[part] = self._multiply_one(expert, states[part], ops, changes)
                first = part.stop
        return products

    def _multiply_one(self, expert: int, states: torch.Tensor, ops: LayerOps, rows: AdaptedRows) -> torch.Tensor:
        gate_up = self.gate_up[expert](states)
        for part, change in rows:
            if change is not None:
                gate_up[part] += _low_rank(states[part], *change.gate_up, expert)
        gated = ops.gated(gate_up, self.activation)
        product = self.down[expert](gated)
        for part, change in rows:
            if change is not None:
                product[part] += _low_rank(gated[part], *change.down, expert)
        return product

    def map_linears(self, convert: Callable[[Linear], Linear]) -> None:
        """Replace every matrix, all of a kind after the other."""
        self.gate_up = [convert(linear) for linear in self.gate_up]
        self.down = [convert(linear) for linear in self.down]

    @property
    def nbytes(self) -> int:
        return sum(linear.nbytes for linear in (*self.gate_up, *self.down))


def _low_rank(states: torch.Tensor, down: torch.Tensor, up: torch.Tensor, expert: int) -> torch.Tensor:
    return states @ down[expert].t() @ up[expert].t()


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
