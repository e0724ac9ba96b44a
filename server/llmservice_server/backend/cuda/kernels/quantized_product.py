"""Products with quantised weights, which are dequantised tile by tile on their way to the tensor cores."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from llmservice_server.backend.cuda.kernels.jit import dot_dtype, jit_for_any
from llmservice_server.backend.quantized import QuantizedWeight

_OUTPUTS, _INPUTS, _MOST_ROWS = 64, 64, 64
"""Of a tile."""


@jit_for_any("num_rows")
def _quantized_product(
    hidden: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    bias: tl.tensor,
    product: tl.tensor,
    num_rows: tl.tensor,
    SIZE: tl.constexpr,  # outputs
    WIDTH: tl.constexpr,  # inputs
    GROUP: tl.constexpr,
    GROUP_OUTPUTS: tl.constexpr,
    BITS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DOT: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
) -> None:
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    exist = outputs < SIZE
    groups: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
    scale_row = outputs // GROUP_OUTPUTS * groups
    value_row = values + outputs.to(tl.int64)[:, None] * (WIDTH * BITS // 8)
    hidden_row = hidden + rows.to(tl.int64)[:, None] * WIDTH
    sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for begin in range(0, WIDTH, INPUTS):
        inputs = begin + tl.arange(0, INPUTS)
        mask = (rows[:, None] < num_rows) & (inputs[None, :] < WIDTH)
        states = tl.load(hidden_row + inputs[None, :], mask=mask, other=0.0)
        if BITS == 4:
            pairs = begin // 2 + tl.arange(0, INPUTS // 2)
            packed = tl.load(value_row + pairs[None, :], mask=exist[:, None] & (pairs[None, :] < WIDTH // 2), other=0)
            weights = tl.join(packed & 0xF, packed >> 4).reshape(OUTPUTS, INPUTS).to(tl.float32) - 8
        else:
            inside = exist[:, None] & (inputs[None, :] < WIDTH)
            weights = tl.load(value_row + inputs[None, :], mask=inside, other=0.0).to(tl.float32)
        if HAS_ZEROS:
            weights -= tl.load(zeros + scale_row + begin // GROUP, mask=exist, other=0).to(tl.float32)[:, None]
        weights *= tl.load(scales + scale_row + begin // GROUP, mask=exist, other=0.0).to(tl.float32)[:, None]
        rounded = weights.to(hidden.dtype.element_ty).to(DOT)
        sums = tl.dot(states.to(DOT), tl.trans(rounded), sums, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias + outputs, mask=exist, other=0.0).to(tl.float32)[None, :]
    place = product + rows.to(tl.int64)[:, None] * SIZE + outputs[None, :]
    tl.store(place, sums.to(product.dtype.element_ty), mask=(rows[:, None] < num_rows) & exist[None, :])


def can_multiply(weight: QuantizedWeight) -> bool:
    """Whether a tile's inputs have one scale for each output."""
    group = weight.group
    return group is None or group % _INPUTS == 0 or (_INPUTS % group == 0 and group >= 16)


def quantized_product(hidden: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """`hidden` `[num_rows, in]`, in the order of the weight's columns, times the dequantised weight, plus the bias.

    Weights are rounded to the dtype of `hidden`. Bytes: the weight, once for each 64 rows; `hidden` once for each 64
    outputs.
    """
    outputs, inputs = weight.shape
    product = hidden.new_empty(len(hidden), outputs)
    rows = 16 if len(hidden) <= 16 else _MOST_ROWS
    grid = (triton.cdiv(outputs, _OUTPUTS), triton.cdiv(len(hidden), rows))
    _quantized_product[grid](
        hidden.contiguous(),
        weight.values,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        hidden if bias is None else bias,
        product,
        len(hidden),
        SIZE=outputs,
        WIDTH=inputs,
        GROUP=weight.group or inputs,
        GROUP_OUTPUTS=weight.rows,
        BITS=weight.bits,
        HAS_ZEROS=weight.zeros is not None,
        HAS_BIAS=bias is not None,
        DOT=dot_dtype(hidden.dtype),
        ROWS=rows,
        OUTPUTS=_OUTPUTS,
        INPUTS=_INPUTS if weight.group is None else min(_INPUTS, weight.group),
    )
    return product
