"""A semaphore with a priority queue: urgent waiters overtake patient ones, for a bounded time."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from itertools import count

_Waiter = asyncio.Future[None]


class PriorityGate:
    """At most `places` holders at once. Of the waiters, the one whose patience ends first is next.

    A waiter with ten seconds of patience is overtaken by urgent ones that arrive within ten seconds, and by none later.
    One waiter is admitted in each iteration of the event loop, so that an iteration does not have to compute for many.
    """

    def __init__(self, places: int) -> None:
        self._free = places
        self._queue: list[tuple[float, int, _Waiter]] = []
        self._numbers = count()
        self._waiting: dict[Hashable, _Waiter] = {}
        self._admission: asyncio.Handle | None = None

    @asynccontextmanager
    async def place(self, patience_s: float, who: Hashable = None) -> AsyncIterator[None]:
        """Hold a place; with a unique `who`, the waiter may be made more urgent while it waits."""
        await self._wait(patience_s, who)
        try:
            yield
        finally:
            self._release()

    def hurry(self, who: Hashable, patience_s: float) -> None:
        """Make a waiter more urgent; no effect unless it waits."""
        if waiter := self._waiting.get(who):
            self._enqueue(patience_s, waiter)  # its earlier entry is skipped once the waiter is admitted

    async def _wait(self, patience_s: float, who: Hashable) -> None:
        waiter: _Waiter = asyncio.get_running_loop().create_future()
        self._enqueue(patience_s, waiter)
        if who is not None:
            self._waiting[who] = waiter
        try:
            await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled():  # it was admitted and cancelled at once
                self._release()
            raise
        finally:
            if self._waiting.get(who) is waiter:
                del self._waiting[who]

    def _enqueue(self, patience_s: float, waiter: _Waiter) -> None:
        until_s = waiter.get_loop().time() + patience_s
        heapq.heappush(self._queue, (until_s, next(self._numbers), waiter))
        self._admit_soon()

    def _release(self) -> None:
        self._free += 1
        self._admit_soon()

    def _admit_soon(self) -> None:
        if self._admission is None and self._free and self._queue:
            self._admission = asyncio.get_running_loop().call_soon(self._admit)

    def _admit(self) -> None:
        """Admit the first waiter, and the next in the following iteration."""
        self._admission = None
        while self._queue:
            waiter = heapq.heappop(self._queue)[-1]
            if not waiter.done():
                self._free -= 1
                waiter.set_result(None)
                break
        self._admit_soon()
