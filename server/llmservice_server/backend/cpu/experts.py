"""A mixture's experts on a CPU: one compiled call sorts tokens by expert, and computes blocks of all chosen experts.

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
from llmservice_server.backend.cpu.llvm import as_array, from_float32, to_float32
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

    def __call__(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, ops: LayerOps
    ) -> torch.Tensor:
        if chosen.numel() > FAST_ROWS * len(self.down):
            return Experts.__call__(self, hidden, chosen, weights, ops)
        gate_up, down = self.matrices
        rows, products = (hidden.new_empty(chosen.numel(), hidden.shape[1]) for _ in range(2))
        gated = hidden.new_empty(chosen.numel(), gate_up[1][0] * COLUMNS // 2)
        sums = hidden.new_empty(hidden.shape)
        arrays = as_array(hidden), chosen.numpy(), weights.numpy(), gate_up[:4], down[:4]
        scratch = as_array(rows), as_operand(rows), as_array(gated), as_operand(gated), as_array(products)
        _compute(*arrays, scratch, as_array(sums))
        return sums


@compiled(nogil=True)
def _compute(hidden: Any, chosen: Any, weights: Any, gate_up: Any, down: Any, scratch: Any, sums: Any) -> None:
    """Write `Experts.__call__`'s result to `sums`. gate_up and down: of `matrix_of`.

    scratch, with a row for each chosen expert of a token: `rows` `[num_rows, hidden_size]` and `gated` `[num_rows,
    width]`, both also as `multiply` takes them; and `products`, of the shape of rows.
    """
    rows, rows_operand, gated, gated_operand, products = scratch
    firsts = np.zeros(len(gate_up[0]) + 1, np.int64)
    places = np.empty(chosen.shape, np.int64)
    for token in range(chosen.shape[0]):
        for place in range(chosen.shape[1]):
            expert = chosen[token, place]
            places[token, place] = firsts[expert + 1]
            firsts[expert + 1] += 1
    active = np.empty(len(gate_up[0]), np.int64)
    num_active = 0
    for expert in range(len(gate_up[0])):
        if firsts[expert + 1]:
            active[num_active] = expert
            num_active += 1
        firsts[expert + 1] += firsts[expert]
    for_each(_gather, len(hidden), (hidden, chosen, firsts, places, rows))
    blocks = num_active * (gated.shape[1] // COLUMNS)
    for_each(_gated_block, blocks, (active, firsts, gate_up, rows_operand, gated))
    blocks = num_active * (products.shape[1] // COLUMNS)
    for_each(_down_block, blocks, (active, firsts, down, gated_operand, products))
    for_each(_add_up, len(hidden), (products, places, weights, sums))


@compiled_inner()
def _gather(token: int, hidden: Any, chosen: Any, firsts: Any, places: Any, rows: Any) -> None:
    """Copy a token to the rows of its experts. `places`: within the expert's rows; then within all."""
    for place in range(chosen.shape[1]):
        row = places[token, place] + firsts[chosen[token, place]]
        places[token, place] = row
        for index in range(hidden.shape[1]):
            rows[row, index] = hidden[token, index]


@compiled_inner()
def _gated_block(number: int, active: Any, firsts: Any, matrices: Any, rows: Any, gated: Any) -> None:
    num_blocks = gated.shape[1] // COLUMNS
    expert, block = active[number // num_blocks], number % num_blocks
    part = slice(firsts[expert], firsts[expert + 1])
    addresses, shape, like, biases = matrices
    gate_up_columns(block, rows[part], weights_at(addresses[expert], shape, like), biases[expert], gated[part])


@compiled_inner()
def _down_block(number: int, active: Any, firsts: Any, matrices: Any, rows: Any, products: Any) -> None:
    num_blocks = products.shape[1] // COLUMNS
    expert, block = active[number // num_blocks], number % num_blocks
    part = slice(firsts[expert], firsts[expert + 1])
    addresses, shape, like, biases = matrices
    outputs = slice(block * COLUMNS, (block + 1) * COLUMNS)
    weights = weights_at(addresses[expert], shape, like)[block]
    sums = np.empty((firsts[expert + 1] - firsts[expert], COLUMNS), np.float32)
    linear_columns(rows[part], weights, biases[expert][outputs], sums, products[part, outputs])


@compiled_inner()
def _add_up(token: int, products: Any, places: Any, weights: Any, sums: Any) -> None:
    totals = np.zeros(sums.shape[1], np.float32)
    for place in range(weights.shape[1]):
        row, weight = products[places[token, place]], weights[token, place]
        for index in range(len(totals)):
            totals[index] += weight * to_float32(row[index])
    for index in range(len(totals)):
        sums[token, index] = from_float32(totals[index], sums[token, index])
