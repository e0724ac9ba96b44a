"""Keeping the garbage collector away from the cache: a thousand services are very many objects that live on."""

from __future__ import annotations

import gc

_YOUNG, _YOUNG_ROUNDS, _MIDDLE_ROUNDS = 20_000, 20, 50
"""Against Python's 700, 10, 10: while the cache fills, hardly anything of what is made is garbage."""


def expect_many() -> None:
    """Collect more seldom: with a thousand services the looks for garbage took a third of the time of a start."""
    gc.set_threshold(_YOUNG, _YOUNG_ROUNDS, _MIDDLE_ROUNDS)


def settle() -> None:
    """Take everything that is alive now out of what full collections walk through.

    Each of them would stop the process, with a thousand services for a tenth of a second and more. What is dropped of
    it later is freed by its reference count all the same; only a cycle among what is alive now would stay.
    """
    gc.collect()
    gc.freeze()
