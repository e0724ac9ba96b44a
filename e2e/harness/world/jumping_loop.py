"""An event loop whose clock jumps: sockets work as ever, and what waits for time waits for nothing.

Time stands still while anything is ready, and jumps to the next timer once nothing is. So a client's timeout, a backoff
and a minute's silence cost no time, and happen in every run at the same moment. Unix sockets hand over at once what
was sent; TCP may take a moment, even on loopback, in which the clock would jump.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar, TypeVarTuple

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(None if timeout is None else 0)
        if not ready and timeout is not None:
            self.now_s += max(0.0, timeout)
        return ready


class JumpingLoop(asyncio.SelectorEventLoop):
    """`asyncio.Runner(loop_factory=JumpingLoop)` runs on it."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Seconds since the loop began, by its own clock."""
        return self._jumping.now_s

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[[*Arguments], T], *args: *Arguments
    ) -> asyncio.Future[T]:
        """Here and now: time would run away from a thread."""
        done: asyncio.Future[T] = self.create_future()
        done.set_result(func(*args))
        return done
