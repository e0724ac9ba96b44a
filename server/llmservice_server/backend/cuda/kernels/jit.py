"""How our kernels are compiled, and dtypes and tile sizes of their launches."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from llmservice_server.backend.cuda.kernel_cache import install

install()

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0

_LARGE_TILES = (90, 100, 103)  # compute capabilities
_AMPERE = 80

_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def jit(kernel: Callable[..., Any]) -> Any:
    """`triton.jit`, typed."""
    return triton.jit(kernel)


def jit_for_any(*names: str) -> Callable[[Callable[..., Any]], Any]:
    """`jit`, without variants for values of these parameters that are 1 or multiples of 16."""

    def compile_later(kernel: Callable[..., Any]) -> Any:
        return triton.jit(kernel, do_not_specialize=names)

    return compile_later


@jit
def _probe() -> None:
    pass


INTERPRETED = isinstance(_probe, InterpretedFunction)
"""Whether Triton was imported with TRITON_INTERPRET=1: kernels run in NumPy, on tensors in CPU memory."""


@cache
def takes_large_tiles() -> bool:
    """Whether the GPU is a Hopper, or a Blackwell of data centres: their products read shared memory, of 227 KB."""
    return not INTERPRETED and triton.runtime.driver.active.get_current_target().arch in _LARGE_TILES


@cache
def has_little_shared_memory() -> bool:
    """Whether the GPU is older than an Ampere: a T4 has 64 KB of shared memory for a program."""
    return not INTERPRETED and triton.runtime.driver.active.get_current_target().arch < _AMPERE


def dot_dtype(dtype: torch.dtype) -> Any:
    """The dtype of the operands of a tile's product, for activations of `dtype`.

    The same, so that the product uses the tensor cores; float32 in the interpreter, which multiplies the bits of a
    bfloat16 as integers. Raises KeyError for a dtype that no model uses.
    """
    return tl.float32 if INTERPRETED else _DTYPES[dtype]


def padded(size: int) -> int:
    """The side of a tile that holds `size`: the next power of two, at least the 16 that a product needs."""
    return max(16, 1 << (size - 1).bit_length())


@cache
def num_processors(device: torch.device) -> int:
    """Of a GPU, among which a kernel's programs are distributed."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
