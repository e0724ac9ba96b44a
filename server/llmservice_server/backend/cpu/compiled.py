"""A loop whose rounds numba's threads share.

What `numba.prange` makes of a loop holds the loop's body four times over, one inside the other, and LLVM optimises and
translates each of them. A call of a function that is compiled already has one, and takes half as long to compile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_FASTMATH = {"reassoc", "contract", "arcp", "nsz"}  # sums in any order; infinity and NaN stay what they are
F = TypeVar("F", bound=Callable[..., Any])


def compiled(signature: str | None = None, **options: Any) -> Callable[[F], F]:
    """numba's `njit`; the compiled code is kept on disk where there is a folder for it (NUMBA_CACHE_DIR).

    With a signature it is compiled, or found there, at once. numba looks whether the function's own file has changed,
    not whether one that it calls has: after an edit of what others call, remove the `*.nbi` in `__pycache__`.
    """

    options = {
        "fastmath": _FASTMATH,
        "error_model": "numpy",  # a check for division by zero would keep loops scalar
        "no_cfunc_wrapper": True,  # their address is never needed
        **options,
    }

    def decorate(function: F) -> F:
        try:
            return numba.njit(signature, cache=True, **options)(function)  # type: ignore[return-value]
        except RuntimeError:  # nowhere to keep it: compiled anew by each process
            return numba.njit(signature, **options)(function)  # type: ignore[return-value]

    return decorate


def compiled_inner(signature: str | None = None, **options: Any) -> Callable[[F], F]:
    """`compiled`, for a function that only compiled ones call: from Python a call of it ends the process.

    Without what takes Python's objects apart for it, it compiles in a good fifth less time.
    """
    return compiled(signature, no_cpython_wrapper=True, **options)


def use_threads(number: int) -> int:
    """Have the kernels that this Python thread calls run in `number` threads, or a core each; returns how many.

    numba and torch share an OpenMP runtime, and numba sets its number of threads when it starts its own.
    """
    number = min(number, numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
    torchs = torch.get_num_threads()
    numba.set_num_threads(number)
    if torch.get_num_threads() != torchs:
        torch.set_num_threads(torchs)
    return number


_BYTES, _VOID = ir.IntType(8).as_pointer(), ir.VoidType()
_INTP = cgutils.intp_t
_KERNEL = ir.FunctionType(_VOID, [_BYTES.as_pointer(), _INTP.as_pointer(), _INTP.as_pointer(), _BYTES])
"""What a threading layer calls: addresses, of which the first is the first number; how many; steps; what is shared."""
_PARALLEL_FOR = ir.FunctionType(_VOID, [_BYTES] * 5 + [_INTP] * 3)


def _for_each(context: Any, body: Any, count: Any, arguments: Any) -> Any:
    """Call `body(number, *arguments)`, a compiled function, for each number below `count`, in as many threads as
    `compiled.use_threads` says, each of which has numbers that follow each other.

    Raises MemoryError where a call raises anything: nothing else goes wrong in a kernel.
    """
    numba.get_num_threads()  # starts the threads: the code that calls them finds them
    kinds = (types.unliteral(kind) for kind in arguments.types)
    compiled_body = body.dispatcher.get_compile_result(types.none(types.intp, *kinds))

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        _, num_calls, packed = values
        library = context.active_code_library
        library.add_linking_library(compiled_body.library)
        library._reload_init.add(numba.get_num_threads)  # likewise where the code comes from a cache
        shared = cgutils.alloca_once_value(builder, cgutils.make_anonymous_struct(builder, [packed, cgutils.false_bit]))
        kernel = _kernel(context, builder.module, compiled_body.fndesc, shared.type)
        first = cgutils.alloca_once_value(builder, ir.Constant(_BYTES, None))
        howmany = cgutils.alloca_once_value(builder, num_calls)
        step = cgutils.alloca_once_value(builder, _INTP(1))
        parallel_for = cgutils.get_or_insert_function(builder.module, _PARALLEL_FOR, "numba_parallel_for")
        num_threads = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_INTP, []), "get_num_threads")
        addresses = [builder.bitcast(value, _BYTES) for value in (kernel, first, howmany, step, shared)]
        builder.call(parallel_for, [*addresses, _INTP(0), _INTP(1), builder.call(num_threads, [])])
        with cgutils.if_unlikely(builder, builder.load(_failed(builder, shared))):
            context.call_conv.return_user_exc(builder, MemoryError, ("a kernel's thread has no memory left",))
        return context.get_dummy_value()

    return types.none(body, types.intp, arguments), generate


def _kernel(context: Any, module: Any, body: Any, shared_kind: Any) -> ir.Function:
    """What a thread does: calls of `body` with the arguments that lie at `shared_kind`, an address."""
    kernel = ir.Function(module, _KERNEL, module.get_unique_name("kernel"))
    kernel.linkage = "internal"
    builder = ir.IRBuilder(kernel.append_basic_block())
    starts, counts, _, data = kernel.args
    first, count = builder.ptrtoint(builder.load(starts), _INTP), builder.load(counts)
    shared = builder.bitcast(data, shared_kind)
    arguments = cgutils.unpack_tuple(builder, builder.load(cgutils.gep_inbounds(builder, shared, 0, 0)))
    function = context.declare_function(module, body)
    with cgutils.for_range(builder, count, intp=_INTP) as loop:
        values = [builder.add(first, loop.index), *arguments]
        status, _ = context.call_conv.call_function(builder, function, body.restype, body.argtypes, values)
        with cgutils.if_unlikely(builder, status.is_error):
            builder.store(cgutils.true_bit, _failed(builder, shared))
    builder.ret_void()
    return kernel


def _failed(builder: Any, shared: Any) -> Any:
    return cgutils.gep_inbounds(builder, shared, 0, 1)


for_each: Any = intrinsic(_for_each)
