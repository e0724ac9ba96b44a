"""Products by the tiles of AMX: an instruction multiplies 16 rows with 16 columns, of 32 bfloat16 or of 64 bytes each.

A tile is a register of 16 rows of 64 bytes. Weights lie in memory as the instruction takes them: a row of a tile is a
line of 16 columns, each a pair of bfloat16 or four 8-bit integers. Instructions: Intel 64 and IA-32 Architectures
Software Developer's Manual, volume 2, TDPBF16PS and TDPBUSD.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from llmservice_server.backend.cpu import llvm
from llmservice_server.backend.cpu.compiled import compiled_inner, intrinsic

TILE_ROWS = 16
"""Also the lines of weights, and the columns, of a tile."""
_TILE_BYTES = 64  # of a row of a tile
_LINES_AT_ONCE, _FEW_ROWS_LINES = 128, 1024
"""Lines that all rows are multiplied with before the next ones are read: 32 KiB, which stay in the core's first cache.
Up to 32 rows read each line once."""
_PREFETCHED_BYTES = 32768
"""How far ahead of their use lines are read into the second cache, a few in each step: all rows take that time."""
_SUMS, _FIRST_ROWS, _WEIGHTS = (0, 1, 2, 3), 4, 6  # numbers of tiles; 5: more rows, 7: more weights
_I8, _I64 = ir.IntType(8), ir.IntType(64)


def _call(builder: Any, name: str, *arguments: Any) -> None:
    """Call the LLVM intrinsic `llvm.x86.<name>`; numbers of tiles are ints."""
    values = [ir.Constant(_I8, each) if isinstance(each, int) else each for each in arguments]
    kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), values)


@intrinsic
def _configure(context: Any, first_rows: Any, more_rows: Any) -> Any:
    """Set the sizes of the tiles for `first_rows` of up to 16 rows, and `more_rows` below them, or none."""

    def generate(context: Any, builder: Any, _: Any, values: Any) -> Any:
        first, more = (builder.trunc(value, _I8) for value in values)
        has_more = builder.icmp_unsigned("!=", more, ir.Constant(_I8, 0))
        lower = builder.select(has_more, more, first)
        memory = cgutils.alloca_once(builder, ir.ArrayType(_I8, 64))
        builder.store(ir.Constant(ir.ArrayType(_I8, 64), [1] + [0] * 63), memory)  # palette 1
        rows = {0: first, 1: first, 2: lower, 3: lower, _FIRST_ROWS: first, _FIRST_ROWS + 1: lower}
        for tile in range(8):
            place = cgutils.gep_inbounds(builder, memory, 0, 48 + tile)
            builder.store(rows.get(tile, ir.Constant(_I8, TILE_ROWS)), place)
            builder.store(ir.Constant(_I8, _TILE_BYTES), cgutils.gep_inbounds(builder, memory, 0, 16 + 2 * tile))
        _call(builder, "ldtilecfg", builder.bitcast(memory, llvm.BYTES))
        return context.get_dummy_value()

    return types.void(first_rows, more_rows), generate


@intrinsic
def _release(context: Any) -> Any:
    """Let the CPU forget the tiles, so that it need not save them."""

    def generate(context: Any, builder: Any, _: Any, __: Any) -> Any:
        _call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), generate


def _kernel(*, wide: bool) -> Any:
    """A function `(hidden, columns, first, sums, prefetched)`: adds the products of rows from `first` on to `sums`.

    hidden: `[rows, lines]` int32. columns: `[lines, 64]` int32, a multiple of 16 lines. sums: `[rows, 64]` float32 of
    bfloat16, or int32 of 8-bit integers. prefetched: cache lines to prefetch in each step. Up to 16 rows are multiplied
    with all columns; 17 to 32, `wide`, with two halves of the columns in turn: each tile that is loaded is used twice.
    """
    parts = 2 if wide else 1

    def typed(context: Any, hidden: Any, columns: Any, first: Any, sums: Any, prefetched: Any) -> Any:
        name = "tdpbf16ps" if sums.dtype == types.float32 else "tdpbusd"

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            code = llvm.Arguments(context, builder, signature, arguments)
            address = code.address
            number, num_prefetched = arguments[2], arguments[4]
            row_stride, line_stride, sum_stride = (code.strides(argument)[0] for argument in (0, 1, 3))
            rows = [number, builder.add(number, ir.Constant(number.type, TILE_ROWS))][:parts]
            steps = builder.udiv(code.shape(1)[0], ir.Constant(number.type, TILE_ROWS))
            start = builder.gep(address(1, 0, 0), [ir.Constant(_I64, _PREFETCHED_BYTES)])
            step_bytes = builder.mul(num_prefetched, ir.Constant(_I64, llvm.CACHE_LINE_BYTES))
            width = len(_SUMS) // parts
            # In steps of this loop from the first row's on; the next lines are read while all rows are multiplied.
            passed = builder.mul(builder.udiv(number, ir.Constant(_I64, TILE_ROWS)), steps)
            for half in range(parts):
                places = [half * width + column for column in range(width)]
                totals = [(tile, address(3, rows[tile // width], TILE_ROWS * places[tile % width])) for tile in _SUMS]
                for tile, total in totals:
                    _call(builder, "tileloadd64", tile, total, sum_stride)
                with cgutils.for_range(builder, steps) as loop:
                    line = builder.mul(loop.index, ir.Constant(number.type, TILE_ROWS))
                    place = builder.add(passed, builder.add(loop.index, builder.mul(steps, ir.Constant(_I64, half))))
                    ahead = builder.gep(start, [builder.mul(place, step_bytes)])
                    with cgutils.for_range(builder, num_prefetched) as each:
                        offset = builder.mul(each.index, ir.Constant(_I64, llvm.CACHE_LINE_BYTES))
                        llvm.prefetch(builder, builder.gep(ahead, [offset]), soon=False)
                    for part, row in enumerate(rows):
                        _call(builder, "tileloadd64", _FIRST_ROWS + part, address(0, row, line), row_stride)
                    for column, place in enumerate(places):
                        weights = address(1, line, TILE_ROWS * place)
                        _call(builder, "tileloadd64", _WEIGHTS + column % 2, weights, line_stride)
                        for part in range(parts):
                            _call(builder, name, part * width + column, _FIRST_ROWS + part, _WEIGHTS + column % 2)
                for tile, total in totals:
                    _call(builder, "tilestored64", tile, total, sum_stride)
            return context.get_dummy_value()

        return types.void(hidden, columns, types.intp, sums, types.intp), generate

    return intrinsic(typed)


_narrow, _wide = _kernel(wide=False), _kernel(wide=True)


@compiled_inner()
def add_by_tiles(hidden: Any, columns: Any, sums: Any) -> None:
    """Add the products of `hidden` with `columns` to `sums`, as `_kernel` takes them, of any number of rows."""
    num_rows = hidden.shape[0]
    per_step = -(-TILE_ROWS * 4 // -(-num_rows // TILE_ROWS))
    at_once = _LINES_AT_ONCE if num_rows > 2 * TILE_ROWS else _FEW_ROWS_LINES
    for first_line in range(0, columns.shape[0], at_once):
        lines = slice(first_line, first_line + at_once)
        configured = 0
        for first in range(0, num_rows, 2 * TILE_ROWS):
            count = min(num_rows - first, 2 * TILE_ROWS)
            if count != configured:
                _configure(min(count, TILE_ROWS), max(count - TILE_ROWS, 0))
                configured = count
            if count > TILE_ROWS:
                _wide(hidden[:, lines], columns[lines], first, sums, per_step)
            else:
                _narrow(hidden[:, lines], columns[lines], first, sums, per_step)
    _release()


@intrinsic
def are_packed(context: Any, columns: Any) -> Any:
    """Whether the elements of `columns` are pairs of bfloat16 or four 8-bit integers; known when it is compiled."""
    known = ir.Constant(ir.IntType(1), int(columns.dtype == types.int32))
    return types.boolean(columns), lambda *_: known
