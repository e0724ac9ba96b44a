"""Functions that numba compiles when they first run, and the threads that they run in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import torch

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
        "no_cfunc_wrapper": True,  # nobody asks for their address
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
