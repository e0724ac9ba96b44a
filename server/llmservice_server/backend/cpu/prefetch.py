"""Asking for memory before it is needed: what lies scattered no CPU guesses."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

LINE_BYTES = 64
"""Of a cache line."""

_INT32, _BYTES = ir.IntType(32), ir.IntType(8).as_pointer()


def emit_prefetch(builder: Any, address: Any) -> None:
    """Write the instruction that fetches the line at `address`, an `i8*`, to be read soon."""
    kind = ir.FunctionType(ir.VoidType(), [_BYTES, _INT32, _INT32, _INT32])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    to_read, keep, data = (ir.Constant(_INT32, number) for number in (0, 3, 1))
    builder.call(prefetch, [address, to_read, keep, data])
