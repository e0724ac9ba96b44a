"""Whether our GPU kernels work on this machine: they are compiled for the model's shape, run, and compared with torch.

What is compiled here need not be compiled while a request waits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from llmservice_server.backend.agreement import BOUNDS, MIXED, Case, relative_error
from llmservice_server.backend.base import KVCacheShape

if TYPE_CHECKING:
    from llmservice_server.backend.agreement import BackendOf

_MANY_DECODES = ((17, 1),) * 640  # more than any GPU has to split among its processors
_FP8_CAPABILITY = (8, 9)


def why_triton_is_unusable(shape: KVCacheShape, dtype: torch.dtype, device: torch.device) -> str | None:
    """A phrase that says what is wrong; None where everything is right."""
    try:
        from llmservice_server.backend.cuda.attention import TritonAttention
        from llmservice_server.backend.cuda.kernels.jit import INTERPRETED
    except ImportError as error:
        return f"Triton cannot be imported ({error})"
    if device.type != "cuda" and not INTERPRETED:
        return "there is no CUDA device"
    if shape.head_dim % 2 or shape.head_dim > 256:
        return f"its kernels take even head dimensions up to 256, the model's is {shape.head_dim}"
    if (
        device.type == "cuda"
        and shape.dtype.itemsize == 1
        and torch.cuda.get_device_capability(device) < _FP8_CAPABILITY
    ):
        return "this GPU has no fp8 arithmetic (compute capability 8.9 or newer)"
    spans = [MIXED, _MANY_DECODES] if device.type == "cuda" else [MIXED[:3]]
    each_window = replace(shape, windows=tuple({*shape.windows}))
    return what_is_wrong([Case(each_window, dtype, each) for each in spans], TritonAttention, device)


def what_is_wrong(cases: list[Case], backend_of: BackendOf, device: torch.device) -> str | None:
    """Of a backend, on these cases: what it raised, or how far its answers are off."""
    for case in cases:
        try:
            off_by = relative_error(case, backend_of, device)
        except Exception as error:  # of a compiler, a driver or a GPU: another backend serves
            return f"{type(error).__name__}: {error}".splitlines()[0]
        bound = bound_of(case)
        if not off_by <= bound:
            return f"its answers are off by {off_by:.2g}, at most {bound:.2g} is right for {case.dtype}"
    return None


def bound_of(case: Case) -> float:
    """The reference stores fp8 as torch rounds it; a GPU, and Triton's interpreter still more, may round otherwise."""
    return 0.1 if case.shape.dtype.itemsize == 1 else BOUNDS[case.dtype]
