"""Waiting on a condition with a deadline, and saying what was seen when it never came."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")
POLL_S = 0.2


def wait_for(condition: Callable[[], T | None], timeout_s: float, seen: Callable[[], object] = lambda: "") -> T:
    """Poll until `condition` gives something true; on the deadline fail with what `seen` says."""
    deadline = time.monotonic() + timeout_s
    while True:
        result = condition()
        if result:
            return result
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {seen()}"
        time.sleep(POLL_S)


async def until(look: Callable[[], Awaitable[Any]]) -> Any:
    """What `look` finds, once it finds something."""
    async with asyncio.timeout(40):
        while not (found := await look()):
            await asyncio.sleep(0.05)
        return found
