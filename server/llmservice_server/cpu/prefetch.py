"""Asking for memory before it is needed: what lies scattered no CPU guesses."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from llmservice_server.cpu.compiled import compiled_inner

LINE_BYTES = 64
"""Of a cache line."""

_INT32, _BYTES = ir.IntType(32), ir.IntType(8).as_pointer()


def emit_prefetch(builder: Any, address: Any) -> None:
    """Write the instruction that fetches the line at `address`, an `i8*`, to be read soon."""
    kind = ir.FunctionType(ir.VoidType(), [_BYTES, _INT32, _INT32, _INT32])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    to_read, keep, data = (ir.Constant(_INT32, number) for number in (0, 3, 1))
    builder.call(prefetch, [address, to_read, keep, data])


def _prefetch(context: Any, array: Any, offset: Any) -> Any:
    """The line `offset` bytes behind the start of a contiguous array."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        start = context.make_array(signature.args[0])(context, builder, value=arguments[0]).data
        emit_prefetch(builder, builder.gep(builder.bitcast(start, _BYTES), [arguments[1]]))
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


_prefetch_line: Any = intrinsic(_prefetch)


@compiled_inner()
def prefetch_ahead(array: Any) -> None:
    """All of a contiguous array."""
    for offset in range(0, array.size * array.itemsize, LINE_BYTES):
        _prefetch_line(array, offset)
