"""Compilation by numba, and a parallel loop.

`numba.prange` puts four nested copies of a loop's body into the code, and LLVM compiles each of them. `for_each` calls
a function that is compiled once, which takes half as long to compile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.typeinfer import register_dispatcher
from numba.extending import intrinsic as numba_intrinsic

from llmservice_server.backend.cpu.kernel_cache import KernelCache

_FASTMATH = {"reassoc", "contract", "arcp", "nsz"}  # sums in any order; infinity and NaN are kept
F = TypeVar("F", bound=Callable[..., Any])


def compiled(signature: str | None = None, **options: Any) -> Callable[[F], F]:
    """numba's `njit`, whose results `kernel_cache` keeps. With a signature it is compiled, or loaded, at once."""

    def decorate(function: F) -> F:
        dispatcher = _dispatcher(function, **options)
        dispatcher._cache = KernelCache(function)  # numba's parameter `cache` takes none of ours
        if signature is not None:
            with register_dispatcher(dispatcher):
                dispatcher.compile(signature)
            dispatcher.disable_compile()
        return dispatcher  # type: ignore[no-any-return]

    return decorate


def compiled_inner(signature: str | None = None, *, owns_arrays: bool = False, **options: Any) -> Callable[[F], F]:
    """`compiled`, for a function that only compiled functions call: a call from Python ends the process.

    It is optimised, and becomes machine code, as a part of its callers alone: numba does both at each level of calls,
    which takes longer. With a signature it is left to numba, which makes the sampler faster.

    One that allocates or returns arrays `owns_arrays`. The others count no references to arrays, which would be two
    atomic instructions for each part that they take of one.
    """
    options["no_cpython_wrapper"] = True
    if signature is not None:
        return compiled(signature, **options)
    return lambda function: _dispatcher(function, pipeline_class=_InnerCompiler, _nrt=owns_arrays, **options)


def _dispatcher(function: Callable[..., Any], **options: Any) -> Any:
    return numba.njit(
        **{
            "fastmath": _FASTMATH,
            "error_model": "numpy",  # a check for division by zero would keep loops scalar
            "no_cfunc_wrapper": True,  # the function's address is never needed
            **options,
        }
    )(function)


class _InnerLibrary(JITCodeLibrary):
    """The code of a function, as it is before the optimisation of the whole kernel."""

    def _optimize_final_module(self) -> None:
        """Done for the callers."""

    def _finalize_final_module(self) -> None:
        """Done for the callers: no machine code is made."""
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """numba asks once all code is added; it gets what it gets of other functions without a wrapper for Python."""
        self._ensure_finalized()  # type: ignore[no-untyped-call]
        return 0

    @property
    def codegen(self) -> _InnerLibrary:
        """numba asks in order to call `set_env`."""
        return self

    def set_env(self, name: str, environment: Any) -> None:
        """numba would write the address of `environment` into the machine code; only calls from Python read it."""


class _InnerCompiler(Compiler):
    def define_pipelines(self) -> Any:
        state = self.state
        state.library = _InnerLibrary(state.targetctx.codegen(), state.func_id.func_qualname)  # type: ignore[no-untyped-call]
        return super().define_pipelines()  # type: ignore[no-untyped-call]


def intrinsic(function: Callable[..., Any]) -> Any:
    """numba's `intrinsic`, typed: compiled code calls it without the first argument."""
    return numba_intrinsic(function)


def use_threads(number: int) -> int:
    """Run the kernels that this Python thread calls in `number` threads, at most one per core; returns their number.

    numba and torch share an OpenMP runtime, and numba changes its number of threads when it starts.
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
"""What numba's threading layer calls: addresses (the first is the first number), counts, steps, shared data."""
_PARALLEL_FOR = ir.FunctionType(_VOID, [_BYTES] * 5 + [_INTP] * 3)
_MOST_PARTS = 64
"""Of a loop's numbers; more threads take numbers of the parts of others."""
_PART = ir.ArrayType(_INTP, 8)  # the next number and the end; a cache line, which its thread does not share
_NUM_PARTS, _PARTS, _FAILED = 1, 2, 3  # in the shared data, after the arguments


def _for_each(context: Any, body: Any, count: Any, arguments: Any) -> Any:
    """Call `body(number, *arguments)`, a compiled function, for each number below `count`.

    Each of the threads of `use_threads` has a part, of successive numbers. One that is done takes numbers of the
    others: a core that other processes use, or whose other hyperthread is busy, is half as fast. Raises MemoryError if
    a call raises: kernels raise nothing else.
    """
    numba.get_num_threads()  # starts the threads and loads the symbols that the code calls
    kinds = (types.unliteral(kind) for kind in arguments.types)
    compiled_body = body.dispatcher.get_compile_result(types.none(types.intp, *kinds))

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        _, num_calls, packed = values
        library = context.active_code_library
        library.add_linking_library(compiled_body.library)
        library._reload_init.add(numba.get_num_threads)  # likewise if the code comes from the cache
        get_num_threads = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_INTP, []), "get_num_threads")
        num_threads = builder.call(get_num_threads, [])
        most = _INTP(_MOST_PARTS)
        num_parts = builder.select(builder.icmp_signed("<", num_threads, most), num_threads, most)
        parts = cgutils.alloca_once(builder, _PART, size=_MOST_PARTS)
        with cgutils.for_range(builder, num_parts, intp=_INTP) as loop:
            ends = [
                builder.sdiv(builder.mul(part, num_calls), num_parts)
                for part in (loop.index, builder.add(loop.index, _INTP(1)))
            ]
            for place, end in enumerate(ends):
                builder.store(end, builder.gep(parts, [loop.index, _INTP(place)]))
        packed = _borrowed(context, builder, arguments, packed)
        members = [packed, num_parts, parts, cgutils.false_bit]
        shared = cgutils.alloca_once_value(builder, cgutils.make_anonymous_struct(builder, members))
        kernel = _kernel(context, builder.module, compiled_body.fndesc, shared.type)
        first = cgutils.alloca_once_value(builder, ir.Constant(_BYTES, None))
        counts = cgutils.alloca_once_value(builder, num_threads)
        step = cgutils.alloca_once_value(builder, _INTP(1))
        parallel_for = cgutils.get_or_insert_function(builder.module, _PARALLEL_FOR, "numba_parallel_for")
        addresses = [builder.bitcast(value, _BYTES) for value in (kernel, first, counts, step, shared)]
        builder.call(parallel_for, [*addresses, _INTP(0), _INTP(1), num_threads])
        with cgutils.if_unlikely(builder, builder.load(_member(builder, shared, _FAILED))):
            context.call_conv.return_user_exc(builder, MemoryError, ("a kernel's thread has no memory left",))
        return context.get_dummy_value()

    return types.none(body, types.intp, arguments), generate


def _borrowed(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    """Arrays, in tuples or not, without the counts of references to them, which threads would wait for.

    The caller holds the arrays until all threads are done.
    """
    if isinstance(kind, types.Tuple | types.UniTuple):
        for place, part in enumerate(kind.types):
            element = _borrowed(context, builder, part, builder.extract_value(value, place))
            value = builder.insert_value(value, element, place)
    elif isinstance(kind, types.Array):
        array = context.make_array(kind)(context, builder, value=value)
        array.meminfo = cgutils.get_null_value(array.meminfo.type)
        value = array._getvalue()
    return value


def _kernel(context: Any, module: Any, body: Any, shared_kind: Any) -> ir.Function:
    """What a thread runs: calls of `body` with the arguments in memory of type `shared_kind`.

    The first number of the threading layer is the thread's part.
    """
    kernel = ir.Function(module, _KERNEL, module.get_unique_name("kernel"))
    kernel.linkage = "internal"
    builder = ir.IRBuilder(kernel.append_basic_block())
    starts, _, _, data = kernel.args
    first, shared = builder.ptrtoint(builder.load(starts), _INTP), builder.bitcast(data, shared_kind)
    arguments = cgutils.unpack_tuple(builder, builder.load(_member(builder, shared, 0)))
    num_parts, parts = (builder.load(_member(builder, shared, place)) for place in (_NUM_PARTS, _PARTS))
    function = context.declare_function(module, body)
    with cgutils.for_range(builder, num_parts, intp=_INTP) as loop:
        part = builder.srem(builder.add(first, loop.index), num_parts)
        following, end = (builder.gep(parts, [part, _INTP(place)]) for place in (0, 1))
        take, call, done = (builder.append_basic_block(name) for name in ("take", "call", "done"))
        builder.branch(take)
        builder.position_at_end(take)
        number = builder.atomic_rmw("add", following, _INTP(1), "monotonic")
        builder.cbranch(builder.icmp_signed("<", number, builder.load(end)), call, done)
        builder.position_at_end(call)
        values = [number, *arguments]
        status, _ = context.call_conv.call_function(builder, function, body.restype, body.argtypes, values)
        with cgutils.if_unlikely(builder, status.is_error):
            builder.store(cgutils.true_bit, _member(builder, shared, _FAILED))
        builder.branch(take)
        builder.position_at_end(done)
    builder.ret_void()
    return kernel


def _member(builder: Any, shared: Any, place: int) -> Any:
    return cgutils.gep_inbounds(builder, shared, 0, place)


for_each: Any = intrinsic(_for_each)
