"""A row of float32 as wide as a panel, in vector registers."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from llmservice_server.cpu.panel_product import PANEL

_INT32 = ir.IntType(32)


def _highest_of(context: Any, row: Any) -> Any:
    """The highest number of a row whose elements lie side by side; if there is NaN among them, any of them.

    numba keeps comparing one by one, lest NaN come out where it should not.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, value=arguments[0]).data
        width = PANEL
        vector = builder.load(builder.bitcast(data, ir.VectorType(ir.FloatType(), width).as_pointer()), align=4)
        nothing = ir.Constant(vector.type, ir.Undefined)
        while width > 1:
            width //= 2
            halves = [
                builder.shuffle_vector(
                    vector, nothing, ir.Constant(ir.VectorType(_INT32, width), list(range(start, start + width)))
                )
                for start in (0, width)
            ]
            vector = builder.select(builder.fcmp_ordered(">", *halves), *halves)
            nothing = ir.Constant(vector.type, ir.Undefined)
        return builder.extract_element(vector, ir.Constant(_INT32, 0))

    return types.float32(row), generate


highest_of: Any = intrinsic(_highest_of)
