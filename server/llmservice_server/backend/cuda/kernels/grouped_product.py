"""Products of rows that are sorted by expert, each with the matrix of its expert."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from llmservice_server.backend.cuda.kernels.jit import dot_dtype, jit

_OUTPUTS, _INPUTS = 64, 64
"""Of a tile."""
_FEW_ROWS, _MOST_ROWS = 16, 64


@jit
def _grouped_product(
    rows: tl.tensor,
    tiles: tl.tensor,
    weights: tl.tensor,
    bias: tl.tensor,
    product: tl.tensor,
    SIZE: tl.constexpr,  # outputs
    WIDTH: tl.constexpr,  # inputs
    HAS_BIAS: tl.constexpr,
    DOT: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
) -> None:
    tile = tiles + 3 * tl.program_id(1)
    expert, first, end = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    if first < end:
        numbers = first + tl.arange(0, ROWS)
        outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        exist = outputs < SIZE
        row = rows + numbers.to(tl.int64)[:, None] * WIDTH
        column = weights + (expert * SIZE + outputs)[:, None] * WIDTH
        sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
        for begin in range(0, WIDTH, INPUTS):
            inputs = begin + tl.arange(0, INPUTS)
            inside = inputs[None, :] < WIDTH
            states = tl.load(row + inputs[None, :], mask=(numbers[:, None] < end) & inside, other=0.0)
            matrix = tl.load(column + inputs[None, :], mask=exist[:, None] & inside, other=0.0)
            sums = tl.dot(states.to(DOT), tl.trans(matrix.to(DOT)), sums, input_precision="ieee")
        if HAS_BIAS:
            sums += tl.load(bias + expert * SIZE + outputs, mask=exist, other=0.0).to(tl.float32)[None, :]
        place = product + numbers.to(tl.int64)[:, None] * SIZE + outputs[None, :]
        tl.store(place, sums.to(product.dtype.element_ty), mask=(numbers[:, None] < end) & exist[None, :])


def tile_rows(num_rows: int, num_experts: int) -> int:
    """The rows of a tile: few, if an expert has few on average."""
    return _FEW_ROWS if num_rows <= _FEW_ROWS * num_experts else _MOST_ROWS


def tiles_of(counts: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Expert, first row and end of each tile, int32 `[tiles, 3]`; the last ones are empty.

    counts: int64 `[experts]`, the rows of each, `num_rows` together. Their number is not waited for, so that a CUDA
    graph can hold this: there are as many tiles as there may be at most.
    """
    size = tile_rows(num_rows, len(counts))
    tiles, row_ends = (counts + size - 1) // size, counts.cumsum(0)
    tile_ends = tiles.cumsum(0)
    numbers = torch.arange(num_rows // size + min(num_rows, len(counts)), device=counts.device)
    expert = torch.searchsorted(tile_ends, numbers, right=True).clamp_(max=len(counts) - 1)
    end = row_ends[expert]
    first = end - counts[expert] + (numbers - tile_ends[expert] + tiles[expert]) * size
    return torch.stack((expert, first, end), dim=1).int()


def grouped_product(
    rows: torch.Tensor, tiles: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`rows` `[num_rows, in]`, sorted by expert, times `weights` `[experts, out, in]`, plus `bias` `[experts, out]`.

    tiles: of `tiles_of`. Bytes: the matrices of the experts that have rows, once for each tile; rows once for each 64
    outputs.
    """
    num_experts, outputs, inputs = weights.shape
    product = rows.new_empty(len(rows), outputs)
    _grouped_product[triton.cdiv(outputs, _OUTPUTS), len(tiles)](
        rows,
        tiles,
        weights,
        rows if bias is None else bias,
        product,
        SIZE=outputs,
        WIDTH=inputs,
        HAS_BIAS=bias is not None,
        DOT=dot_dtype(rows.dtype),
        ROWS=tile_rows(len(rows), num_experts),
        OUTPUTS=_OUTPUTS,
        INPUTS=_INPUTS,
    )
    return product
