"""The life of one operator process: watch, wait for its turn, work, and leave in good order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from llmservice_operator.cluster.kube_client import KubeError
from llmservice_operator.cluster.object_cache import ObjectCache
from llmservice_operator.cluster.resync import Resync
from llmservice_operator.handlers import Watches
from llmservice_operator.leadership.election import Election
from llmservice_operator.loops import ServiceLoops

logger = logging.getLogger(__name__)

_RETRY_S = 1.0

Watch = Callable[[asyncio.Event], Awaitable[None]]
"""Watches until the event that it is given is set."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Everybody watches all the time, so that whoever takes over knows the cluster already; only the leader works."""

    loops: ServiceLoops
    cache: ObjectCache
    resync: Resync
    watches: Watches
    election: Election | None
    """None: there is no other process, and the turn comes at once."""
    resync_s: float
    """Seconds between two lists of everything that is followed."""

    async def run(self, watch: Watch, stop: asyncio.Event) -> None:
        """Until `stop` is set; raises LeadershipLostError, and whatever ends the watches."""
        stop_watching = asyncio.Event()
        working = asyncio.create_task(self._work(), name="leader")
        leaving = asyncio.create_task(self._leave(working, stop, stop_watching), name="leave")
        try:
            await watch(stop_watching)
        finally:
            await self.loops.stop_all()
            stop.set()
            await leaving

    async def _work(self) -> None:
        """Fill the cache, wait for the turn, then work until it is over."""
        await self._fill()
        correcting = asyncio.create_task(self.resync.run(self.watches.resynced, self.resync_s), name="resync")
        try:
            if self.election is not None:
                await self.election.acquire()
            self.loops.open(self.cache.services())
            if self.election is not None:
                await self.election.hold()
            await correcting
        finally:
            correcting.cancel()

    async def _fill(self) -> None:
        """Before the first pass the cache must be whole: a Deployment that is not known yet looks like none."""
        while True:
            try:
                await self.resync.once()
                return
            except KubeError as error:
                logger.warning("the cluster can't be listed, will be repeated: %s", error)
                pause_s = max(_RETRY_S, error.retry_after_s)
            await asyncio.sleep(pause_s)

    async def _leave(self, working: asyncio.Task[None], stop: asyncio.Event, stop_watching: asyncio.Event) -> None:
        """At the end, whatever brought it: no pass any more, then the lease, then the watches."""
        stopping = asyncio.create_task(stop.wait(), name="stop")
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        await self.loops.stop_all()
        if not working.done():
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            if self.election is not None:
                await self.election.release()
        stop_watching.set()
        if not working.cancelled():
            working.result()
