"""A mixture's experts on a GPU: a product of all of them at once, whatever rows each has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from llmservice_server.backend.base import LayerOps, Linear
from llmservice_server.backend.cuda.kernels.grouped_product import grouped_product, tiles_of
from llmservice_server.backend.experts import Experts, stack_of

_Stack = tuple[torch.Tensor, torch.Tensor | None]
"""Matrices `[experts, out, in]` and biases `[experts, out]`."""


@dataclass(slots=True, kw_only=True)
class CudaExperts(Experts):
    """Never waits for the device, so that a CUDA graph can hold it."""

    gate_up_stack: _Stack
    down_stack: _Stack

    @classmethod
    def of(cls, experts: Experts) -> Self | None:
        """None if the matrices are not parts of one tensor, as quantised ones are not."""
        gate_up, down = _stack(experts.gate_up), _stack(experts.down)
        if gate_up is None or down is None:
            return None
        return cls(experts.gate_up, experts.down, experts.activation, gate_up_stack=gate_up, down_stack=down)

    def multiply(self, rows: torch.Tensor, counts: torch.Tensor, ops: LayerOps) -> torch.Tensor:
        tiles = tiles_of(counts, len(rows))
        gated = ops.gated(grouped_product(rows, tiles, *self.gate_up_stack), self.activation)
        return grouped_product(gated, tiles, *self.down_stack)


def _stack(linears: list[Linear]) -> _Stack | None:
    weights = stack_of(linears)
    if weights is None:
        return None
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return weights, torch.stack(biases) if biases else None
