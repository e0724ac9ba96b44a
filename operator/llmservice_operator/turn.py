"""The life of one operator process: follow the cluster, wait for its turn, work, and leave in good order."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from llmservice_operator.cluster.mirror import Mirror
from llmservice_operator.cluster.object_cache import ObjectCache
from llmservice_operator.leadership.election import Election
from llmservice_operator.loops import ServiceLoops


@dataclass(frozen=True, slots=True)
class Turn:
    """Everybody follows all the time, so that whoever takes over knows the cluster already; only the leader works."""

    loops: ServiceLoops
    cache: ObjectCache
    mirror: Mirror
    election: Election | None
    """None: there is no other process, and the turn comes at once."""

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set; raises LeadershipLostError, and KubeError where the cluster may not be followed."""
        following = asyncio.create_task(self.mirror.run(), name="mirror")
        working = asyncio.create_task(self._work(), name="leader")
        stopping = asyncio.create_task(stop.wait(), name="stop")
        try:
            done, _ = await asyncio.wait([following, working, stopping], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            stopping.cancel()
            await self._leave(working)
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def _work(self) -> None:
        """Wait for a whole cache, then for the turn, and work until it is over."""
        await self.mirror.whole.wait()
        if self.election is not None:
            await self.election.acquire()
        self.loops.open(self.cache.services())
        if self.election is not None:
            await self.election.hold()
        await asyncio.Event().wait()  # without an election the turn has no end

    async def _leave(self, working: asyncio.Task[None]) -> None:
        """At the end, whatever brought it: no pass any more, then the lease."""
        await self.loops.stop_all()
        if working.done():
            return
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        if self.election is not None:
            await self.election.release()
