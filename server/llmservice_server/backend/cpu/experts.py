"""The products of a mixture's experts on a CPU: two calls of compiled loops over the blocks of all chosen experts.

A loop over experts in Python starts all threads twice for each of them, and between the calls memory is idle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

from llmservice_server.backend.base import LayerOps
from llmservice_server.backend.cpu.compiled import compiled, compiled_inner, for_each
from llmservice_server.backend.cpu.decode import gate_up_columns, matrix_of
from llmservice_server.backend.cpu.linear import (
    COLUMNS,
    FAST_ROWS,
    PackedLinear,
    as_operand,
    linear_columns,
    weights_at,
)
from llmservice_server.backend.cpu.llvm import as_array
from llmservice_server.backend.experts import Experts


@dataclass(slots=True)
class CpuExperts(Experts):
    """Experts whose packed memory the kernel reads, as long as each has a few rows."""

    matrices: tuple[Any, ...] = ()

    @classmethod
    def of(cls, experts: Experts, dtype: torch.dtype) -> Self | None:
        """Of the model's `dtype`. None if the kernel cannot read their memory, or does not know their activation."""
        linears = [*experts.gate_up, *experts.down]
        for linear in linears:
            if not isinstance(linear, PackedLinear):
                return None
            linear.use_kernel()
            if linear.kernel_weights is None:
                return None
        gate_up, down = (matrix_of(each, torch.empty(0, dtype=dtype)) for each in (experts.gate_up, experts.down))
        if experts.activation != "silu" or gate_up[1][0] % 2:
            return None
        return cls(experts.gate_up, experts.down, experts.activation, (gate_up, down))

    def multiply(self, rows: torch.Tensor, counts: torch.Tensor, ops: LayerOps) -> torch.Tensor:
        chosen = counts.nonzero().squeeze(1)
        if len(rows) > FAST_ROWS * len(chosen):
            return Experts.multiply(self, rows, counts, ops)
        gate_up, down = self.matrices
        firsts = np.concatenate(([0], counts[chosen].cumsum(0).numpy()))
        gated = rows.new_empty(len(rows), gate_up[1][0] * COLUMNS // 2)
        products = torch.empty_like(rows)
        arrays = as_operand(rows), as_array(gated), as_operand(gated), as_array(products)
        _multiply_experts(chosen.numpy(), firsts, gate_up[:4], down[:4], *arrays)
        return products


@compiled(nogil=True)
def _multiply_experts(
    chosen: Any, firsts: Any, gate_up: Any, down: Any, rows: Any, gated: Any, gated_operand: Any, products: Any
) -> None:
    """Write the products of rows `firsts[i]` to `firsts[i + 1]` with the expert `chosen[i]`, for all of them.

    gate_up and down: of `matrix_of`. rows `[num_rows, in]` and gated_operand: as `multiply` takes them. gated
    `[num_rows, width]`: scratch, the memory of gated_operand.
    """
    for_each(_gated_block, len(chosen) * (gated.shape[1] // COLUMNS), (chosen, firsts, gate_up, rows, gated))
    for_each(_down_block, len(chosen) * (products.shape[1] // COLUMNS), (chosen, firsts, down, gated_operand, products))


@compiled_inner()
def _gated_block(number: int, chosen: Any, firsts: Any, matrices: Any, rows: Any, gated: Any) -> None:
    num_blocks = gated.shape[1] // COLUMNS
    place, block = number // num_blocks, number % num_blocks
    expert, part = chosen[place], slice(firsts[place], firsts[place + 1])
    addresses, shape, like, biases = matrices
    gate_up_columns(block, rows[part], weights_at(addresses[expert], shape, like), biases[expert], gated[part])


@compiled_inner()
def _down_block(number: int, chosen: Any, firsts: Any, matrices: Any, rows: Any, products: Any) -> None:
    num_blocks = products.shape[1] // COLUMNS
    place, block = number // num_blocks, number % num_blocks
    expert, part = chosen[place], slice(firsts[place], firsts[place + 1])
    addresses, shape, like, biases = matrices
    outputs = slice(block * COLUMNS, (block + 1) * COLUMNS)
    weights = weights_at(addresses[expert], shape, like)[block]
    sums = np.empty((firsts[place + 1] - firsts[place], COLUMNS), np.float32)
    linear_columns(rows[part], weights, biases[expert][outputs], sums, products[part, outputs])
