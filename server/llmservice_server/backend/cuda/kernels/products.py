"""Products of few rows with dense or quantised weights, of one matrix or of a matrix for each of some experts.

Such a product takes as long as its weights take to be read. A tile of weights is the first operand, so that the tensor
cores take 64 outputs at once, however few rows there are. Quantised numbers are multiplied as the integers, or 8-bit
floats, that they are, which is exact in 16 bits; the sums of a group are scaled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
import triton
import triton.language as tl

from llmservice_server.backend.cuda.kernels.jit import (
    dot_dtype,
    jit,
    jit_for_any,
    num_processors,
)
from llmservice_server.backend.cuda.kernels.routing import Routing
from llmservice_server.backend.quantized import QuantizedWeight

_OUTPUTS, _MOST_INPUTS = 64, 128
"""Of a tile."""
_LEAST_INPUTS = {4: 32, 8: 16}
"""By bits: the least that a product of tiles takes; two products share the inputs of a tile of 4 bits."""
_ADDED = {tl.bfloat16: 128, tl.float16: 1024}
"""As of `_nibbles`."""
_MOST_SPLITS = 8
_ADDED_COLUMNS = 1024


@dataclass(frozen=True, slots=True)
class Tiled:
    """Matrices `[experts, out, in]`, or one of them, as the kernels read them."""

    values: torch.Tensor
    """`[experts, out, in]`; of 4 bits uint8 `[experts, out, in / 2]`: of each tile of inputs, a byte has a number of
    the first half, lowest, and one of the second, each plus 8."""
    size: tuple[int, int]  # outputs, inputs
    bits: int  # 4, 8, or more: dense
    inputs: int  # of a tile, at most
    scales: torch.Tensor | None = None  # as of `QuantizedWeight`, of each expert
    zeros: torch.Tensor | None = None
    output_scales: torch.Tensor | None = None  # float64 `[experts, out, 1]`
    table: torch.Tensor | None = None  # as of `QuantizedWeight`, of all experts
    rows: int = 1
    group: int | None = None
    is_float4: bool = False
    """Scales are those of `kernel_scales`."""

    @property
    def nbytes(self) -> int:
        parts = self.values, self.scales, self.zeros, self.output_scales
        return sum(part.nbytes for part in parts if part is not None)

    @classmethod
    def dense(cls, values: torch.Tensor) -> Self:
        """`[experts, out, in]`."""
        return cls(values, (values.shape[1], values.shape[2]), 8 * values.itemsize, _tile_inputs(None))

    @classmethod
    def of(cls, weights: Sequence[QuantizedWeight]) -> Self:
        """Of weights for which `can_multiply`, all of one format."""
        first = weights[0]
        tile = _float4_inputs(first.shape[1]) if first.is_float4 else _tile_inputs(first.group)
        values = [each.values if first.bits == 8 else _by_half(each.values, tile) for each in weights]
        zeros = [each.zeros for each in weights if each.zeros is not None]
        output_scales = [each.output_scales for each in weights if each.output_scales is not None]
        return cls(
            _stacked(values),
            first.shape,
            first.bits,
            tile,
            _stacked([each.kernel_scales for each in weights]),
            _stacked(zeros) if zeros else None,
            _stacked(output_scales) if output_scales else None,
            first.table,
            first.rows,
            first.group,
            first.is_float4,
        )


def _stacked(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """A view of a single one."""
    return parts[0][None].contiguous() if len(parts) == 1 else torch.stack(list(parts))


def _tile_inputs(group: int | None) -> int:
    """The largest power of 2 that divides a group."""
    return _MOST_INPUTS if group is None else min(_MOST_INPUTS, group & -group)


def _float4_inputs(inputs: int) -> int:
    """Of a tile, whose groups' scales the numbers are multiplied with; what fills the last tile is memory."""
    return _MOST_INPUTS if inputs % _MOST_INPUTS == 0 else _MOST_INPUTS // 2


def _by_half(values: torch.Tensor, tile: int) -> torch.Tensor:
    """4 bits, of which a byte has two of neighbouring inputs, in the order of `Tiled`."""
    outputs, width = values.shape
    if rest := -2 * width % tile:
        values = torch.nn.functional.pad(values, (0, rest // 2))
    numbers = torch.stack((values & 0xF, values >> 4), dim=-1).view(outputs, -1, 2, tile // 2)
    return (numbers[:, :, 0] | numbers[:, :, 1] << 4).view(outputs, -1)


def can_multiply(weight: QuantizedWeight) -> bool:
    """Whether a tile's inputs have one scale for each output; floats of 4 bits are multiplied with several."""
    if weight.is_float4:
        return weight.group is not None and weight.shape[1] % weight.group == 0
    return _tile_inputs(weight.group) >= _LEAST_INPUTS[weight.bits]


@jit
def _add_tile(
    sums: tl.tensor,  # [OUTPUTS, ROWS]
    value: tl.tensor,  # [OUTPUTS, 1] of each output's first number, or byte
    power: tl.tensor,  # [OUTPUTS] of each output's first scale, of floats of 4 bits
    state: tl.tensor,  # [1, ROWS] of each row's first number
    exists: tl.tensor,  # [ROWS]
    zero: tl.tensor,  # [OUTPUTS]
    table: tl.tensor,
    number: tl.tensor,  # of the tile of inputs
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    IS_FLOAT4: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    DOT: tl.constexpr,
    ADDED: tl.constexpr,  # as of `_nibbles`
    INPUTS: tl.constexpr,
) -> tl.tensor:
    """The sums with the products of a tile of inputs, which are not scaled."""
    half: tl.constexpr = INPUTS // 2
    if BITS == 4:
        packed = tl.load(value + number * half + tl.arange(0, half)[None, :])
        if IS_FLOAT4:
            first = number * INPUTS
            low = scaled_floats(packed & 0xF, power, first, WIDTH, GROUP, DOT, ADDED, half)
            high = scaled_floats(packed >> 4, power, first + half, WIDTH, GROUP, DOT, ADDED, half)
        elif HAS_TABLE:
            low, high = tl.load(table + (packed & 0xF)).to(DOT), tl.load(table + (packed >> 4)).to(DOT)
        else:
            offset = (zero + (8 + ADDED)).to(DOT)[:, None]
            low, high = _nibbles(packed & 0xF, DOT, ADDED) - offset, _nibbles(packed >> 4, DOT, ADDED) - offset
        places = number * INPUTS + tl.arange(0, half)[:, None]
        left = tl.load(state + places, mask=exists[None, :] & (places < WIDTH), other=0.0).to(DOT)
        right = tl.load(state + half + places, mask=exists[None, :] & (places + half < WIDTH), other=0.0).to(DOT)
        sums = tl.dot(low, left, sums, input_precision="ieee")
        return tl.dot(high, right, sums, input_precision="ieee")
    places = number * INPUTS + tl.arange(0, INPUTS)
    matrix = tl.load(value + places[None, :], mask=(places < WIDTH)[None, :], other=0.0)
    if BITS == 8:
        matrix = matrix.to(tl.float32)
        if HAS_ZEROS:
            matrix -= zero[:, None]
    states = tl.load(state + places[:, None], mask=exists[None, :] & (places < WIDTH)[:, None], other=0.0)
    return tl.dot(matrix.to(DOT), states.to(DOT), sums, input_precision="ieee")


@jit
def _nibbles(bits: tl.tensor, DOT: tl.constexpr, ADDED: tl.constexpr) -> tl.tensor:
    """Numbers of 4 bits plus ADDED, whose bits are those of a 16-bit float's mantissa: a conversion is slow."""
    if ADDED == 128:
        numbers = (bits.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True)
    elif ADDED == 1024:
        numbers = (bits.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True)
    else:
        numbers = bits.to(DOT)
    return numbers


@jit
def scaled_floats(
    bits: tl.tensor,  # [outputs, COLUMNS] of 4 bits
    power: tl.tensor,  # [outputs] of each output's first scale
    first: tl.tensor,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    DTYPE: tl.constexpr,
    ADDED: tl.constexpr,  # as of `_nibbles`
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """The numbers of mxfp4 or NVFP4 from the input `first` on, which are exact in bfloat16.

    The bits of a float of 4 bits (e2m1), and of 8, are those of a larger one, but for what is added to exponents.
    """
    groups: tl.constexpr = COLUMNS // GROUP
    each = first // GROUP + tl.arange(0, groups)[None, :]
    scales = tl.load(power[:, None] + each, mask=each < WIDTH // GROUP, other=0)
    is_power: tl.constexpr = scales.dtype == tl.uint8
    places: tl.constexpr = 7 if is_power else 4
    factor: tl.constexpr = 2.0**126 if is_power else 2.0**123
    more: tl.constexpr = 1.0 if is_power else 2.0**123
    scaling = scales.to(tl.uint16) << places  # where bfloat16 has them
    numbers = bits.to(tl.uint16) * 0x1040 & 0x81C0  # likewise the sign, and exponent and mantissa
    if ADDED == 128:
        scale, floats = scaling.to(DTYPE, bitcast=True), numbers.to(DTYPE, bitcast=True)
    else:
        scale = (scaling.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
        floats = (numbers.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    by_group = tl.reshape(floats * factor, (bits.shape[0], groups, GROUP)) * (scale * more)[:, :, None]
    return tl.reshape(by_group, (bits.shape[0], COLUMNS)).to(DTYPE)


@jit
def _find_rows(
    tiles: tl.tensor, num_rows: tl.tensor, IS_GROUPED: tl.constexpr, ONE_TOKEN: tl.constexpr, ROWS: tl.constexpr
) -> tl.tensor:
    """The expert of a program, its first row, and the end of the rows."""
    if ONE_TOKEN:
        first = tl.program_id(1)
        expert, end = tl.load(tiles + first).to(tl.int64), first + 1
    elif IS_GROUPED:
        tile = tiles + 3 * tl.program_id(1)
        expert, first, end = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    else:
        expert, first, end = tl.full((), 0, tl.int64), tl.program_id(1) * ROWS, num_rows
    return expert, first, end


@jit_for_any("num_rows")
def _product(
    states: tl.tensor,
    sources: tl.tensor,
    tiles: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    output_scales: tl.tensor,
    table: tl.tensor,
    bias: tl.tensor,
    row_scales: tl.tensor,
    product: tl.tensor,
    num_rows: tl.tensor,
    SIZE: tl.constexpr,  # outputs
    WIDTH: tl.constexpr,  # inputs
    GROUP: tl.constexpr,  # WIDTH: one of all inputs
    GROUP_OUTPUTS: tl.constexpr,
    BITS: tl.constexpr,
    IS_FLOAT4: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_OUTPUT_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ROW_SCALES: tl.constexpr,
    EXPERTS_OF_A_TOKEN: tl.constexpr,  # 0: rows are read in their order
    IS_GROUPED: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
    SPLITS: tl.constexpr,
    DOT: tl.constexpr,
    ADDED: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
) -> None:
    expert, first, end = _find_rows(tiles, num_rows, IS_GROUPED, ONE_TOKEN, ROWS)
    if first >= end:
        return
    numbers = first + tl.arange(0, ROWS)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    exists, output = numbers < end, tl.minimum(outputs, SIZE - 1)  # the last again, instead of a mask
    row = numbers
    if EXPERTS_OF_A_TOKEN > 0 and ONE_TOKEN:
        row = numbers * 0
    elif EXPERTS_OF_A_TOKEN > 0:
        row = tl.load(sources + numbers, mask=exists, other=0) // EXPERTS_OF_A_TOKEN
    state = states + row.to(tl.int64)[None, :] * WIDTH
    num_tiles: tl.constexpr = (WIDTH + INPUTS - 1) // INPUTS
    row_size: tl.constexpr = num_tiles * (INPUTS // 2) if BITS == 4 else WIDTH
    value = values + (expert * SIZE + output)[:, None] * row_size
    scale_rows: tl.constexpr = (SIZE + GROUP_OUTPUTS - 1) // GROUP_OUTPUTS
    scale_row = (expert * scale_rows + output // GROUP_OUTPUTS) * ((WIDTH + GROUP - 1) // GROUP)
    each: tl.constexpr = (num_tiles + SPLITS - 1) // SPLITS
    begin = tl.program_id(2) * each
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    zero = tl.zeros((OUTPUTS,), tl.float32)
    for number in range(begin, tl.minimum(begin + each, num_tiles)):
        group = scale_row + number * INPUTS // GROUP
        if HAS_ZEROS:
            zero = tl.load(zeros + group).to(tl.float32)
        if GROUP < WIDTH and not IS_FLOAT4:
            part = tl.zeros((OUTPUTS, ROWS), tl.float32)
            part = _add_tile(
                part, value, scales, state, exists, zero, table, number,
                WIDTH, GROUP, BITS, IS_FLOAT4, HAS_TABLE, HAS_ZEROS, DOT, ADDED, INPUTS,
            )  # fmt: skip
            sums += part * tl.load(scales + group).to(tl.float32)[:, None]
        else:
            sums = _add_tile(
                sums, value, scales + scale_row, state, exists, zero, table, number,
                WIDTH, GROUP, BITS, IS_FLOAT4, HAS_TABLE, HAS_ZEROS, DOT, ADDED, INPUTS,
            )  # fmt: skip
    if HAS_SCALES and GROUP == WIDTH and not IS_FLOAT4:
        sums *= tl.load(scales + scale_row).to(tl.float32)[:, None]
    if HAS_OUTPUT_SCALES:
        sums *= tl.load(output_scales + expert * SIZE + output).to(tl.float32)[:, None]
    if HAS_ROW_SCALES:
        sums *= tl.load(row_scales + row, mask=exists, other=0.0)[None, :]
    if HAS_BIAS:
        sums += tl.load(bias + expert * SIZE + output).to(tl.float32)[:, None]
    place = product + (tl.program_id(2).to(tl.int64) * num_rows + numbers)[None, :] * SIZE + outputs[:, None]
    mask = exists[None, :] & (outputs < SIZE)[:, None]
    tl.store(place, sums.to(product.dtype.element_ty), mask=mask)


@jit_for_any("num_rows")
def _add_parts(
    parts: tl.tensor,
    bias: tl.tensor,
    product: tl.tensor,
    num_rows: tl.tensor,
    SIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < SIZE
    sums = tl.zeros((COLUMNS,), tl.float32)
    for part in tl.static_range(SPLITS):
        sums += tl.load(parts + (part * num_rows + row) * SIZE + columns, mask=mask, other=0.0)
    if HAS_BIAS:
        sums += tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(product + row * SIZE + columns, sums.to(product.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class _Launch:
    """The tile of a program, and how it is compiled: the fastest of those measured on an H200."""

    rows: int
    outputs: int = _OUTPUTS
    num_warps: int = 4
    num_stages: int = 3
    splits: int = 1  # of the inputs

    @classmethod
    def of(cls, num_rows: int, weight: Tiled, device: torch.device) -> Self:
        """Of one matrix. Inputs are split so that all processors read weights; a part has at least four tiles."""
        launch = cls.of_tile(16 if num_rows <= 16 else 32 if num_rows <= 32 else 64, weight)
        programs = triton.cdiv(weight.size[0], launch.outputs) * triton.cdiv(num_rows, launch.rows)
        wanted = (4 if launch.rows == 16 else 2) * num_processors(device) // programs
        splits = max(1, min(wanted, triton.cdiv(weight.size[1], 4 * weight.inputs), _MOST_SPLITS))
        return replace(launch, splits=splits)

    @classmethod
    def of_tile(cls, rows: int, weight: Tiled) -> Self:
        if weight.bits > 8:
            return cls(rows, outputs=128, num_warps=8 if rows > 64 else 4)
        return cls(rows, num_warps=2, num_stages=4) if weight.bits == 8 and rows == 16 else cls(rows)


def quantized_product(
    hidden: torch.Tensor,
    weight: Tiled,
    bias: torch.Tensor | None,
    row_scales: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`hidden` `[num_rows, in]`, in the order of the weight's columns, times the dequantised weight, plus the bias.

    `hidden` may be in fp8, with the scales of its rows, float32 `[num_rows, 1]`, and the product's `dtype`.
    Bytes: the weight, once for each 64 rows; `hidden` once for each 64 outputs.
    """
    outputs, num_rows = weight.size[0], len(hidden)
    launch = _Launch.of(num_rows, weight, hidden.device)
    product = hidden.new_empty((num_rows, outputs), dtype=dtype or hidden.dtype)
    if launch.splits == 1:
        _multiply(hidden.contiguous(), None, weight, bias, product, launch, row_scales)
        return product
    parts = hidden.new_empty((launch.splits, num_rows, outputs), dtype=torch.float32)
    _multiply(hidden.contiguous(), None, weight, None, parts, launch, row_scales, product.dtype)
    _add_parts[triton.cdiv(outputs, _ADDED_COLUMNS), num_rows](
        parts,
        product if bias is None else bias,
        product,
        num_rows,
        SIZE=outputs,
        HAS_BIAS=bias is not None,
        SPLITS=launch.splits,
        COLUMNS=_ADDED_COLUMNS,
    )
    return product


def grouped_product(
    states: torch.Tensor, routing: Routing, weights: Tiled, bias: torch.Tensor | None, *, of_tokens: bool
) -> torch.Tensor:
    """Rows that are sorted by expert, each times the matrix of its expert, plus `bias` `[experts, out]`.

    states: `[num_rows, in]`, sorted; `of_tokens`: `[num_tokens, in]`, of which each is read for each of its experts.
    Bytes: the matrices of the experts that have rows, once for each tile of rows; rows once for each tile of outputs.
    """
    product = states.new_empty(routing.num_pairs, weights.size[0])
    launch = _Launch.of_tile(routing.tile_rows, weights)
    of_token = routing.experts_of_a_token if of_tokens else 0
    _multiply(states, routing, weights, bias, product, launch, experts_of_a_token=of_token)
    return product


def _multiply(
    states: torch.Tensor,
    routing: Routing | None,
    weight: Tiled,
    bias: torch.Tensor | None,
    product: torch.Tensor,
    launch: _Launch,
    row_scales: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    *,
    experts_of_a_token: int = 0,
) -> None:
    """`dtype` of what is multiplied; None: the product's."""
    dot = dot_dtype(dtype or product.dtype)
    num_rows = len(states) if routing is None else routing.num_pairs
    tiles = triton.cdiv(num_rows, launch.rows) if routing is None else len(routing.tiles)
    _product[triton.cdiv(weight.size[0], launch.outputs), tiles, launch.splits](
        states,
        product if routing is None or routing.sources is None else routing.sources,
        product if routing is None else routing.tiles,
        weight.values,
        product if weight.scales is None else weight.scales,
        product if weight.zeros is None else weight.zeros,
        product if weight.output_scales is None else weight.output_scales,
        product if weight.table is None else weight.table,
        product if bias is None else bias,
        product if row_scales is None else row_scales,
        product,
        num_rows,
        SIZE=weight.size[0],
        WIDTH=weight.size[1],
        GROUP=min(weight.group or weight.size[1], weight.size[1]),
        GROUP_OUTPUTS=weight.rows,
        BITS=weight.bits,
        IS_FLOAT4=weight.is_float4,
        HAS_TABLE=weight.table is not None,
        HAS_SCALES=weight.scales is not None,
        HAS_ZEROS=weight.zeros is not None,
        HAS_OUTPUT_SCALES=weight.output_scales is not None,
        HAS_BIAS=bias is not None,
        HAS_ROW_SCALES=row_scales is not None,
        EXPERTS_OF_A_TOKEN=experts_of_a_token,
        IS_GROUPED=routing is not None,
        ONE_TOKEN=routing is not None and routing.sources is None,
        SPLITS=launch.splits,
        DOT=dot,
        ADDED=_ADDED.get(dot, 0),
        ROWS=launch.rows,
        OUTPUTS=launch.outputs,
        INPUTS=min(weight.inputs, 64) if weight.bits > 8 and launch.rows > 16 else weight.inputs,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
