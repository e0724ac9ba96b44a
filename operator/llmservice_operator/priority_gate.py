"""A bounded number of places, and a line before them in which urgency counts more than patience."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from itertools import count

_Turn = asyncio.Future[None]


class PriorityGate:
    """Lets so many in at once; of those who wait the lowest rank goes first, and among equals who came first."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._line: list[tuple[int, int, _Turn]] = []
        self._numbers = count()
        self._waiting: dict[Hashable, _Turn] = {}

    @asynccontextmanager
    async def place(self, rank: int, who: Hashable = None) -> AsyncIterator[None]:
        """Hold a place; `who` is named by those that may become more urgent while they wait, each at most once."""
        if self._free and not self._line:
            self._free -= 1
        else:
            await self._wait(rank, who)
        try:
            yield
        finally:
            self._pass_on()

    def hurry(self, who: Hashable, rank: int) -> None:
        """Move somebody who waits forward; nothing for those who don't."""
        if turn := self._waiting.get(who):
            self._stand(rank, turn)  # where they stood before, nobody is found

    async def _wait(self, rank: int, who: Hashable) -> None:
        turn: _Turn = asyncio.get_running_loop().create_future()
        self._stand(rank, turn)
        if who is not None:
            self._waiting[who] = turn
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the place was given in the moment in which nobody wanted it any more
                self._pass_on()
            raise
        finally:
            if self._waiting.get(who) is turn:
                del self._waiting[who]

    def _stand(self, rank: int, turn: _Turn) -> None:
        heapq.heappush(self._line, (rank, next(self._numbers), turn))

    def _pass_on(self) -> None:
        while self._line:
            turn = heapq.heappop(self._line)[-1]
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
