"""An array's elements as kernels compute with them: read into float32 and rounded back, and e^x in vector registers.

numba knows no bfloat16 and no float16, so arrays of these come as the integers of their bits (`as_array`).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from llmservice_server.backend.cpu.compiled import compiled

_BITS = {torch.float32: torch.float32, torch.bfloat16: torch.uint16, torch.float16: torch.int16}
_LOG2_E = np.float32(math.log2(math.e))
_INT32 = ir.IntType(32)


def as_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The tensor's memory as the kernels take it. Raises KeyError for a dtype that they do not know."""
    bits = _BITS[tensor.dtype]
    return (tensor if bits is tensor.dtype else tensor.view(bits)).numpy()


def _widened(context: Any, value: Any) -> Any:
    """The float32 that an element stands for: one or two instructions, also in vector registers."""

    def from_bits(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        (bits,) = arguments
        if value == types.float32:
            return bits
        if value == types.int16:
            return builder.fpext(builder.bitcast(bits, ir.HalfType()), ir.FloatType())
        upper_half = builder.shl(builder.zext(bits, _INT32), ir.Constant(_INT32, 16))
        return builder.bitcast(upper_half, ir.FloatType())

    return types.float32(value), from_bits


def _narrowed(context: Any, value: Any, like: Any) -> Any:
    """A float32 rounded to the nearest element of the kind that `like` is, to even where there are two."""

    def to_bits(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = arguments[0]
        if like == types.float32:
            return number
        if like == types.int16:
            return builder.bitcast(builder.fptrunc(number, ir.HalfType()), ir.IntType(16))
        bits = builder.bitcast(number, _INT32)
        odd = builder.and_(builder.lshr(bits, ir.Constant(_INT32, 16)), ir.Constant(_INT32, 1))
        rounded = builder.add(builder.add(bits, ir.Constant(_INT32, 0x7FFF)), odd)
        quiet_nan = builder.or_(bits, ir.Constant(_INT32, 0x400000))  # which rounding might carry over to infinity
        kept = builder.select(builder.fcmp_unordered("uno", number, number), quiet_nan, rounded)
        return builder.trunc(builder.lshr(kept, ir.Constant(_INT32, 16)), ir.IntType(16))

    return like(types.float32, like), to_bits


def _float_of(context: Any, bits: Any) -> Any:
    """The float32 with these bits, an int32."""

    def reinterpret(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), reinterpret


def _converted(context: Any, value: Any, like: Any) -> Any:
    """An element as one of the kind that `like` is: as it is where it is one already."""

    def convert(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if value == like:
            return arguments[0]
        wide = _widened(context, value)[1](context, builder, types.float32(value), arguments[:1])
        return _narrowed(context, types.float32, like)[1](context, builder, None, [wide])

    return like(value, like), convert


def _joined(context: Any, first: Any, second: Any, like: Any) -> Any:
    """A lane of the kind that `like` is: a pair of bfloat16 as one int32, or else the first of the two."""

    def join(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if like != types.int32:
            return arguments[0]
        low, high = (builder.zext(argument, _INT32) for argument in arguments[:2])
        return builder.or_(low, builder.shl(high, ir.Constant(_INT32, 16)))

    return like(first, second, like), join


widened: Any = intrinsic(_widened)
narrowed: Any = intrinsic(_narrowed)
converted: Any = intrinsic(_converted)
joined: Any = intrinsic(_joined)
_float_of_bits: Any = intrinsic(_float_of)


@compiled(inline="always")
def exp(value: Any) -> Any:
    """e^value of a float32 between about -86 and 87, where it stays beyond. NaN stays NaN."""
    return exp2(value * _LOG2_E)


@compiled(inline="always")
def exp2(power: Any) -> Any:
    """2^power of a float32 between -125 and 126, where it stays beyond. NaN stays NaN.

    2^x is 2 to the nearest whole number, put together from its bits, times a polynomial in the rest (the one of Cephes'
    exp2f, good for -0.5 to 0.5): off by 2e-7 near 1, by 4e-6 of e^-80. Unlike a call of exp, a loop of these runs in
    vector registers.
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
    return (result * rest + np.float32(1)) * _float_of_bits(np.int32((np.int32(whole) + 127) << 23))
