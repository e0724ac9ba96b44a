"""Attention of a group of query heads over a tile of keys and values, in vector registers.

A vector has `lanes` float32, a tile as many keys, and a head is `vectors` of them long. numba's loops know these
numbers, and how many heads a group has, only when they run; here they are part of the code: sums stay in registers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from llmservice_server.backend.cpu.prefetch import LINE_BYTES, emit_prefetch
from llmservice_server.backend.cpu.row import emit_highest

_LANES = 16  # of AVX-512; on narrower CPUs LLVM takes two registers for one of these
_SUMS = 24
"""Vectors that are added up at a time, of the 32 that a CPU has."""

_FLOAT, _INT16, _INT32 = ir.FloatType(), ir.IntType(16), ir.IntType(32)
_BYTES = ir.IntType(8).as_pointer()

_KEPT = 20
"""Vectors of queries that stay in registers, beside those of a key."""

LOWEST = -3e38

Constants = npt.NDArray[np.void]


def constants_of(group: int, head_dim: int) -> Constants:
    """An array whose type tells three numbers: the lengths of its element's parts `group`, `vectors` and `lanes`."""
    lanes = next(lanes for lanes in (_LANES, 8, 4, 2, 1) if head_dim % lanes == 0)
    parts = {"group": group, "vectors": head_dim // lanes, "lanes": lanes}
    return np.zeros(1, [(name, np.uint8, (length,)) for name, length in parts.items()])


class _Code:
    """Writes code for one signature, whose last argument is of `Constants`."""

    def __init__(self, context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        self.builder = builder
        parts = signature.args[-1].dtype.fields
        self.group, self.vectors, self.lanes = (parts[name].type.shape[0] for name in ("group", "vectors", "lanes"))
        self.arrays = [
            context.make_array(kind)(context, builder, value=value) if isinstance(kind, types.Array) else value
            for kind, value in zip(signature.args, arguments, strict=True)
        ]
        self.kinds = [getattr(kind, "dtype", kind) for kind in signature.args]
        self.floats = ir.VectorType(_FLOAT, self.lanes)

    def address(self, array: int, *place: Any) -> Any:
        """Of an element of an argument; the last dimension is contiguous."""
        builder, shape = self.builder, self.arrays[array]
        strides = cgutils.unpack_tuple(builder, shape.strides)
        start = builder.bitcast(shape.data, _BYTES)
        for number, stride in zip(place, strides, strict=True):
            index = ir.Constant(stride.type, number) if isinstance(number, int) else number
            start = builder.gep(start, [builder.mul(index, stride)])
        return start

    def load(self, array: int, *place: Any) -> Any:
        """A vector of float32, widened from whatever the elements are."""
        builder, kind, start = self.builder, self.kinds[array], self.address(array, *place)
        if kind == types.float32:
            return builder.load(builder.bitcast(start, self.floats.as_pointer()), align=4)
        bits = builder.load(builder.bitcast(start, ir.VectorType(_INT16, self.lanes).as_pointer()), align=2)
        if kind == types.int16:
            return builder.fpext(builder.bitcast(bits, ir.VectorType(ir.HalfType(), self.lanes)), self.floats)
        wide = ir.VectorType(_INT32, self.lanes)
        return builder.bitcast(builder.shl(builder.zext(bits, wide), ir.Constant(wide, [16] * self.lanes)), self.floats)

    def prefetch_row(self, array: int, row: Any) -> None:
        """A row of a head's elements, soon to be read."""
        start, num_bytes = self.address(array, row, 0), self.vectors * self.lanes * self.kinds[array].bitwidth // 8
        for offset in range(0, num_bytes, LINE_BYTES):
            emit_prefetch(self.builder, self.builder.gep(start, [ir.Constant(_INT32, offset)]))

    def store(self, vector: Any, array: int, *place: Any) -> None:
        self.builder.store(vector, self.builder.bitcast(self.address(array, *place), self.floats.as_pointer()), align=4)

    def everywhere(self, array: int, *place: Any) -> Any:
        """A float32 in each lane."""
        start = self.builder.bitcast(self.address(array, *place), _FLOAT.as_pointer())
        return self.in_each_lane(self.builder.load(start))

    def in_each_lane(self, number: Any) -> Any:
        nothing = ir.Constant(ir.VectorType(number.type, self.lanes), ir.Undefined)
        first = self.builder.insert_element(nothing, number, ir.Constant(_INT32, 0))
        zeros = ir.Constant(ir.VectorType(_INT32, self.lanes), [0] * self.lanes)
        return self.builder.shuffle_vector(first, nothing, zeros)

    def add_product(self, total: Any, left: Any, right: Any) -> Any:
        product = self.builder.fmul(left, right, flags=("contract",))
        return self.builder.fadd(product, total, flags=("contract",))

    def sums_of_lanes(self, vectors: list[Any]) -> Any:
        """As many vectors as each has lanes, to one with the sum of each: neighbours are added until one is left."""
        while len(vectors) > 1:
            pairs = zip(vectors[::2], vectors[1::2], strict=True)
            vectors = [self.builder.fadd(*self._deinterleaved(left, right)) for left, right in pairs]
        return vectors[0]

    def _deinterleaved(self, left: Any, right: Any) -> tuple[Any, Any]:
        """Two vectors' even lanes, and their odd ones."""
        kind = ir.VectorType(_INT32, self.lanes)
        even, odd = (ir.Constant(kind, list(range(first, 2 * self.lanes, 2))) for first in (0, 1))
        return self.builder.shuffle_vector(left, right, even), self.builder.shuffle_vector(left, right, odd)


def _multiply_tile(context: Any, queries: Any, keys: Any, upcoming: Any, parts: Any, constants: Any) -> Any:
    """Write the products of `queries` `[group, head_dim]` with `keys` `[num_keys, head_dim]`, of which there are no
    more than lanes, to `parts` `[group, lanes, lanes]`: each as the lanes that `sum_tile` adds up. With each key a row
    of `upcoming`, as many or more, is asked for from memory, so that computing and waiting take the same time."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code = _Code(context, builder, signature, arguments)
        num_keys = cgutils.unpack_tuple(builder, code.arrays[1].shape)[0]
        places = [(head, code.lanes * part) for head in range(code.group) for part in range(code.vectors)]
        kept = {place: code.load(0, *place) for place in places[:_KEPT]}  # else each key would have them loaded again
        with cgutils.for_range(builder, num_keys) as loop:
            code.prefetch_row(2, loop.index)
            key = [code.load(1, loop.index, code.lanes * part) for part in range(code.vectors)]
            for head in range(code.group):
                query = [kept.get(place) or code.load(0, *place) for place in places if place[0] == head]
                total = builder.fmul(key[0], query[0])
                for part in range(1, code.vectors):
                    total = code.add_product(total, key[part], query[part])
                code.store(total, 3, head, loop.index, 0)
        return context.get_dummy_value()

    return types.void(queries, keys, upcoming, parts, constants), generate


def _sum_tile(context: Any, parts: Any, num_keys: Any, scores: Any, highest: Any, constants: Any) -> Any:
    """Add up the lanes of `parts` to `scores` `[group, lanes]`, the lowest number there is behind `num_keys`, and write
    the highest of each row; if there is NaN among them, any of them."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code = _Code(context, builder, signature, arguments)
        numbers = ir.VectorType(_INT32, code.lanes)
        lane = ir.Constant(numbers, list(range(code.lanes)))
        lowest = ir.Constant(code.floats, [LOWEST] * code.lanes)
        end = code.in_each_lane(builder.trunc(arguments[1], _INT32))
        is_key = builder.icmp_signed("<", lane, end)
        for head in range(code.group):
            sums = code.sums_of_lanes([code.load(0, head, key, 0) for key in range(code.lanes)])
            sums = builder.select(is_key, sums, lowest)
            code.store(sums, 2, head, 0)
            builder.store(emit_highest(builder, sums), builder.bitcast(code.address(3, head), _FLOAT.as_pointer()))
        return context.get_dummy_value()

    return types.void(parts, types.intp, scores, highest, constants), generate


def _add_tile(context: Any, weights: Any, values: Any, upcoming: Any, sums: Any, constants: Any) -> Any:
    """Add the weighted `values` `[num_keys, head_dim]` to `sums` `[group, head_dim]`; weights: `[group, lanes]`.
    upcoming: as `multiply_tile` has it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code = _Code(context, builder, signature, arguments)
        num_keys = cgutils.unpack_tuple(builder, code.arrays[1].shape)[0]
        at_a_time = max(1, _SUMS // code.group)
        for first in range(0, code.vectors, at_a_time):
            places = [code.lanes * part for part in range(first, min(first + at_a_time, code.vectors))]
            totals = {
                (head, place): cgutils.alloca_once_value(builder, code.load(3, head, place))
                for place in places
                for head in range(code.group)
            }
            with cgutils.for_range(builder, num_keys) as loop:
                if first == 0:
                    code.prefetch_row(2, loop.index)
                value = {place: code.load(1, loop.index, place) for place in places}
                for head in range(code.group):
                    weight = code.everywhere(0, head, loop.index)
                    for place in places:
                        total = totals[head, place]
                        builder.store(code.add_product(builder.load(total), weight, value[place]), total)
            for (head, place), total in totals.items():
                code.store(builder.load(total), 3, head, place)
        return context.get_dummy_value()

    return types.void(weights, values, upcoming, sums, constants), generate


multiply_tile: Any = intrinsic(_multiply_tile)
sum_tile: Any = intrinsic(_sum_tile)
add_tile: Any = intrinsic(_add_tile)
