"""A bounded number of places, and a line before them in which the urgent overtake the patient, but not for ever."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from itertools import count

_Turn = asyncio.Future[None]


class PriorityGate:
    """Lets so many in at once. Of those who wait goes first whose patience, counted from their coming, ends first.

    Who has ten seconds of it is overtaken by the urgent who come within ten seconds, and by nobody later.
    """

    def __init__(self, places: int) -> None:
        self._free = places
        self._line: list[tuple[float, int, _Turn]] = []
        self._numbers = count()
        self._waiting: dict[Hashable, _Turn] = {}

    @asynccontextmanager
    async def place(self, patience_s: float, who: Hashable = None) -> AsyncIterator[None]:
        """Hold a place; `who` is named by those that may become more urgent while they wait, each at most once."""
        if self._free:  # then nobody waits: a place that is left goes to whoever does
            self._free -= 1
        else:
            await self._wait(patience_s, who)
        try:
            yield
        finally:
            self._pass_on()

    def hurry(self, who: Hashable, patience_s: float) -> None:
        """Move somebody who waits forward; nothing for those who don't."""
        if turn := self._waiting.get(who):
            self._stand(patience_s, turn)  # where they stood before, nobody will be found

    async def _wait(self, patience_s: float, who: Hashable) -> None:
        turn: _Turn = asyncio.get_running_loop().create_future()
        self._stand(patience_s, turn)
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

    def _stand(self, patience_s: float, turn: _Turn) -> None:
        until_s = turn.get_loop().time() + patience_s
        heapq.heappush(self._line, (until_s, next(self._numbers), turn))

    def _pass_on(self) -> None:
        while self._line:
            turn = heapq.heappop(self._line)[-1]
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
