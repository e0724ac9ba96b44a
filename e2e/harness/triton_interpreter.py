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
        "the kernels were imported before the interpreter was switched on: import harness.triton_interpreter first"
    )


def _call(function: interpreter.InterpretedFunction[Any], *args: Any, **settings: Any) -> Any:
    if core.is_builtin(core.load):  # what Triton's own functions use: it stays patched
        interpreter._patch_lang(function.fn)
    return function.rewrite()(*args, **settings)


_by_scalar = cache(interpreter._get_np_dtype)


def _numpy_dtype(dtype: Any) -> np.dtype[Any]:
    return np.dtype(np.uint64) if dtype.scalar.is_ptr() else _by_scalar(dtype.scalar)


# Half of the interpreter's time computes nothing that a kernel or a test reads. Triton patches its language for each
# call of a function by a kernel, which has patched it already, computes whether integers overflow, which it discards
# unless `debug` is set, and makes a table of all dtypes to look up one.
interpreter.InterpretedFunction.__call__ = _call
interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
interpreter._get_np_dtype = _numpy_dtype
