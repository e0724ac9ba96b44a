"""Quantised weights made dense, and activations rounded to fp8."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from llmservice_server.backend.cuda.kernels.jit import FP8, FP8_MAX, jit, padded
from llmservice_server.backend.cuda.kernels.layer_ops import row_scale
from llmservice_server.backend.cuda.kernels.products import Tiled, scaled_floats

_OUTPUTS = 64  # of a program
_ROUNDED_COLUMNS = 4096


@jit
def _dequantize(
    values: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    output_scales: tl.tensor,
    table: tl.tensor,
    dense: tl.tensor,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,  # WIDTH: one of all inputs
    GROUP_OUTPUTS: tl.constexpr,
    BITS: tl.constexpr,
    IS_FLOAT4: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_OUTPUT_SCALES: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
) -> None:
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    input = tl.program_id(1) * INPUTS  # noqa: A001
    half: tl.constexpr = INPUTS // 2
    tiles: tl.constexpr = (WIDTH + INPUTS - 1) // INPUTS
    inside = outputs < SIZE
    group = outputs // GROUP_OUTPUTS * ((WIDTH + GROUP - 1) // GROUP) + input // GROUP
    scale = tl.load(scales + group, mask=inside, other=0.0).to(tl.float32)[:, None]
    offset = tl.zeros((OUTPUTS, 1), tl.float32)
    if HAS_ZEROS:
        offset = tl.load(zeros + group, mask=inside, other=0).to(tl.float32)[:, None]
    target = dense + outputs.to(tl.int64)[:, None] * WIDTH
    if BITS == 4:
        row = values + outputs.to(tl.int64)[:, None] * (tiles * half)
        packed = tl.load(row + input // 2 + tl.arange(0, half)[None, :], mask=inside[:, None], other=0)
        places = input + tl.arange(0, half)[None, :]
        if IS_FLOAT4:
            power = scales + tl.minimum(outputs, SIZE - 1) * (WIDTH // GROUP)
            low = scaled_floats(packed & 0xF, power, input, WIDTH, GROUP, tl.float32, 0, half)
            high = scaled_floats(packed >> 4, power, input + half, WIDTH, GROUP, tl.float32, 0, half)
            scale = tl.full((OUTPUTS, 1), 1.0, tl.float32)
            if HAS_OUTPUT_SCALES:
                scale = tl.load(output_scales + outputs, mask=inside, other=0.0).to(tl.float32)[:, None]
        elif HAS_TABLE:
            low, high = tl.load(table + (packed & 0xF)), tl.load(table + (packed >> 4))
        else:
            low, high = (packed & 0xF).to(tl.float32) - 8, (packed >> 4).to(tl.float32) - 8
        tl.store(
            target + places,
            ((low - offset) * scale).to(dense.dtype.element_ty),
            mask=inside[:, None] & (places < WIDTH),
        )
        places += half
        tl.store(
            target + places,
            ((high - offset) * scale).to(dense.dtype.element_ty),
            mask=inside[:, None] & (places < WIDTH),
        )
    else:
        places = input + tl.arange(0, INPUTS)[None, :]
        mask = inside[:, None] & (places < WIDTH)
        numbers = tl.load(values + outputs.to(tl.int64)[:, None] * WIDTH + places, mask=mask, other=0.0).to(tl.float32)
        tl.store(target + places, ((numbers - offset) * scale).to(dense.dtype.element_ty), mask=mask)


def dequantized(weight: Tiled, dtype: torch.dtype) -> torch.Tensor:
    """`[out, in]` of one matrix, computed in float32. Bytes: the weight, read; the dense one, written."""
    outputs, inputs = weight.size
    assert weight.scales is not None  # noqa: S101 - of quantised weights alone
    dense = torch.empty(weight.size, dtype=dtype, device=weight.values.device)
    _dequantize[triton.cdiv(outputs, _OUTPUTS), triton.cdiv(inputs, weight.inputs)](
        weight.values,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        weight.scales if weight.output_scales is None else weight.output_scales,
        weight.scales if weight.table is None else weight.table,
        dense,
        SIZE=outputs,
        WIDTH=inputs,
        GROUP=weight.group or inputs,
        GROUP_OUTPUTS=weight.rows,
        BITS=weight.bits,
        IS_FLOAT4=weight.is_float4,
        HAS_TABLE=weight.table is not None,
        HAS_ZEROS=weight.zeros is not None,
        HAS_OUTPUT_SCALES=weight.output_scales is not None,
        OUTPUTS=_OUTPUTS,
        INPUTS=weight.inputs,
    )
    return dense


@jit
def _round_rows(
    states: tl.tensor,
    rounded: tl.tensor,
    scales: tl.tensor,
    given: tl.tensor,
    SIZE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    MAX: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    if HAS_SCALE:
        scale = tl.load(given)
    else:
        largest = tl.zeros((COLUMNS,), tl.float32)
        for begin in range(0, SIZE, COLUMNS):
            columns = begin + tl.arange(0, COLUMNS)
            part = tl.load(states + row * SIZE + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(part))
        scale = row_scale(tl.max(largest, 0), MAX)
    tl.store(scales + row, scale)
    for begin in range(0, SIZE, COLUMNS):
        columns = begin + tl.arange(0, COLUMNS)
        part = tl.load(states + row * SIZE + columns, mask=columns < SIZE, other=0.0).to(tl.float32) / scale
        number = tl.minimum(tl.maximum(part, -MAX), MAX).to(rounded.dtype.element_ty)
        tl.store(rounded + row * SIZE + columns, number, mask=columns < SIZE)


def round_rows(states: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """`states` `[num_rows, size]` divided by the scale of their row, in fp8, and these scales, float32 `[num_rows, 1]`.

    scale: of all rows; None: of each by its largest number. Bytes: one or two reads, and a write of half the size.
    """
    states = states.contiguous()
    num_rows, size = states.shape
    rounded = torch.empty(states.shape, dtype=FP8, device=states.device)
    scales = torch.empty(num_rows, 1, dtype=torch.float32, device=states.device)
    _round_rows[(num_rows,)](
        states,
        rounded,
        scales,
        scales if scale is None else scale,
        SIZE=size,
        HAS_SCALE=scale is not None,
        MAX=FP8_MAX,
        COLUMNS=min(_ROUNDED_COLUMNS, padded(size)),
        num_warps=8,
    )
    return rounded, scales
