"""How our kernels are compiled, and what a launch needs to know of the machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0

_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def jit(kernel: Callable[..., Any]) -> Any:
    """`triton.jit`, typed."""
    return triton.jit(kernel)


def jit_for_any(*names: str) -> Callable[[Callable[..., Any]], Any]:
    """`jit`, without a variant compiled for a number that is 1 or divides by 16 among these parameters."""

    def compile_later(kernel: Callable[..., Any]) -> Any:
        return triton.jit(kernel, do_not_specialize=names)

    return compile_later


@jit
def _probe() -> None:
    pass


INTERPRETED = isinstance(_probe, InterpretedFunction)
"""Whether Triton was imported with TRITON_INTERPRET=1: kernels run in numpy, on tensors in CPU memory."""


def dot_dtype(dtype: torch.dtype) -> Any:
    """What the operands of a tile's product are rounded to, for activations of `dtype`.

    The activations' own, so that the product runs on the tensor cores; the interpreter multiplies the bits of a
    bfloat16 as if they were an integer, so there it is float32. Raises KeyError for a dtype that no model runs in.
    """
    return tl.float32 if INTERPRETED else _DTYPES[dtype]


def padded(size: int) -> int:
    """The next power of two, at least the 16 that a product's sides must have: the side of a tile that holds `size`."""
    return max(16, 1 << (size - 1).bit_length())
