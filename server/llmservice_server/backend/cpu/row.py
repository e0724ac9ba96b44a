"""A row of float32 as wide as a panel, in vector registers."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from llmservice_server.backend.cpu.panel_product import PANEL

_INT32 = ir.IntType(32)


def emit_highest(builder: Any, vector: Any) -> Any:
    """Write the code for the highest number of a vector of float32, a power of two of them; if there is NaN among them,
    any of them.

    numba keeps comparing one by one, lest NaN come out where it should not.
    """
    width = vector.type.count
    while width > 1:
        width //= 2
        kind, nothing = ir.VectorType(_INT32, width), ir.Constant(vector.type, ir.Undefined)
        halves = [
            builder.shuffle_vector(vector, nothing, ir.Constant(kind, list(range(start, start + width))))
            for start in (0, width)
        ]
        vector = builder.select(builder.fcmp_ordered(">", *halves), *halves)
    return builder.extract_element(vector, ir.Constant(_INT32, 0))


def _highest_of(context: Any, row: Any) -> Any:
    """Of a row whose elements lie side by side, as `emit_highest` has it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, value=arguments[0]).data
        start = builder.bitcast(data, ir.VectorType(ir.FloatType(), PANEL).as_pointer())
        return emit_highest(builder, builder.load(start, align=4))

    return types.float32(row), generate


highest_of: Any = intrinsic(_highest_of)
