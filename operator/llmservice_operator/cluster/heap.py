"""Keeping the garbage collector away from the cache: a thousand services are very many objects that live on."""

from __future__ import annotations

import gc


def settle() -> None:
    """Take everything that is alive now out of what full collections walk through.

    Each of them would stop the process, with a thousand services for a tenth of a second and more. What is dropped of
    it later is freed by its reference count all the same; only a cycle among what is alive now would stay.
    """
    gc.collect()
    gc.freeze()
