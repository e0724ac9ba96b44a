"""A mixture's experts on a GPU: a product of all of them at once, whatever rows each has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from llmservice_server.backend.cuda.kernels.one_token import experts_of_one_token
from llmservice_server.backend.cuda.kernels.products import Tiled, can_multiply, grouped_product
from llmservice_server.backend.cuda.kernels.routing import Routing, combine, route
from llmservice_server.backend.experts import AdaptedRows, Experts, stack_of
from llmservice_server.backend.layers import LayerOps, Linear
from llmservice_server.backend.quantized import QuantizedLinear, QuantizedWeight
from llmservice_server.backend.torch.layer_ops import TorchLinear

_FEW_ROWS, _MANY_ROWS = 16, 128
"""Of an expert, on average."""
_ADAPTED_TOKENS = 512
"""Of an adapter at a time: what it adds is memory that is not reserved."""


def tile_rows(average: float) -> int:
    """Rows of a tile; more than the average, as an expert's second tile reads its weights again."""
    return 16 if average <= _FEW_ROWS else 64 if average < _MANY_ROWS else 128


@dataclass(frozen=True, slots=True)
class _Stack:
    """The matrices `[experts, out, in]` and biases `[experts, out]` of all experts."""

    weights: Tiled
    biases: torch.Tensor | None

    @classmethod
    def of(cls, linears: Sequence[Linear]) -> Self | None:
        """None if dense matrices are not parts of one tensor, or quantised ones not of one format, or of another."""
        quantized = [linear.quantized for linear in linears if isinstance(linear, QuantizedLinear)]
        if len(quantized) == len(linears):
            if (
                len({*map(_format_of, quantized)}) > 1
                or not can_multiply(quantized[0])
                or quantized[0].order is not None
            ):
                return None
            weights = Tiled.of(quantized)
        elif (stack := stack_of(linears)) is not None:
            weights = Tiled.dense(stack)
        else:
            return None
        biases = [linear.bias for linear in linears if linear.bias is not None]
        return cls(weights, torch.stack(biases) if biases else None)

    def views(self) -> list[Linear]:
        return [TorchLinear(values) for values in self.weights.values]

    @property
    def is_dense(self) -> bool:
        """Without biases either."""
        return self.weights.scales is None and self.biases is None

    @property
    def nbytes(self) -> int:
        return self.weights.nbytes + (0 if self.biases is None else self.biases.nbytes)


@dataclass(slots=True, kw_only=True)
class CudaExperts(Experts):
    """Never waits for the device, so that a CUDA graph can hold it. `gate_up` and `down` are views of the stacks."""

    stacks: tuple[_Stack, _Stack]

    @classmethod
    def of(cls, experts: Experts) -> Self | None:
        """None if a stack cannot be made of the matrices."""
        gate_up, down = _Stack.of(experts.gate_up), _Stack.of(experts.down)
        if gate_up is None or down is None:
            return None
        return cls(gate_up.views(), down.views(), experts.activation, experts.alternates, stacks=(gate_up, down))

    def __call__(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, ops: LayerOps
    ) -> torch.Tensor:
        gate_up, down = self.stacks
        if len(hidden) == 1 and self.activation == "silu" and gate_up.is_dense and down.is_dense:
            matrices = gate_up.weights.values, down.weights.values
            return experts_of_one_token(hidden.contiguous(), chosen.contiguous(), weights.contiguous(), *matrices)
        return self.adapted(hidden, chosen, weights, ops, ())

    def adapted(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, ops: LayerOps, rows: AdaptedRows
    ) -> torch.Tensor:
        """Implements `Experts.adapted`: rows of an adapter are sorted by expert again, apart from the others."""
        gate_up, down = self.stacks
        routing = self._routed(chosen)
        changes = [
            (part, own, _places_in(routing, own, part.start), change)
            for all_rows, change in rows
            if change is not None
            for part in _parts(all_rows)
            for own in [self._routed(chosen[part])]
        ]
        products = grouped_product(hidden, routing, gate_up.weights, gate_up.biases, of_tokens=True)
        for part, own, places, change in changes:
            products.index_add_(0, places, _low_rank(hidden[part], own, change.gate_up, of_tokens=True))
        gated = ops.gated(products, self.activation)
        products = grouped_product(gated, routing, down.weights, down.biases, of_tokens=False)
        for _, own, places, change in changes:
            products.index_add_(0, places, _low_rank(gated[places], own, change.down, of_tokens=False))
        return combine(products, routing, weights)

    def _routed(self, chosen: torch.Tensor) -> Routing:
        count = len(self.gate_up)
        return route(chosen, count, tile_rows(chosen.numel() / count))

    @property
    def nbytes(self) -> int:
        return sum(stack.nbytes for stack in self.stacks)


def _parts(rows: slice) -> Iterator[slice]:
    for first in range(rows.start, rows.stop, _ADAPTED_TOKENS):
        yield slice(first, min(first + _ADAPTED_TOKENS, rows.stop))


def _places_in(routing: Routing, own: Routing, first: int) -> torch.Tensor:
    """The row of `routing` of each row of `own`, which is of tokens from `first` on."""
    pairs = torch.arange(own.num_pairs, device=own.tiles.device) if own.sources is None else own.sources
    pairs = pairs + first * own.experts_of_a_token
    return pairs if routing.places is None else routing.places[pairs]


def _low_rank(
    states: torch.Tensor, routing: Routing, factors: tuple[torch.Tensor, torch.Tensor], *, of_tokens: bool
) -> torch.Tensor:
    down, up = map(Tiled.dense, factors)
    return grouped_product(
        grouped_product(states, routing, down, None, of_tokens=of_tokens), routing, up, None, of_tokens=False
    )


def _format_of(weight: QuantizedWeight) -> tuple[object, ...]:
    parts = weight.values, weight.scales, weight.zeros, weight.order, weight.output_scales, weight.table
    return weight.group, weight.rows, *((part.shape, part.dtype) for part in parts if part is not None)
