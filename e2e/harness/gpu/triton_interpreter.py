"""Our GPU kernels in Triton's interpreter: they run in numpy, on tensors in CPU memory, without a GPU.

Triton decides when a kernel is defined, so this must be imported before anything else imports the kernels. Other
processes do not inherit it: the environment is left as it was.
"""

import os
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

_BEFORE = os.environ.get("TRITON_INTERPRET")
os.environ["TRITON_INTERPRET"] = "1"
try:
    import triton
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    from llmservice_server.backend.cuda.kernels.jit import INTERPRETED
finally:
    if _BEFORE is None:
        del os.environ["TRITON_INTERPRET"]
    else:
        os.environ["TRITON_INTERPRET"] = _BEFORE
_PROPAGATES, triton.knobs.propagate_env = triton.knobs.propagate_env, False
triton.knobs.runtime.interpret = True  # asked again whenever a kernel runs
triton.knobs.propagate_env = _PROPAGATES

if not INTERPRETED:
    raise RuntimeError(
        "the kernels were imported before the interpreter was switched on: import harness.gpu.triton_interpreter first"
    )


def _call(function: interpreter.InterpretedFunction[Any], *args: Any, **settings: Any) -> Any:
    if core.is_builtin(core.load):  # what Triton's own functions use: it stays patched
        interpreter._patch_lang(function.fn)
    return function.rewrite()(*args, **settings)


_by_scalar = cache(interpreter._get_np_dtype)


def _numpy_dtype(dtype: Any) -> np.dtype[Any]:
    return np.dtype(np.uint64) if dtype.scalar.is_ptr() else _by_scalar(dtype.scalar)


@cache
def _shape(sizes: tuple[int, ...]) -> tuple[core.tuple, int, core.tuple, core.constexpr]:
    """As a type has it, with its number of elements, and as a tensor has both."""
    count = core.validate_block_shape(sizes)
    return core.tuple(sizes), count, core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(count)


def _set_block_type(block: core.block_type, element: core.dtype, shape: Any) -> None:
    sizes = tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
    if not sizes:
        raise TypeError("a block has at least one dimension")
    block.element_ty, (block.shape, block.numel, _, _) = element, _shape(sizes)
    block.name = f"<{sizes}, {element.name}>"


def _set_tensor(tensor: core.tensor, handle: Any, kind: core.dtype) -> None:
    tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
    _, _, tensor.shape, tensor.numel = _shape(tuple(kind.shape) if kind.is_block() else ())


_broadcast_unequal = TritonSemantic.broadcast_impl_value


def _broadcast(semantic: Any, left: core.tensor, right: core.tensor) -> tuple[core.tensor, core.tensor]:
    return (left, right) if left.shape is right.shape else _broadcast_unequal(semantic, left, right)


# Half of the interpreter's time computes nothing that a kernel or a test reads. Triton patches its language for each
# call of a function by a kernel, which has patched it already, computes whether integers overflow, which it discards
# unless `debug` is set, makes a table of all dtypes to look up one, checks and copies the few shapes that there are for
# every tensor, and compares those of two tensors size by size.
interpreter.InterpretedFunction.__call__ = _call
interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
interpreter._get_np_dtype = _numpy_dtype
core.block_type.__init__, core.tensor.__init__ = _set_block_type, _set_tensor
TritonSemantic.broadcast_impl_value = _broadcast
