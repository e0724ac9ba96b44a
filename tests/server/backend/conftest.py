"""The Triton backend is tested in Triton's interpreter."""

import harness.triton_interpreter  # noqa: F401
