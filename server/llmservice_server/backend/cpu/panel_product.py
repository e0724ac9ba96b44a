"""Products of a few rows with a packed matrix, straight from the memory that oneDNN packed it into.

With so few rows a product is as fast as its weights come from memory. oneDNN lays a matrix `[out, in]` out in panels:
64 outputs wide, input by input; of bfloat16 two inputs at a time, as its instruction for a product of two pairs takes
them. A panel is one stream, and the sums of all rows stay in registers while it passes.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from llmservice_server.backend.cpu.compiled import compiled, compiled_inner, for_each
from llmservice_server.backend.cpu.element import narrowed, widened
from llmservice_server.backend.cpu.prefetch import emit_prefetch

PANEL = 64
_LANES = 16
_VECTORS = PANEL // _LANES
_LINE_BYTES = PANEL * 4  # of a panel: an input's weights in float32, two inputs' in bfloat16
_AHEAD_BYTES = 16384
"""How far ahead of its use a line is asked for: what a core reads in about half a microsecond."""
_ROWS = 6
"""At a time: their sums, and a line of weights, fill the 32 vector registers."""
_LINES = 1024
"""At a time: 256 KiB of a panel, which the next rows find in a core's own cache."""

_INT32, _FLOAT = ir.IntType(32), ir.FloatType()
_BYTES = ir.IntType(8).as_pointer()
_FLOATS, _INTS = ir.VectorType(_FLOAT, _LANES), ir.VectorType(_INT32, _LANES)


class _BFloat16(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"


_PAIRS = ir.VectorType(_BFloat16(), 2 * _LANES)
_PAIR_PRODUCT = "llvm.x86.avx512bf16.dpbf16ps.512"
_FEATURES = binding.get_host_cpu_features()
_HAS_PAIR_PRODUCT = bool(_FEATURES.get("avx512bf16"))
_HAS_TILE_PRODUCT = bool(_FEATURES.get("amx-bf16"))
"""oneDNN multiplies bfloat16 by tiles then, many more products a cycle than an instruction on pairs has."""


def panels_of(packed: torch.Tensor, shape: tuple[int, int]) -> npt.NDArray[Any] | None:
    """The memory of a matrix `[out, in]` that oneDNN packed, `[out / 64, lines, 64]`, as long as `packed` lives.

    A float32 matrix has a line for each input; one of bfloat16 comes as int32, a line for each two inputs. None where
    it cannot be laid out so; whether it is, is for the caller to try, since nothing documents it. None also where
    oneDNN's product has instructions that ours lacks.
    """
    outputs, inputs = shape
    if packed.dtype == torch.bfloat16 and _HAS_TILE_PRODUCT:
        return None
    if packed.dtype not in (torch.float32, torch.bfloat16) or outputs % PANEL or inputs % 2:
        return None
    num_bytes, address = torch.ops.mkldnn._nbytes(packed), torch.ops.mkldnn.data_ptr(packed)
    if num_bytes != outputs * inputs * packed.dtype.itemsize or address % (4 * _LANES):
        return None
    memory = (ctypes.c_ubyte * num_bytes).from_address(address)
    numbers = np.frombuffer(memory, np.float32 if packed.dtype == torch.float32 else np.int32)
    return numbers.reshape(outputs // PANEL, -1, PANEL)


def _pointer(context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], _BYTES)

    return types.voidptr(address), generate


_pointer_to: Any = intrinsic(_pointer)


@compiled_inner()
def panels_at(address: int, shape: Any, like: Any) -> Any:
    """The array of `panels_of` that lies at `address`, with elements as `like` has them.

    So the matrices of any number of layers can be handed to compiled code.
    """
    return numba.carray(_pointer_to(address), shape, like.dtype)  # type: ignore[attr-defined]


def as_lanes(hidden: torch.Tensor) -> npt.NDArray[Any]:
    """Contiguous rows `[num_rows, in]` as a product takes them: float32, or bfloat16 in pairs, int32."""
    return (hidden if hidden.dtype == torch.float32 else hidden.view(torch.int32)).numpy()


class _Emitter:
    """Writes the code of a panel's product with a fixed number of rows."""

    def __init__(self, builder: Any, rows: list[Any], panel: Any, pairs: bool) -> None:
        self.builder = builder
        self.rows = rows  # pointers to float32, or to int32 where an element is a pair
        self.panel = panel
        self.pairs = pairs

    def line(self, number: Any) -> list[Any]:
        """The vectors of a line, and the prefetch of one that comes later."""
        builder = self.builder
        start = builder.gep(self.panel, [builder.mul(number, ir.Constant(number.type, _LINE_BYTES))])
        kind = _INTS if self.pairs else _FLOATS
        vectors = []
        for offset in range(0, _LINE_BYTES, 4 * _LANES):
            emit_prefetch(builder, builder.gep(start, [ir.Constant(number.type, offset + _AHEAD_BYTES)]))
            place = builder.gep(start, [ir.Constant(number.type, offset)])
            vectors.append(builder.load(builder.bitcast(place, kind.as_pointer()), align=4))  # not all are oneDNN's
        return vectors

    def everywhere(self, row: int, number: Any) -> Any:
        """A row's element in each lane."""
        value = self.builder.load(self.builder.gep(self.rows[row], [number]))
        nothing = ir.Constant(ir.VectorType(value.type, _LANES), ir.Undefined)
        first = self.builder.insert_element(nothing, value, ir.Constant(_INT32, 0))
        return self.builder.shuffle_vector(first, nothing, ir.Constant(_INTS, [0] * _LANES))

    def add_product(self, total: Any, value: Any, weights: Any) -> Any:
        builder = self.builder
        if not self.pairs:
            return self._multiply_add(value, weights, total)
        if _HAS_PAIR_PRODUCT:
            kind = ir.FunctionType(_FLOATS, [_FLOATS, _PAIRS, _PAIRS])
            product = cgutils.get_or_insert_function(builder.module, kind, _PAIR_PRODUCT)
            return builder.call(product, [total, builder.bitcast(value, _PAIRS), builder.bitcast(weights, _PAIRS)])
        halves = zip(self._halves(value), self._halves(weights), strict=True)
        for half_value, half_weights in halves:
            total = self._multiply_add(half_value, half_weights, total)
        return total

    def _multiply_add(self, left: Any, right: Any, total: Any) -> Any:
        product = self.builder.fmul(left, right, flags=("contract",))
        return self.builder.fadd(product, total, flags=("contract",))

    def _halves(self, pairs: Any) -> tuple[Any, Any]:
        """The float32 of the pairs' first elements, and of their second."""
        first = self.builder.shl(pairs, ir.Constant(_INTS, [16] * _LANES))
        second = self.builder.and_(pairs, ir.Constant(_INTS, [-1 << 16] * _LANES))
        return self.builder.bitcast(first, _FLOATS), self.builder.bitcast(second, _FLOATS)


def _panel_kernel(num_rows: int) -> Any:
    """A function `(hidden, panel, first, sums)`: adds the products of `num_rows` rows from `first` on to the same rows.

    hidden: `[rows, in]` float32, or `[rows, in / 2]` int32 for pairs of bfloat16. sums: `[rows, 64]` float32.
    """

    def typed(context: Any, hidden: Any, panel: Any, first: Any, sums: Any) -> Any:
        return types.void(hidden, panel, types.intp, sums), generate

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def pointer_to_row(place: int, row: int, element: Any) -> Any:
            array = context.make_array(signature.args[place])(context, builder, value=arguments[place])
            stride = cgutils.unpack_tuple(builder, array.strides, 2)[0]
            number = builder.add(first, ir.Constant(first.type, row))
            start = builder.gep(builder.bitcast(array.data, _BYTES), [builder.mul(number, stride)])
            return builder.bitcast(start, element.as_pointer())

        first = arguments[2]
        pairs = signature.args[1].dtype != types.float32
        panel = context.make_array(signature.args[1])(context, builder, value=arguments[1])
        rows = [pointer_to_row(0, row, _INT32 if pairs else _FLOAT) for row in range(num_rows)]
        emitter = _Emitter(builder, rows, builder.bitcast(panel.data, _BYTES), pairs)
        places = [
            [builder.gep(pointer_to_row(3, row, _FLOATS), [ir.Constant(_INT32, part)]) for part in range(_VECTORS)]
            for row in range(num_rows)
        ]
        totals = [
            [cgutils.alloca_once_value(builder, builder.load(place, align=4)) for place in of_row] for of_row in places
        ]
        with cgutils.for_range(builder, cgutils.unpack_tuple(builder, panel.shape, 2)[0]) as loop:
            line = emitter.line(loop.index)
            for row, of_row in enumerate(totals):
                value = emitter.everywhere(row, loop.index)
                for total, weights in zip(of_row, line, strict=True):
                    builder.store(emitter.add_product(builder.load(total), value, weights), total)
        for of_row, totals_of_row in zip(places, totals, strict=True):
            for place, total in zip(of_row, totals_of_row, strict=True):
                builder.store(builder.load(total), place, align=4)
        return context.get_dummy_value()

    return intrinsic(typed)


_one, _two, _three, _four, _five, _six = (_panel_kernel(number) for number in range(1, _ROWS + 1))


@compiled_inner()
def multiply_panel(hidden: Any, panel: Any, sums: Any) -> None:
    """Write the products of `hidden` with `panel` to `sums` `[num_rows, 64]`."""
    sums[:] = 0
    for first_line in range(0, panel.shape[0], _LINES):
        lines = slice(first_line, first_line + _LINES)
        add_products(hidden[:, lines], panel[lines], sums)


@compiled_inner()
def add_products(hidden: Any, panel: Any, sums: Any) -> None:
    """Add the products of `hidden` with `panel` to `sums` `[num_rows, 64]`, a few rows at a time, in equal parts."""
    first, num_rows = 0, hidden.shape[0]
    while first < num_rows:
        left = num_rows - first
        count = -(-left // -(-left // _ROWS))
        if count == 6:
            _six(hidden, panel, first, sums)
        elif count == 5:
            _five(hidden, panel, first, sums)
        elif count == 4:
            _four(hidden, panel, first, sums)
        elif count == 3:
            _three(hidden, panel, first, sums)
        elif count == 2:
            _two(hidden, panel, first, sums)
        else:
            _one(hidden, panel, first, sums)
        first += count


@compiled_inner()
def multiply_into(hidden: Any, panel: Any, bias: Any, sums: Any, product: Any) -> None:
    """A panel's part of `hidden @ weight.T + bias`, `[num_rows, 64]`, in the elements of `product`.

    `bias` is as long, or empty where there is none. `sums` is scratch of the same shape, float32.
    """
    multiply_panel(hidden, panel, sums)
    for row in range(hidden.shape[0]):
        for index in range(len(bias)):
            sums[row, index] += widened(bias[index])
        for index in range(PANEL):
            product[row, index] = narrowed(sums[row, index], product[row, index])


@compiled(nogil=True)
def multiply(hidden: Any, panels: Any, bias: Any, product: Any) -> None:
    """`hidden @ weight.T + bias` into `product` `[num_rows, out]`, an array of `as_array` as `bias` is, maybe empty.

    hidden: as `as_lanes` makes it.
    """
    for_each(_multiply_panel, len(panels), (hidden, panels, bias, product))


@compiled_inner()
def _multiply_panel(number: int, hidden: Any, panels: Any, bias: Any, product: Any) -> None:
    mine = slice(number * PANEL, (number + 1) * PANEL)
    sums = np.empty((hidden.shape[0], PANEL), np.float32)
    multiply_into(hidden, panels[number], bias[mine], sums, product[:, mine])
