"""All kernels here run in Triton's interpreter."""

import harness.triton_interpreter  # noqa: F401
