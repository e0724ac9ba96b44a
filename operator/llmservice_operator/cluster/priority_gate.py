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

    Who has ten seconds of it is overtaken by the urgent who come within ten seconds, and by nobody later. One is let in
    at each turn of the event loop: of a thousand who come together, as many are inside as one waits for, and what one
    of them computes holds up no turn for long; all at once would make each turn as long as all their computing.
    """

    def __init__(self, places: int) -> None:
        self._free = places
        self._line: list[tuple[float, int, _Turn]] = []
        self._numbers = count()
        self._waiting: dict[Hashable, _Turn] = {}
        self._opening: asyncio.Handle | None = None

    @asynccontextmanager
    async def place(self, patience_s: float, who: Hashable = None) -> AsyncIterator[None]:
        """Hold a place; `who` is named by those that may become more urgent while they wait, each at most once."""
        await self._wait(patience_s, who)
        try:
            yield
        finally:
            self._leave()

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
                self._leave()
            raise
        finally:
            if self._waiting.get(who) is turn:
                del self._waiting[who]

    def _stand(self, patience_s: float, turn: _Turn) -> None:
        until_s = turn.get_loop().time() + patience_s
        heapq.heappush(self._line, (until_s, next(self._numbers), turn))
        self._open_soon()

    def _leave(self) -> None:
        self._free += 1
        self._open_soon()

    def _open_soon(self) -> None:
        if self._opening is None and self._free and self._line:
            self._opening = asyncio.get_running_loop().call_soon(self._open)

    def _open(self) -> None:
        """Let the first of the line in, and the next one a turn later."""
        self._opening = None
        while self._line:
            turn = heapq.heappop(self._line)[-1]
            if not turn.done():
                self._free -= 1
                turn.set_result(None)
                break
        self._open_soon()
