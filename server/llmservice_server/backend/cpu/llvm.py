"""LLVM instructions that the kernels share: vectors of float32, dtype conversion, prefetch, 2^x.

numba has neither bfloat16 nor float16, so arrays of these hold the elements' bits as uint16 and int16 (`as_array`), and
kernels convert them to float32 and back. Arrays of uint8 hold powers of two: their exponents plus 127; those of int8,
numbers of float8_e4m3fn that are not negative. Functions that take a `builder` emit instructions while numba compiles
an intrinsic; the intrinsics and functions at the end are called by compiled code.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils

from llmservice_server.backend.cpu.compiled import compiled, intrinsic

CACHE_LINE_BYTES = 64
FLOAT, HALF, INT16, INT32, INT64 = ir.FloatType(), ir.HalfType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
BYTES = ir.IntType(8).as_pointer()

_NUMPY_DTYPES = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}
_NUMPY_DTYPES |= {each: each for each in (torch.float32, torch.uint8, torch.int8)}
_E4M3_PLACES, _E4M3_FACTOR = 20, 2.0**120  # of its bits in those of a float32, which has a larger bias
_LOG2_E = np.float32(math.log2(math.e))


def as_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The tensor's memory as the kernels take it. Raises KeyError for a dtype that they do not support."""
    dtype = _NUMPY_DTYPES[tensor.dtype]
    return (tensor if dtype is tensor.dtype else tensor.view(dtype)).numpy()


def splat(element: Any, number: float, lanes: int) -> ir.Constant:
    """A constant vector."""
    return ir.Constant(ir.VectorType(element, lanes), [number] * lanes)


def element_address(context: Any, builder: Any, kind: Any, value: Any, *index: Any) -> Any:
    """The address, an `i8*`, of an element of the array `value` of numba's type `kind`."""
    array = context.make_array(kind)(context, builder, value=value)
    address = builder.bitcast(array.data, BYTES)
    for number, stride in zip(index, cgutils.unpack_tuple(builder, array.strides), strict=True):
        factor = ir.Constant(stride.type, number) if isinstance(number, int) else number
        address = builder.gep(address, [builder.mul(factor, stride)])
    return address


class Arguments:
    """Those of an intrinsic whose code is emitted, by their number."""

    def __init__(self, context: Any, builder: Any, signature: Any, values: Any) -> None:
        self.context, self.builder, self.kinds, self.values = context, builder, signature.args, values

    def address(self, argument: int, *index: Any) -> Any:
        return element_address(self.context, self.builder, self.kinds[argument], self.values[argument], *index)

    def shape(self, argument: int) -> Any:
        return cgutils.unpack_tuple(self.builder, self._array(argument).shape)

    def strides(self, argument: int) -> Any:
        return cgutils.unpack_tuple(self.builder, self._array(argument).strides)

    def _array(self, argument: int) -> Any:
        return self.context.make_array(self.kinds[argument])(self.context, self.builder, value=self.values[argument])


def load(builder: Any, address: Any, dtype: Any, lanes: int) -> Any:
    """A vector of successive elements of numba's `dtype`, at any address that is aligned for one element."""
    element = FLOAT if dtype == types.float32 else ir.IntType(dtype.bitwidth)
    pointer = builder.bitcast(address, ir.VectorType(element, lanes).as_pointer())
    return builder.load(pointer, align=dtype.bitwidth // 8)


def store(builder: Any, vector: Any, address: Any, dtype: Any = types.float32) -> None:
    """Write a vector of numba's `dtype`, at any address that is aligned for one element."""
    builder.store(vector, builder.bitcast(address, vector.type.as_pointer()), align=dtype.bitwidth // 8)


def broadcast(builder: Any, number: Any, lanes: int) -> Any:
    """A vector with `number` in each lane."""
    undefined = ir.Constant(ir.VectorType(number.type, lanes), ir.Undefined)
    first = builder.insert_element(undefined, number, ir.Constant(INT32, 0))
    return builder.shuffle_vector(first, undefined, splat(INT32, 0, lanes))


def fma(builder: Any, left: Any, right: Any, total: Any) -> Any:
    """`left * right + total`, rounded once where the CPU has an instruction for it."""
    return builder.fadd(builder.fmul(left, right, flags=("contract",)), total, flags=("contract",))


def reduce_max(builder: Any, vector: Any) -> Any:
    """The maximum of a vector of float32 with a power of two of lanes; any of its numbers if there is NaN among them.

    numba compares one number at a time instead, to keep NaN out of the result.
    """
    lanes = vector.type.count
    while lanes > 1:
        lanes //= 2
        kind, undefined = ir.VectorType(INT32, lanes), ir.Constant(vector.type, ir.Undefined)
        halves = [
            builder.shuffle_vector(vector, undefined, ir.Constant(kind, list(range(start, start + lanes))))
            for start in (0, lanes)
        ]
        vector = builder.select(builder.fcmp_ordered(">", *halves), *halves)
    return builder.extract_element(vector, ir.Constant(INT32, 0))


def reduce_add(builder: Any, vectors: list[Any]) -> Any:
    """The sum of each of the vectors, as one vector; there are as many as each has lanes, a power of two."""
    lanes = len(vectors)
    even, odd = (ir.Constant(ir.VectorType(INT32, lanes), list(range(first, 2 * lanes, 2))) for first in (0, 1))
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [builder.fadd(*(builder.shuffle_vector(*pair, half) for half in (even, odd))) for pair in pairs]
    return vectors[0]


def prefetch(builder: Any, address: Any, *, soon: bool = True) -> None:
    """Fetch the cache line at `address`, an `i8*`, which will be read `soon`; otherwise not into the first cache."""
    kind = ir.FunctionType(ir.VoidType(), [BYTES, INT32, INT32, INT32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    read, locality, data_cache = (ir.Constant(INT32, number) for number in (0, 3 if soon else 2, 1))
    builder.call(function, [address, read, locality, data_cache])


def bits_to_float32(builder: Any, bits: Any, dtype: Any) -> Any:
    """An element, or a vector of elements, of numba's `dtype` in float32: exact, in one or two instructions."""
    if dtype == types.float32:
        return bits
    places = 23 if dtype == types.uint8 else _E4M3_PLACES if dtype == types.int8 else 16
    float_kind, half_kind, int_kind, shift = FLOAT, HALF, INT32, ir.Constant(INT32, places)
    factor = ir.Constant(FLOAT, _E4M3_FACTOR)
    if isinstance(bits.type, ir.VectorType):
        float_kind, half_kind, int_kind = (ir.VectorType(kind, bits.type.count) for kind in (FLOAT, HALF, INT32))
        shift, factor = splat(INT32, places, bits.type.count), splat(FLOAT, _E4M3_FACTOR, bits.type.count)
    if dtype == types.int16:
        return builder.fpext(builder.bitcast(bits, half_kind), float_kind)
    number = builder.bitcast(builder.shl(builder.zext(bits, int_kind), shift), float_kind)
    return builder.fmul(number, factor) if dtype == types.int8 else number


def float32_to_bits(builder: Any, number: Any, dtype: Any) -> Any:
    """The element of numba's `dtype` nearest to a float32, to even between two; or a vector of them."""
    if dtype == types.float32:
        return number

    def alike(kind: Any) -> Any:
        return ir.VectorType(kind, number.type.count) if isinstance(number.type, ir.VectorType) else kind

    def constant(value: int) -> Any:
        kind = alike(INT32)
        return ir.Constant(kind, value) if kind == INT32 else splat(INT32, value, kind.count)

    if dtype == types.int16:
        return builder.bitcast(builder.fptrunc(number, alike(HALF)), alike(INT16))
    bits = builder.bitcast(number, alike(INT32))
    odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    rounded = builder.add(builder.add(bits, constant(0x7FFF)), odd)
    quiet_nan = builder.or_(bits, constant(0x400000))  # rounding might turn NaN into infinity
    kept = builder.select(builder.fcmp_unordered("uno", number, number), quiet_nan, rounded)
    return builder.trunc(builder.lshr(kept, constant(16)), alike(INT16))


@intrinsic
def to_float32(context: Any, value: Any) -> Any:
    """An element in float32."""
    return types.float32(value), lambda _, builder, __, values: bits_to_float32(builder, values[0], value)


@intrinsic
def from_float32(context: Any, value: Any, like: Any) -> Any:
    """A float32, rounded to an element of the dtype of `like`."""
    return like(types.float32, like), lambda _, builder, __, values: float32_to_bits(builder, values[0], like)


@intrinsic
def convert(context: Any, value: Any, like: Any) -> Any:
    """An element, rounded to one of the dtype of `like`; the same bits where it has that dtype."""

    def generate(_: Any, builder: Any, __: Any, values: Any) -> Any:
        if value == like:
            return values[0]
        return float32_to_bits(builder, bits_to_float32(builder, values[0], value), like)

    return like(value, like), generate


@intrinsic
def pair(context: Any, first: Any, second: Any, like: Any) -> Any:
    """Two bfloat16 as the int32 that a product takes, where `like` is one; else `first`."""

    def generate(_: Any, builder: Any, __: Any, values: Any) -> Any:
        if like != types.int32:
            return values[0]
        low, high = (builder.zext(value, INT32) for value in values[:2])
        return builder.or_(low, builder.shl(high, ir.Constant(INT32, 16)))

    return like(first, second, like), generate


@compiled(inline="always")
def exp(value: Any) -> Any:
    """e^value of a float32, which is clamped to about -86 to 87. NaN stays NaN."""
    return exp2(value * _LOG2_E)


@compiled(inline="always")
def exp2(power: Any) -> Any:
    """2^power of a float32, which is clamped to -125 to 126. NaN stays NaN.

    The product of 2 to the nearest integer, made of its bits, and a polynomial of the rest (exp2f of Cephes, for -0.5
    to 0.5). The relative error is 2e-7 near 1, and 4e-6 at e^-80. A loop of these is vectorized, unlike calls of exp.
    """
    if power < -125:  # comparisons, so that NaN stays
        power = np.float32(-125)
    if power > 126:
        power = np.float32(126)
    whole = np.floor(power + np.float32(0.5))
    rest = power - whole
    result = np.float32(1.535336188319500e-4)
    result = result * rest + np.float32(1.339887440266574e-3)
    result = result * rest + np.float32(9.618437357674640e-3)
    result = result * rest + np.float32(5.550332471162809e-2)
    result = result * rest + np.float32(2.402264791363012e-1)
    result = result * rest + np.float32(6.931472028550421e-1)
    return (result * rest + np.float32(1)) * np.int32((np.int32(whole) + 127) << 23).view(np.float32)
