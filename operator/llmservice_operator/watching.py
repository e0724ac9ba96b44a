"""kopf's watches, for as long as the operator lives: what the API server ends with an error is begun anew."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import kopf
from kopf._cogs.clients.watching import WatchingError  # not exported: 410 is all that kopf itself begins anew after

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
_LASTED_S = 60.0
"""Watches that lived so long were well: the pause after them is a first one."""


@dataclass(frozen=True, slots=True)
class Watching:
    """What is watched, where, and how."""

    registry: kopf.OperatorRegistry
    settings: kopf.OperatorSettings
    namespaces: Collection[str]
    """Empty: the whole cluster."""
    take_signals: Callable[[], None]
    """kopf takes the signals for itself: leaving begins with the Lease, not with the watches."""

    async def run(self, until: asyncio.Event) -> None:
        """Until the event is set. Raises what kopf can't watch past: a kind that may not be listed, for one."""
        pause_s = _FIRST_PAUSE_S
        while not until.is_set():
            began_s = time.monotonic()
            try:
                await self._watch(until)
                return
            except WatchingError as error:
                pause_s = _FIRST_PAUSE_S if time.monotonic() - began_s > _LASTED_S else pause_s
                logger.warning("the API server ended a watch, all are begun anew in %g s: %s", pause_s, error)
            await _stopped_within(until, pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _watch(self, until: asyncio.Event) -> None:
        tasks = await kopf.spawn_tasks(
            registry=self.registry,
            settings=self.settings,
            standalone=True,
            clusterwide=not self.namespaces,
            namespaces=self.namespaces,
            stop_flag=until,
        )
        self.take_signals()
        await _run_together(tasks)


async def _stopped_within(until: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await until.wait()
    except TimeoutError:
        return


async def _run_together(tasks: Collection[asyncio.Task[None]]) -> None:
    """Until one of them ends, which ends the others; raises what any of them raised.

    `kopf.run_tasks` would also wait up to five seconds for all other tasks, a scraper's open connection among them.
    """
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result
