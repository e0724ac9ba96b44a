"""Our GPU kernels in Triton's interpreter: they run in numpy, on tensors in CPU memory, without a GPU.

Triton decides when a kernel is defined, so this must be imported before anything else imports the kernels. Other
processes do not inherit it: the environment is left as it was.
"""

import os

_BEFORE = os.environ.get("TRITON_INTERPRET")
os.environ["TRITON_INTERPRET"] = "1"
try:
    import triton

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
