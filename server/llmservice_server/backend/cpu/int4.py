"""Products with weights of 4 bits on a CPU: numbers are made of them in the core's cache, and multiplied as dense ones.

`[out / 64, in / 8, 64]`: each int32 has eight inputs of an output, so that a shift and a mask give the pairs that
products of bfloat16 take. These have 136 + q in place of a number q from -8 to 7: the bits of q + 8 are the mantissa's
last ones of a bfloat16 from 128 on. What the 136 adds to a group's sum follows from the sum of its activations.

Floats of 4 bits are looked up in a table of sixteen bfloat16, by one instruction of AVX-512. For many rows they are
multiplied with their group's scale, which is exact: those of mxfp4, powers of two, are added to the exponents; those of
NVFP4 have four bits, and the float two.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils

from llmservice_server.backend.cpu import llvm
from llmservice_server.backend.cpu.compiled import compiled, compiled_inner, for_each, intrinsic, use_threads
from llmservice_server.backend.cpu.linear_kernels import (
    COLUMNS,
    HAS_WIDE_REGISTERS,
    HAS_WORD_TABLE,
    LANES,
    PREFETCH_SOON,
    VECTORS,
    add_products,
    as_operand,
    emit_product,
    numbers_of,
    write_rows,
)
from llmservice_server.backend.cpu.llvm import as_array, to_float32
from llmservice_server.backend.cpu.tiles import are_packed
from llmservice_server.backend.quantized import QuantizedWeight

INPUTS = 8
"""Of an int32."""
_MOST_INPUTS = 512
"""That are expanded at a time: 64 KiB of pairs of 64 columns, or twice as much in float32."""
_ADDED = 136
_PAIR, _ADDED_BITS = 0x000F000F, 0x43004300
_LOOK_UP = "llvm.x86.avx512.permvar.hi.512"  # by the lowest 5 bits of each word
_PREFETCH_BYTES = 8192
_THREADED_ROWS = 16
_FEW_ROWS = 6 if HAS_WIDE_REGISTERS else 1
"""Their sums stay in registers while numbers are made."""
_FLOATS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32).view(np.uint32) >> 16
"""Those of 4 bits without the sign, as bits of bfloat16. From the third on these are 0x3F00 plus 64 for each."""
_FIRST_FLOAT, _FLOAT_STEP, _SIGN = 0x3F00, 6, 0x8000
_BIAS, _EXPONENT = 127, 7
"""Of bfloat16: what is added to its exponent, and where that is."""
_FLOAT_SCALES = (types.uint8, types.int8)
"""Of floats of 4 bits, mxfp4's and NVFP4's, as `as_array` has them."""


@dataclass(slots=True)
class Int4Linear:
    """Implements `Linear`. `weight` is int32 `[out / 64, in / 8, 64]`, of numbers plus 8, or of floats."""

    weight: torch.Tensor
    scales: torch.Tensor  # [out / 64, groups, 64]; of floats uint8 or int8, as of `as_array`
    zeros: torch.Tensor  # int8, likewise; [0, groups, 64] where there are none
    output_scales: torch.Tensor  # float64 [out], or [0]
    bias: torch.Tensor | None = None
    order: torch.Tensor | None = None  # of the inputs, as of `QuantizedWeight`
    _arrays: tuple[Any, ...] | None = field(default=None, repr=False)

    @classmethod
    def of(cls, weight: QuantizedWeight, bias: torch.Tensor | None) -> Self:
        """Of one that `can_multiply`."""
        outputs, inputs = weight.shape
        values = weight.values.view(outputs // COLUMNS, COLUMNS, inputs // INPUTS, INPUTS // 2)
        halves = [half[..., ::2] | half[..., 1::2] << 4 for half in (values & 0xF, values >> 4)]
        packed = torch.cat(halves, -1).permute(0, 2, 1, 3).contiguous().view(torch.int32).squeeze(-1)
        scales = weight.kernel_scales
        zeros = scales.new_empty(0, scales.shape[1]) if weight.zeros is None else weight.zeros
        by_output = scales.new_empty(0).double() if weight.output_scales is None else weight.output_scales.flatten()
        use_threads(torch.get_num_threads())
        return cls(packed, _by_columns(scales), _by_columns(zeros).to(torch.int8), by_output, bias, weight.order)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.order is not None:
            hidden = hidden.index_select(1, self.order)
        if self._arrays is None:
            bias = hidden.new_empty(0) if self.bias is None else self.bias
            scaled = as_array(self.scales), self.zeros.numpy(), self.output_scales.numpy()
            self._arrays = self.weight.numpy(), *scaled, as_array(bias)
        product = hidden.new_empty(len(hidden), len(self.weight) * COLUMNS)
        states = (hidden.float() if hidden.dtype == torch.float16 else hidden).contiguous()
        weights, *others = self._arrays
        multiply_int4(as_array(states), as_operand(states), weights, tuple(others), as_array(product))
        return product

    @property
    def num_sums(self) -> int:
        """Of a row's activations, which a product takes: of floats none."""
        return 0 if self.scales.dtype in (torch.uint8, torch.int8) else self.scales.shape[1]

    @property
    def nbytes(self) -> int:
        parts = self.weight, self.scales, self.zeros, self.output_scales, self.bias, self.order
        return sum(part.nbytes for part in parts if part is not None)


def _by_columns(each: torch.Tensor) -> torch.Tensor:
    """`[out, groups]` to `[out / 64, groups, 64]`."""
    return each.view(len(each) // COLUMNS, COLUMNS, each.shape[1]).transpose(1, 2).contiguous()


def can_multiply(weight: QuantizedWeight) -> bool:
    """Whether the layout takes such a weight."""
    if weight.bits > 4 or weight.rows > 1 or weight.table is not None:
        return False
    outputs, inputs = weight.shape
    group = weight.group or inputs
    return outputs % COLUMNS == 0 and inputs % group == 0 and group % INPUTS == 0


def _numbers(builder: Any, eight: Any, dtype: Any, scales: Any) -> list[Any]:
    """Of a vector of eight inputs each, in their order: four of pairs, with 136 in each number, or eight of float32.

    Floats have no 136 in them; numba's type of `scales` tells them.
    """
    mask, added = (llvm.splat(llvm.INT32, bits, LANES) for bits in (_PAIR, _ADDED_BITS))
    found = []
    for place in range(INPUTS // 2):
        shifted = builder.lshr(eight, llvm.splat(llvm.INT32, 4 * place, LANES))
        if scales.dtype in _FLOAT_SCALES:
            pairs = _floats(builder, shifted)
        else:
            pairs = builder.or_(builder.and_(shifted, mask), added)
        if dtype != types.float32:
            found.append(pairs)
        elif scales.dtype in _FLOAT_SCALES:
            found += numbers_of(builder, pairs)
        else:
            added_number = llvm.splat(llvm.FLOAT, float(_ADDED), LANES)
            found += [builder.fsub(number, added_number) for number in numbers_of(builder, pairs)]
    return found


def _floats(builder: Any, vector: Any) -> Any:
    """Of the lowest 4 bits of each half of an int32, whatever the others are, bfloat16 of the same sign and number."""
    words = ir.VectorType(llvm.INT16, 2 * LANES)
    halves = builder.bitcast(vector, words)
    if HAS_WORD_TABLE:
        table = ir.Constant(words, [int(sign | bits) for _ in range(2) for sign in (0, _SIGN) for bits in _FLOATS])
        look_up = cgutils.get_or_insert_function(builder.module, ir.FunctionType(words, [words] * 2), _LOOK_UP)
        return builder.bitcast(builder.call(look_up, [table, halves]), vector.type)

    def splat(number: int) -> Any:
        return llvm.splat(llvm.INT16, number, 2 * LANES)

    place = builder.and_(halves, splat(7))
    regular = builder.add(builder.shl(place, splat(_FLOAT_STEP)), splat(_FIRST_FLOAT))
    zero_or_half = builder.and_(builder.sub(splat(0), place), splat(_FIRST_FLOAT))
    bits = builder.select(builder.icmp_unsigned("<", place, splat(2)), zero_or_half, regular)
    sign = builder.shl(builder.and_(halves, splat(8)), splat(12))
    return builder.bitcast(builder.or_(bits, sign), vector.type)


@intrinsic
def _are_floats(context: Any, scales: Any) -> Any:
    """Whether weights with such `scales` are floats; known when it is compiled."""
    known = ir.Constant(ir.IntType(1), int(scales.dtype in _FLOAT_SCALES))
    return types.boolean(scales), lambda *_: known


def _line_of(builder: Any, start: Any, index: Any, num_bytes: int) -> Any:
    return builder.gep(start, [builder.mul(index, ir.Constant(index.type, num_bytes))])


def _vectors_of(builder: Any, line: Any) -> list[Any]:
    """Of a line of 64 int32, with a prefetch of one that follows."""
    found = []
    for offset in range(0, 4 * COLUMNS, 4 * LANES):
        address = builder.gep(line, [ir.Constant(llvm.INT64, offset)])
        ahead = builder.gep(address, [ir.Constant(llvm.INT64, _PREFETCH_BYTES)])
        llvm.prefetch(builder, ahead, soon=PREFETCH_SOON)
        found.append(llvm.load(builder, address, types.int32, LANES))
    return found


@intrinsic
def _expand(context: Any, packed: Any, numbers: Any, scales: Any) -> Any:
    """Write `packed` `[lines, 64]` to `numbers`, contiguous: `[4 * lines, 64]` pairs, or float32 `[8 * lines, 64]`.

    scales: `[64]`, of the lines' group. Floats are multiplied with them.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code = llvm.Arguments(context, builder, signature, arguments)
        num_lines, source, target = code.shape(0)[0], code.address(0, 0, 0), code.address(1, 0, 0)
        by_column: list[Any] = [None] * VECTORS
        if scales.dtype in _FLOAT_SCALES:
            places = (code.address(2, LANES * at) for at in range(VECTORS))
            by_column = [llvm.load(builder, place, scales.dtype, LANES) for place in places]
        line_bytes = 4 * COLUMNS
        width = INPUTS if numbers.dtype == types.float32 else INPUTS // 2
        with cgutils.for_range(builder, num_lines) as loop:
            written = _line_of(builder, target, loop.index, width * line_bytes)
            for part, eight in enumerate(_vectors_of(builder, _line_of(builder, source, loop.index, line_bytes))):
                for place, vector in enumerate(_numbers(builder, eight, numbers.dtype, scales)):
                    offset = ir.Constant(loop.index.type, place * line_bytes + 4 * LANES * part)
                    if by_column[part] is not None:
                        vector = _scaled(builder, vector, by_column[part], scales.dtype)  # noqa: PLW2901
                    llvm.store(builder, vector, builder.gep(written, [offset]))
        return context.get_dummy_value()

    return types.void(packed, numbers, scales), generate


def _scaled(builder: Any, vector: Any, scales: Any, dtype: Any) -> Any:
    """Float32, or pairs of bfloat16, times a scale of each column, of numba's `dtype`; a power is at least 2^-125."""
    if vector.type != ir.VectorType(llvm.INT32, LANES):
        return builder.fmul(vector, llvm.bits_to_float32(builder, scales, dtype))
    if dtype == types.int8:
        factors = llvm.bits_to_float32(builder, scales, dtype)
        low, high = (
            builder.bitcast(builder.fmul(number, factors), vector.type) for number in numbers_of(builder, vector)
        )
        return builder.or_(builder.lshr(low, llvm.splat(llvm.INT32, 16, LANES)), high)
    words = ir.VectorType(llvm.INT16, 2 * LANES)
    wide, least = builder.zext(scales, vector.type), llvm.splat(llvm.INT32, 2, LANES)
    wide = builder.select(builder.icmp_unsigned("<", wide, least), least, wide)
    shifted = builder.shl(
        builder.sub(wide, llvm.splat(llvm.INT32, _BIAS, LANES)), llvm.splat(llvm.INT32, _EXPONENT, LANES)
    )
    low = builder.and_(shifted, llvm.splat(llvm.INT32, 0xFFFF, LANES))
    both = builder.or_(low, builder.shl(shifted, llvm.splat(llvm.INT32, 16, LANES)))
    halves = builder.bitcast(vector, words)
    without_sign = builder.shl(halves, llvm.splat(llvm.INT16, 1, 2 * LANES))
    is_zero = builder.icmp_unsigned("==", without_sign, llvm.splat(llvm.INT16, 0, 2 * LANES))
    changed = builder.add(halves, builder.bitcast(both, words))
    return builder.bitcast(builder.select(is_zero, halves, changed), vector.type)


def _row_kernel(num_rows: int) -> Any:
    """A function of the arguments of `typed`: adds products of so many rows with `packed` `[lines, 64]` to `sums`.

    hidden: `[rows, lines of numbers]`, as `multiply` takes it. scales: `[groups, 64]`. zeros: int8 `[groups, 64]`, or
    none, and group_sums: float32 `[rows, groups]`, of `sum_groups`; not for floats. sums: float32 `[rows, 64]`. Numbers
    and the sums of a group stay in registers.
    """

    def typed(context: Any, hidden: Any, packed: Any, scales: Any, zeros: Any, group_sums: Any, sums: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            code = llvm.Arguments(context, builder, signature, arguments)
            address = code.address
            element = llvm.FLOAT if hidden.dtype == types.float32 else llvm.INT32
            width = INPUTS if hidden.dtype == types.float32 else INPUTS // 2
            num_lines, num_groups = code.shape(1)[0], code.shape(2)[0]
            group_lines = builder.udiv(num_lines, num_groups)
            rows = [address(0, row, 0) for row in range(num_rows)]
            places = [address(5, row, LANES * part) for row in range(num_rows) for part in range(VECTORS)]
            num_zeros = code.shape(3)[0]
            has_zeros = builder.icmp_signed(">", num_zeros, ir.Constant(num_zeros.type, 0))
            added = llvm.splat(llvm.FLOAT, 0.0 if hidden.dtype == types.float32 else -float(_ADDED), LANES)
            offset = cgutils.alloca_once_value(builder, added)
            zero = llvm.splat(llvm.FLOAT, 0.0, LANES)
            totals = [
                cgutils.alloca_once_value(builder, llvm.load(builder, each, sums.dtype, LANES)) for each in places
            ]
            parts = [cgutils.alloca_once_value(builder, zero) for _ in places]
            start = address(1, 0, 0)
            with cgutils.for_range(builder, num_groups) as groups:
                first = builder.mul(groups.index, group_lines)
                for vector in range(0 if scales.dtype in _FLOAT_SCALES else VECTORS):
                    builder.store(added, offset)
                    with builder.if_then(has_zeros):
                        bits = llvm.load(builder, address(3, groups.index, LANES * vector), zeros.dtype, LANES)
                        builder.store(builder.fsub(added, builder.sitofp(bits, added.type)), offset)
                    for row in range(num_rows):
                        total = builder.load(builder.bitcast(address(4, row, groups.index), llvm.FLOAT.as_pointer()))
                        several = llvm.broadcast(builder, total, LANES)
                        builder.store(builder.fmul(several, builder.load(offset)), parts[row * VECTORS + vector])
                with cgutils.for_range(builder, group_lines) as loop:
                    line = builder.add(first, loop.index)
                    eights = _vectors_of(builder, _line_of(builder, start, line, 4 * COLUMNS))
                    numbers = [_numbers(builder, eight, hidden.dtype, scales) for eight in eights]
                    inputs = [_line_of(builder, row, line, 4 * width) for row in rows]
                    for place in range(width):
                        for row, values in enumerate(inputs):
                            pointer = builder.gep(values, [ir.Constant(line.type, 4 * place)])
                            value = builder.load(builder.bitcast(pointer, element.as_pointer()))
                            several = llvm.broadcast(builder, value, LANES)
                            for vector in range(VECTORS):
                                part = parts[row * VECTORS + vector]
                                product = emit_product(builder, several, numbers[vector][place], builder.load(part))
                                builder.store(product, part)
                for vector in range(VECTORS):
                    bits = llvm.load(builder, address(2, groups.index, LANES * vector), scales.dtype, LANES)
                    scale = llvm.bits_to_float32(builder, bits, scales.dtype)
                    for part, total in zip(parts[vector::VECTORS], totals[vector::VECTORS], strict=True):
                        builder.store(llvm.fma(builder, builder.load(part), scale, builder.load(total)), total)
                        builder.store(zero, part)
            for each, total in zip(places, totals, strict=True):
                llvm.store(builder, builder.load(total), each)
            return context.get_dummy_value()

        return types.void(hidden, packed, scales, zeros, group_sums, sums), generate

    return intrinsic(typed)


_one, _two, _three, _four, _five, _six = map(_row_kernel, range(1, 7))


@compiled_inner()
def _add_few_rows(hidden: Any, packed: Any, scales: Any, zeros: Any, group_sums: Any, sums: Any) -> None:
    if len(hidden) == 1:
        _one(hidden, packed, scales, zeros, group_sums, sums)
    elif len(hidden) == 2:
        _two(hidden, packed, scales, zeros, group_sums, sums)
    elif len(hidden) == 3:
        _three(hidden, packed, scales, zeros, group_sums, sums)
    elif len(hidden) == 4:
        _four(hidden, packed, scales, zeros, group_sums, sums)
    elif len(hidden) == 5:
        _five(hidden, packed, scales, zeros, group_sums, sums)
    else:
        _six(hidden, packed, scales, zeros, group_sums, sums)


@compiled_inner()
def _sum_groups(row: int, hidden: Any, sums: Any) -> None:
    size = hidden.shape[1] // sums.shape[1]
    for group in range(sums.shape[1]):
        total = np.float32(0)
        for index in range(group * size, (group + 1) * size):
            total += to_float32(hidden[row, index])
        sums[row, group] = total


@compiled_inner(nogil=True)
def sum_groups(hidden: Any, sums: Any) -> None:
    """Write the sum of each group of a row's activations to `sums`, float32 `[num_rows, num_groups]`, or nothing."""
    if not sums.shape[1]:
        return
    if len(hidden) < _THREADED_ROWS:
        for row in range(len(hidden)):
            _sum_groups(row, hidden, sums)
    else:
        for_each(_sum_groups, len(hidden), (hidden, sums))


@compiled(nogil=True)
def multiply_int4(hidden: Any, operand: Any, weights: Any, scaled: Any, product: Any) -> None:
    """Write `hidden @ weight.T + bias` to `product` `[num_rows, out]`.

    hidden: `[num_rows, in]`, bfloat16 or float32; operand: the same as `multiply` takes it. weights: `[out / 64, in /
    8, 64]`. scaled: scales and zeros `[out / 64, groups, 64]`, and scales and biases of the outputs, `[out]` or empty.
    Arrays are those of `as_array`.
    """
    sums = np.empty((hidden.shape[0], 0 if _are_floats(scaled[0]) else scaled[0].shape[1]), np.float32)
    sum_groups(hidden, sums)
    for_each(_product_columns, len(weights), ((operand, sums), weights, scaled, product))


@compiled_inner()
def _product_columns(number: int, rows: Any, weights: Any, scaled: Any, product: Any) -> None:
    int4_columns(number, rows, weights, scaled, number * COLUMNS, product)


@compiled_inner(owns_arrays=True)
def int4_columns(number: int, rows: Any, weights: Any, scaled: Any, first: int, product: Any) -> None:
    """Write 64 columns of the product, from `64 * number` on, to `product` from its column `first` on.

    rows: the operand, and what `sum_groups` writes of it. weights and scaled: as in `multiply_int4`.
    """
    operand, group_sums = rows
    scales, zeros, output_scales, bias = scaled
    outputs = slice(number * COLUMNS, (number + 1) * COLUMNS)
    columns = product[:, first : first + COLUMNS]
    if _are_floats(scales):
        _float_columns(operand, weights[number], scales[number], (output_scales[outputs], bias[outputs]), columns)
        return
    if len(operand) <= _FEW_ROWS:
        few = np.zeros((len(operand), COLUMNS), np.float32)
        of_columns = zeros[number] if len(zeros) else np.empty((0, COLUMNS), np.int8)
        _add_few_rows(operand, weights[number], scales[number], of_columns, group_sums, few)
        write_rows(few, few[0, :0], few[0], bias[outputs], columns)
        return
    num_rows, num_groups = len(operand), scales.shape[1]
    width = operand.shape[1] // weights.shape[1]  # of a line, in the operand
    group_lines = weights.shape[1] // num_groups
    at_once = min(group_lines, _MOST_INPUTS // INPUTS)
    numbers = np.empty((at_once * width, COLUMNS), operand.dtype)
    sums, part = np.zeros((num_rows, COLUMNS), np.float32), np.empty((num_rows, COLUMNS), np.float32)
    scale, offset = np.empty(COLUMNS, np.float32), np.empty(COLUMNS, np.float32)
    for group in range(num_groups):
        part[:] = 0
        end = (group + 1) * group_lines
        for begin in range(group * group_lines, end, at_once):
            last = min(begin + at_once, end)
            inputs, lines = operand[:, begin * width : last * width], weights[number, begin:last]
            _expand(lines, numbers, scales[number, group])
            add_products(inputs, numbers[: (last - begin) * width], part)
        for index in range(COLUMNS):
            scale[index] = to_float32(scales[number, group, index])
            offset[index] = _ADDED if are_packed(operand) else 0
        if len(zeros):
            for index in range(COLUMNS):
                offset[index] += zeros[number, group, index]
        for row in range(num_rows):
            total = group_sums[row, group]
            for index in range(COLUMNS):
                sums[row, index] += (part[row, index] - total * offset[index]) * scale[index]
    write_rows(sums, sums[0, :0], sums[0], bias[outputs], columns)


@compiled_inner(owns_arrays=True)
def _float_columns(operand: Any, weights: Any, scales: Any, of_outputs: Any, product: Any) -> None:
    """`int4_columns` of floats, `[lines, 64]` with scales `[groups, 64]`. of_outputs: scales and the bias, or none."""
    sums = np.zeros((len(operand), COLUMNS), np.float32)
    if len(operand) <= _FEW_ROWS:
        _add_few_rows(operand, weights, scales, np.empty((0, COLUMNS), np.int8), sums, sums)
    else:
        _add_many_rows(operand, weights, scales, sums)
    output_scales, bias = of_outputs
    if len(output_scales):
        for row in range(len(sums)):
            for index in range(COLUMNS):
                sums[row, index] *= np.float32(output_scales[index])
    write_rows(sums, sums[0, :0], sums[0], bias, product)


@compiled_inner(owns_arrays=True)
def _add_many_rows(operand: Any, weights: Any, scales: Any, sums: Any) -> None:
    """Numbers of many groups are made at once."""
    width, group_lines = operand.shape[1] // len(weights), len(weights) // len(scales)
    groups_at_once = max(1, _MOST_INPUTS // INPUTS // group_lines)
    numbers = np.empty((groups_at_once * group_lines * width, COLUMNS), operand.dtype)
    for begin in range(0, len(scales), groups_at_once):
        end = min(begin + groups_at_once, len(scales))
        for group in range(begin, end):
            place = (group - begin) * group_lines * width
            lines = weights[group * group_lines : (group + 1) * group_lines]
            _expand(lines, numbers[place : place + group_lines * width], scales[group])
        inputs = operand[:, begin * group_lines * width : end * group_lines * width]
        add_products(inputs, numbers[: (end - begin) * group_lines * width], sums)
