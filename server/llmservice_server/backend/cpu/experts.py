"""A mixture's experts on a CPU: one compiled call sorts tokens by expert, and computes blocks of all chosen experts.

A loop over experts in Python starts all threads twice for each of them, and between the calls memory is idle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

from llmservice_server.backend.cpu.compiled import compiled, compiled_inner, for_each
from llmservice_server.backend.cpu.decode import columns, gated_columns, kind_of, matrix_of, prepare, rows_of
from llmservice_server.backend.cpu.layer_ops import ACTIVATIONS
from llmservice_server.backend.cpu.linear import FAST_ROWS, PackedLinear
from llmservice_server.backend.cpu.linear_kernels import COLUMNS
from llmservice_server.backend.cpu.llvm import as_array, from_float32, to_float32
from llmservice_server.backend.cpu.tiles import TILE_ROWS
from llmservice_server.backend.experts import Experts
from llmservice_server.backend.layers import LayerOps, Linear


@dataclass(slots=True)
class CpuExperts(Experts):
    """Experts whose packed memory the kernel reads, as long as each has a few rows."""

    matrices: tuple[Any, ...] = ()
    width: int = 0  # of what is gated

    @classmethod
    def of(cls, experts: Experts, dtype: torch.dtype) -> Self | None:
        """Of the model's `dtype`. None if the kernel cannot read their memory."""
        linears = [*experts.gate_up, *experts.down]
        for linear in linears:
            if isinstance(linear, PackedLinear):
                linear.use_kernel()
        if any(kind_of(each[0]) is None or len({*map(kind_of, each)}) > 1 for each in (experts.gate_up, experts.down)):
            return None
        if dtype == torch.float16:
            return None
        absent = torch.empty(0, dtype=dtype)
        gate_up, down = (matrix_of(each, absent) for each in (experts.gate_up, experts.down))
        num_blocks = next(each for each in gate_up if each is not None)[1][0]
        if num_blocks % 2:
            return None
        parts = experts.gate_up, experts.down, experts.activation, experts.alternates
        return cls(*parts, (gate_up, down), num_blocks // 2 * COLUMNS)

    def __call__(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, ops: LayerOps
    ) -> torch.Tensor:
        if chosen.numel() > FAST_ROWS * len(self.down) and isinstance(self.down[0], PackedLinear):
            return Experts.__call__(self, hidden, chosen, weights, ops)

        def rows(width: int, linear: Linear) -> Any:
            padding = 2 * TILE_ROWS if isinstance(linear, PackedLinear) else 0  # rows of a tile apart in the cache
            return rows_of(hidden.new_empty(chosen.numel(), width + padding), linear)

        sums = hidden.new_empty(hidden.shape)
        firsts = np.zeros(len(self.down) + 1, np.int64)
        scratch = rows(hidden.shape[1], self.gate_up[0]), rows(self.width, self.down[0]), firsts
        arrays, activation = (as_array(hidden), chosen.numpy(), weights.numpy()), ACTIVATIONS.index(self.activation)
        gate_up, down = self.matrices
        _compute(*arrays, gate_up, down, activation, scratch, as_array(sums))
        return sums


@compiled(nogil=True)
def _compute(
    hidden: Any, chosen: Any, weights: Any, gate_up: Any, down: Any, activation: int, scratch: Any, sums: Any
) -> None:
    """Write `Experts.__call__`'s result to `sums`. gate_up and down: of `matrix_of`. activation: of `ACTIVATIONS`.

    scratch, with a row for each chosen expert of a token: `rows` `[num_rows, at least hidden_size]` and `gated`
    `[num_rows, at least width]`, both of `rows_of`; and zeros, one more than there are experts.
    """
    rows, gated, firsts = scratch
    products = rows[0]  # the same memory, once they are multiplied
    places = np.empty(chosen.shape, np.int64)
    for token in range(chosen.shape[0]):
        for place in range(chosen.shape[1]):
            expert = chosen[token, place]
            places[token, place] = firsts[expert + 1]
            firsts[expert + 1] += 1
    active = np.empty(len(firsts), np.int64)
    num_active = 0
    for expert in range(len(firsts) - 1):
        if firsts[expert + 1]:
            active[num_active] = expert
            num_active += 1
        firsts[expert + 1] += firsts[expert]
    sorting = active, firsts
    for_each(_gather, len(hidden), (hidden, chosen, firsts, places, rows[0]))
    prepare(rows, gate_up[1], gate_up[2])
    blocks = num_active * (gated[0].shape[1] // COLUMNS)
    for_each(_gated_block, blocks, (sorting, rows, gate_up[0], gate_up[1], gate_up[2], activation, gated[0]))
    prepare(gated, down[1], down[2])
    blocks = num_active * (products.shape[1] // COLUMNS)
    for_each(_down_block, blocks, (sorting, gated, down[0], down[1], down[2], products))
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
def _gated_block(
    number: int, sorting: Any, rows: Any, dense: Any, scaled: Any, grouped: Any, activation: int, gated: Any
) -> None:
    expert, block, part = _place_of(number, sorting, gated.shape[1] // COLUMNS)
    of_expert = rows[0][part], rows[1][part], rows[2][part]
    gated_columns(block, expert, of_expert, dense, scaled, grouped, activation, gated[part])


@compiled_inner()
def _down_block(number: int, sorting: Any, rows: Any, dense: Any, scaled: Any, grouped: Any, products: Any) -> None:
    expert, block, part = _place_of(number, sorting, products.shape[1] // COLUMNS)
    of_expert = rows[0][part], rows[1][part], rows[2][part]
    columns(block, expert, of_expert, dense, scaled, grouped, block * COLUMNS, products[part])


@compiled_inner()
def _place_of(number: int, sorting: Any, num_blocks: int) -> Any:
    """The expert, the block of its columns, and its rows."""
    active, firsts = sorting
    expert = active[number // num_blocks]
    return expert, number % num_blocks, slice(firsts[expert], firsts[expert + 1])


@compiled_inner(owns_arrays=True)
def _add_up(token: int, products: Any, places: Any, weights: Any, sums: Any) -> None:
    totals = np.zeros(sums.shape[1], np.float32)
    for place in range(weights.shape[1]):
        row, weight = products[places[token, place]], weights[token, place]
        for index in range(len(totals)):
            totals[index] += weight * to_float32(row[index])
    for index in range(len(totals)):
        sums[token, index] = from_float32(totals[index], sums[token, index])
