"""Kernels of products of rows with weights that are packed in columns, 64 outputs wide.

Weights are `[out / 64, lines, 64]`, a line for each input, or for each pair of inputs in bfloat16, as the CPU's
instruction for products of pairs takes them. Each column is one stream of memory, and the sums of all rows stay in
registers while it is read. Without such instructions weights are converted in the product: the memory of bfloat16, the
arithmetic of float32.
"""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils

from llmservice_server.backend.cpu import llvm
from llmservice_server.backend.cpu.compiled import compiled, compiled_inner, for_each, intrinsic
from llmservice_server.backend.cpu.kernel_cache import may_use_tiles
from llmservice_server.backend.cpu.tiles import TILE_ROWS, add_by_tiles, are_packed

COLUMNS = 64
"""Outputs whose weights lie side by side in packed memory."""
LANES = 16
VECTORS = COLUMNS // LANES
_CPU_NAME = numba.config.CPU_NAME or binding.get_host_cpu_name()  # type: ignore[attr-defined]
PREFETCH_SOON = not _CPU_NAME.startswith("znver")
"""Whether to prefetch into the first cache. On AMD's Zen 4 more lines can be on their way into the second at once."""
_PREFETCH_BYTES = 16384 if PREFETCH_SOON else 4096
"""How far ahead of its use a line is prefetched: what a core reads in about half a microsecond, or a part of it."""
UPPER_HALF = -1 << 16
_RACE_SIZE, _RACE_ROWS, _RACE_ROUNDS = 1024, 512, 10  # some milliseconds each
LINES_AT_ONCE = 1024
"""256 KiB of 64 columns, which the next rows find in the core's cache."""


class _BFloat16(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"


_FLOATS, _PAIRS = ir.VectorType(llvm.FLOAT, LANES), ir.VectorType(_BFloat16(), 2 * LANES)
_PAIR_PRODUCT = "llvm.x86.avx512bf16.dpbf16ps.512"
_INTEGERS, _QUAD_PRODUCT = ir.VectorType(llvm.INT32, LANES), "llvm.x86.avx512.vpdpbusd.512"
_CHOSEN_FEATURES = numba.config.CPU_FEATURES  # type: ignore[attr-defined]
"""NUMBA_CPU_FEATURES, with NUMBA_CPU_NAME and ONEDNN_MAX_CPU_ISA, stands for another CPU: tests run its paths here."""
_CPU_FEATURES = (
    binding.get_host_cpu_features()
    if _CHOSEN_FEATURES is None
    else {each[1:]: each.startswith("+") for each in _CHOSEN_FEATURES.split(",")}
)
HAS_WIDE_REGISTERS = bool(_CPU_FEATURES.get("avx512f"))
_KERNEL_ROWS_AT_ONCE = 6
"""Their sums and the weights of a line fill the vector registers: of 64 columns in 32 registers of 16 numbers, or of 16
columns in 16 registers of 8."""
_STRIP_LINES = 128
"""Lines that are multiplied at a time where registers hold 16 columns; the next ones are prefetched meanwhile."""
HAS_QUAD_PRODUCT = HAS_WIDE_REGISTERS and bool(_CPU_FEATURES.get("avx512vnni"))
"""Whether the CPU multiplies four pairs of 8-bit integers at a time, and adds them to a 32-bit one."""
HAS_WORD_TABLE = HAS_WIDE_REGISTERS and bool(_CPU_FEATURES.get("avx512bw"))
"""Whether the CPU looks 16-bit words up in a table of 32."""
_HAS_PAIR_PRODUCT = bool(_CPU_FEATURES.get("avx512bf16"))
HAS_TILES = bool(_CPU_FEATURES.get("amx-bf16")) and bool(_CPU_FEATURES.get("amx-int8")) and may_use_tiles()
"""Whether the CPU multiplies by tiles, many more products a cycle than the instructions for pairs and quads compute."""


@cache
def _pairs_are_slow() -> bool:
    """Whether our kernel had better convert both numbers of a pair to float32 than use the instruction for pairs.

    Measured by oneDNN's products: the instruction is half as fast as float32 on some CPUs, and twice as fast on others.
    """
    operands = [
        (torch.ones(_RACE_ROWS, _RACE_SIZE, dtype=dtype), torch.ops.mkldnn._reorder_linear_weight(weight, _RACE_ROWS))
        for dtype in (torch.float32, torch.bfloat16)
        for weight in [torch.ones(_RACE_SIZE, _RACE_SIZE, dtype=dtype)]
    ]
    rounds = [[_product_s(*each) for each in operands] for _ in range(_RACE_ROUNDS)]
    float32_s, bfloat16_s = map(min, zip(*rounds, strict=True))
    return bool(float32_s < 0.75 * bfloat16_s)


def _product_s(hidden: torch.Tensor, weight: torch.Tensor) -> float:
    started_s = time.perf_counter()
    torch.ops.mkldnn._linear_pointwise(hidden, weight, None, "none", [], "")
    return time.perf_counter() - started_s


def as_operand(hidden: torch.Tensor) -> npt.NDArray[Any]:
    """Contiguous rows `[num_rows, in]` as `multiply` takes them: float32, or pairs of bfloat16 as int32."""
    return (hidden if hidden.dtype == torch.float32 else hidden.view(torch.int32)).numpy()


@intrinsic
def _pointer(context: Any, address: Any) -> Any:
    return types.voidptr(address), lambda _, builder, __, values: builder.inttoptr(values[0], llvm.BYTES)


@compiled_inner(owns_arrays=True)
def weights_at(address: int, shape: Any, like: Any) -> Any:
    """The array of `packed_memory` at `address`, with the dtype of `like`.

    It lets compiled code take the matrices of any number of layers.
    """
    return numba.carray(_pointer(address), shape, like.dtype)  # type: ignore[attr-defined]


def numbers_of(builder: Any, vector: Any) -> list[Any]:
    """A vector of float32 itself; or the first and the second elements of a vector of pairs of bfloat16, in float32."""
    if vector.type == _FLOATS:
        return [vector]
    upper, shift = llvm.splat(llvm.INT32, UPPER_HALF, LANES), llvm.splat(llvm.INT32, 16, LANES)
    return [builder.bitcast(bits, _FLOATS) for bits in (builder.shl(vector, shift), builder.and_(vector, upper))]


def emit_product(builder: Any, value: Any, weights: Any, total: Any) -> Any:
    """Vectors of float32, or of pairs of bfloat16 whose two products are both added to `total`.

    With a `total` of integers, vectors of four 8-bit integers, those of `value` unsigned and those of `weights` signed.
    """
    if total.type == _INTEGERS:
        kind = ir.FunctionType(_INTEGERS, [_INTEGERS] * 3)
        return builder.call(
            cgutils.get_or_insert_function(builder.module, kind, _QUAD_PRODUCT), [total, value, weights]
        )
    if weights.type != _FLOATS and _HAS_PAIR_PRODUCT and not _pairs_are_slow():
        kind = ir.FunctionType(_FLOATS, [_FLOATS, _PAIRS, _PAIRS])
        product = cgutils.get_or_insert_function(builder.module, kind, _PAIR_PRODUCT)
        return builder.call(product, [total, builder.bitcast(value, _PAIRS), builder.bitcast(weights, _PAIRS)])
    for left, right in zip(numbers_of(builder, value), numbers_of(builder, weights), strict=True):
        total = llvm.fma(builder, left, right, total)
    return total


@intrinsic
def _expand_rows(context: Any, hidden: Any, rows: Any) -> Any:
    """Write `hidden` `[num_rows, lines]` to `rows` `[num_rows, at least inputs]`, float32."""
    dtype: Any = types.float32 if hidden.dtype == types.float32 else types.uint16
    element = llvm.FLOAT if dtype == types.float32 else llvm.INT16

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code = llvm.Arguments(context, builder, signature, arguments)
        num_rows, num_lines = code.shape(0)
        num_inputs = builder.mul(num_lines, ir.Constant(num_lines.type, 32 // dtype.bitwidth))
        with cgutils.for_range(builder, num_rows) as row:
            source = builder.bitcast(code.address(0, row.index, 0), element.as_pointer())
            target = builder.bitcast(code.address(1, row.index, 0), llvm.FLOAT.as_pointer())
            with cgutils.for_range(builder, num_inputs) as place:
                number = builder.load(builder.gep(source, [place.index]))
                builder.store(llvm.bits_to_float32(builder, number, dtype), builder.gep(target, [place.index]))
        return context.get_dummy_value()

    return types.void(hidden, rows), generate


def _product_kernel(num_rows: int, num_vectors: int = VECTORS) -> Any:
    """A function `(hidden, columns, first, sums, ahead)`: adds products of `num_rows` rows from `first` on to `sums`.

    hidden: `[rows, in]` float32, or `[rows, in / 2]` int32 for pairs of bfloat16. columns: `[lines, 16 * num_vectors]`,
    which may be of pairs where `hidden` is float32.
    sums: `[rows, 16 * num_vectors]` float32; or int32, for `[rows, in / 4]` of four 8-bit integers. ahead: the bytes
    from the first line to what is prefetched meanwhile, as much as is read.
    """

    def typed(context: Any, hidden: Any, columns: Any, first: Any, sums: Any, ahead: Any) -> Any:
        return types.void(hidden, columns, types.intp, sums, types.intp), generate

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code = llvm.Arguments(context, builder, signature, arguments)
        address = code.address
        dtype, sum_dtype, first = signature.args[1].dtype, signature.args[3].dtype, arguments[2]
        expanded = signature.args[0].dtype == types.float32 and dtype == types.int32
        element = llvm.FLOAT if dtype == types.float32 or expanded else llvm.INT32
        numbers = [builder.add(first, ir.Constant(first.type, row)) for row in range(num_rows)]
        rows = [builder.bitcast(address(0, number, 0), element.as_pointer()) for number in numbers]
        num_lines, stride = code.shape(1)[0], code.strides(1)[0]
        sums = [address(3, number, LANES * part) for number in numbers for part in range(num_vectors)]
        before = [llvm.load(builder, sum_, sum_dtype, LANES) for sum_ in sums]
        totals = [cgutils.alloca_once_value(builder, value) for value in before]
        start = address(1, 0, 0)
        with cgutils.for_range(builder, num_lines) as loop:
            line_bytes = ir.Constant(loop.index.type, 4 * LANES * num_vectors)
            line = builder.gep(start, [builder.mul(loop.index, stride)])
            ahead = builder.add(arguments[4], builder.mul(loop.index, line_bytes))
            weights = []
            for offset in range(0, 4 * LANES * num_vectors, 4 * LANES):
                place = builder.add(ahead, ir.Constant(first.type, offset))
                llvm.prefetch(builder, builder.gep(start, [place]), soon=PREFETCH_SOON)
                vector = builder.gep(line, [ir.Constant(first.type, offset)])
                weights.append(llvm.load(builder, vector, dtype, LANES))
            groups = [*zip(*(numbers_of(builder, each) for each in weights), strict=True)] if expanded else [weights]
            for number, vectors in enumerate(groups):  # the first numbers of pairs, then the second: half the registers
                place = builder.mul(loop.index, ir.Constant(first.type, len(groups)))
                place = builder.add(place, ir.Constant(first.type, number))
                for row, pointer in enumerate(rows):
                    value = llvm.broadcast(builder, builder.load(builder.gep(pointer, [place])), LANES)
                    for vector, total in zip(vectors, totals[row * num_vectors :], strict=False):
                        builder.store(emit_product(builder, value, vector, builder.load(total)), total)
        for sum_, total in zip(sums, totals, strict=True):
            llvm.store(builder, builder.load(total), sum_)
        return context.get_dummy_value()

    return intrinsic(typed)


_single = _product_kernel(1)
_one, _two, _three, _four, _five, _six = (
    _product_kernel(number, VECTORS if HAS_WIDE_REGISTERS else 1) for number in range(1, 7)
)


@compiled_inner()
def multiply_columns(hidden: Any, columns: Any, sums: Any) -> None:
    """Write the products of `hidden` with 64 columns of weights to `sums` `[num_rows, 64]`.

    `hidden` may have more lines than `columns`.
    """
    sums[:] = 0
    for first_line in range(0, columns.shape[0], LINES_AT_ONCE):
        lines = slice(first_line, min(first_line + LINES_AT_ONCE, columns.shape[0]))
        add_products(hidden[:, lines], columns[lines], sums)


@compiled_inner()
def add_products(hidden: Any, columns: Any, sums: Any) -> None:
    """Add the products of `hidden` with `columns` to `sums` `[num_rows, 64]`."""
    if hidden.shape[0] == 1:
        _single(hidden, columns, 0, sums, _PREFETCH_BYTES)
    elif HAS_TILES and are_packed(columns):
        num_lines = columns.shape[0] // TILE_ROWS * TILE_ROWS
        add_by_tiles(hidden[:, :num_lines], columns[:num_lines], sums)
        if num_lines < columns.shape[0]:
            _add_rows(hidden[:, num_lines:], columns[num_lines:], sums, _PREFETCH_BYTES)
    elif HAS_WIDE_REGISTERS:
        _add_rows(hidden, columns, sums, _PREFETCH_BYTES)
    else:
        _add_in_strips(hidden, columns, sums)


@compiled_inner(owns_arrays=True)
def _add_in_strips(hidden: Any, columns: Any, sums: Any) -> None:
    """`add_products`, 16 columns at a time, whose numbers are converted as they are multiplied.

    A quarter of the next lines is prefetched with each 16 columns, in the order in which they lie in memory.
    """
    rows = np.empty((hidden.shape[0], 2 * min(_STRIP_LINES, columns.shape[0])), np.float32)
    for first in range(0, columns.shape[0], _STRIP_LINES):
        lines = slice(first, min(first + _STRIP_LINES, columns.shape[0]))
        _expand_rows(hidden[:, lines], rows)
        num_bytes = 4 * COLUMNS * (lines.stop - first)
        for part in range(VECTORS):
            strip = slice(part * LANES, (part + 1) * LANES)
            ahead = num_bytes + part * (num_bytes // VECTORS - 4 * LANES)
            _add_rows(rows, columns[lines, strip], sums[:, strip], ahead)


@compiled_inner()
def _add_rows(hidden: Any, columns: Any, sums: Any, ahead: int) -> None:
    """`add_products`, or that of a strip, a few rows at a time, in equal parts."""
    first, num_rows = 0, hidden.shape[0]
    while first < num_rows:
        left = num_rows - first
        count = -(-left // -(-left // _KERNEL_ROWS_AT_ONCE))
        if count == 6:
            _six(hidden, columns, first, sums, ahead)
        elif count == 5:
            _five(hidden, columns, first, sums, ahead)
        elif count == 4:
            _four(hidden, columns, first, sums, ahead)
        elif count == 3:
            _three(hidden, columns, first, sums, ahead)
        elif count == 2:
            _two(hidden, columns, first, sums, ahead)
        else:
            _one(hidden, columns, first, sums, ahead)
        first += count


def _row_writer(*, biased: bool) -> Any:
    """A function `(sums, row, scale, scales, bias, product)`: writes 64 sums of a row, in the dtype of `product`.

    sums: `[num_rows, 64]` float32; or int32, which are multiplied with `scale * scales`. product: `[num_rows, 64]`.
    scales and bias: `[64]`.
    """

    def typed(context: Any, sums: Any, row: Any, scale: Any, scales: Any, bias: Any, product: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            address = llvm.Arguments(context, builder, signature, arguments).address
            for first in range(0, COLUMNS, LANES):
                vector = llvm.load(builder, address(0, arguments[1], first), sums.dtype, LANES)
                if sums.dtype == types.int32:
                    by_row = llvm.broadcast(builder, arguments[2], LANES)
                    by_column = llvm.load(builder, address(3, first), scales.dtype, LANES)
                    vector = builder.fmul(builder.sitofp(vector, _FLOATS), builder.fmul(by_row, by_column))
                if biased:
                    bits = llvm.load(builder, address(4, first), bias.dtype, LANES)
                    vector = builder.fadd(vector, llvm.bits_to_float32(builder, bits, bias.dtype))
                written = llvm.float32_to_bits(builder, vector, product.dtype)
                llvm.store(builder, written, address(5, arguments[1], first), product.dtype)
            return context.get_dummy_value()

        return types.void(sums, types.intp, types.float32, scales, bias, product), generate

    return intrinsic(typed)


_write, _write_biased = _row_writer(biased=False), _row_writer(biased=True)


@compiled_inner()
def write_rows(sums: Any, row_scales: Any, scales: Any, bias: Any, product: Any) -> None:
    """Write `sums` `[num_rows, 64]` to `product`, in its dtype; those of integers scaled by row and by column.

    bias: 64 elements, or none.
    """
    for row in range(len(sums)):
        scale = row_scales[row] if len(row_scales) else np.float32(1)
        if len(bias):
            _write_biased(sums, row, scale, scales, bias, product)
        else:
            _write(sums, row, scale, scales, bias, product)


@compiled_inner()
def linear_columns(hidden: Any, columns: Any, bias: Any, sums: Any, product: Any) -> None:
    """64 columns of `hidden @ weight.T + bias`, `[num_rows, 64]`, in the dtype of `product`.

    bias: 64 elements, or none. sums: scratch of the same shape, float32.
    """
    multiply_columns(hidden, columns, sums)
    write_rows(sums, sums[0, :0], sums[0], bias, product)


@compiled(nogil=True)
def multiply(hidden: Any, weights: Any, bias: Any, product: Any) -> None:
    """Write `hidden @ weight.T + bias` to `product` `[num_rows, out]`.

    hidden: as `as_operand` returns it. weights: `[out / 64, lines, 64]`. bias: `[out]`, or empty. bias and product are
    arrays of `as_array`.
    """
    if HAS_TILES:
        rows = np.empty((hidden.shape[0], hidden.shape[1] + TILE_ROWS), hidden.dtype)[:, : hidden.shape[1]]
        for row in range(hidden.shape[0]):  # no slices: numba takes seconds to compile their error about shapes
            for index in range(hidden.shape[1]):
                rows[row, index] = hidden[row, index]
        for_each(_linear_columns, len(weights), (rows, weights, bias, product))
    else:
        for_each(_linear_columns, len(weights), (hidden, weights, bias, product))


@compiled_inner(owns_arrays=True)
def _linear_columns(number: int, hidden: Any, weights: Any, bias: Any, product: Any) -> None:
    outputs = slice(number * COLUMNS, (number + 1) * COLUMNS)
    sums = np.empty((hidden.shape[0], COLUMNS), np.float32)
    linear_columns(hidden, weights[number], bias[outputs], sums, product[:, outputs])
