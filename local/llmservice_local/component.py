"""A part of the cluster with its own process (operator, gateway, etcd …), which is restarted when it ends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import ClientError, ClientSession, ClientTimeout

from llmservice_local.node.logs import termination_message
from llmservice_local.node.process import BackOff, Process

_LOG = logging.getLogger(__name__)
_POLL_S = 0.1
_RESTART_S = 1.0


class ComponentError(Exception):
    """A component did not start; the message contains the end of its log."""


@dataclass(frozen=True, slots=True)
class ComponentSpec:
    """The command of a component and its health endpoint."""

    name: str
    command: Sequence[str]
    log: Path
    health_url: str
    metrics: str = ""
    """Host and port of /metrics, empty if it is not scraped."""
    env: Mapping[str, str] = field(default_factory=dict)
    stop_grace_s: float = 5.0


class Component:
    """`start` returns when the component is healthy; from then on it is restarted until `stop`."""

    def __init__(self, spec: ComponentSpec) -> None:
        self.spec = spec
        self.restarts = 0
        self._process: Process | None = None
        self._keeping: asyncio.Task[None] | None = None

    @property
    def shim_pid(self) -> int | None:
        """The pid of the shim above the running process."""
        return self._process.shim_pid if self._process is not None and self._process.running else None

    async def start(self, session: ClientSession, timeout_s: float) -> None:
        """Start it and wait for its health endpoint; raises `ComponentError` with the end of its log."""
        self._process = await self._spawn()
        deadline = time.monotonic() + timeout_s
        while not await _healthy(session, self.spec.health_url):
            if not self._process.running:
                raise ComponentError(f"{self.spec.name} ended at once:\n{termination_message(self.spec.log)}")
            if time.monotonic() > deadline:
                await self.stop()
                tail = termination_message(self.spec.log)
                raise ComponentError(f"{self.spec.name} is not healthy after {timeout_s:g} s:\n{tail}")
            await asyncio.sleep(_POLL_S)
        self._keeping = asyncio.create_task(self._keep())

    async def stop(self) -> None:
        """Send SIGTERM, and SIGKILL to the remaining processes after the grace period."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        if self._process is not None and self._process.running:
            await self._process.stop(self.spec.stop_grace_s)

    async def _spawn(self) -> Process:
        return await Process.start(self.spec.command, env=self.spec.env, log=self.spec.log)

    async def _keep(self) -> None:
        backoff = BackOff(_RESTART_S)
        while self._process is not None:
            began = time.monotonic()
            code = await self._process.wait()
            delay_s = backoff.next_delay(time.monotonic() - began)
            _LOG.warning("%s ended with status %d, starting it again (log: %s)", self.spec.name, code, self.spec.log)
            await asyncio.sleep(delay_s)
            self.restarts += 1
            self._process = await self._spawn()


async def _healthy(session: ClientSession, url: str) -> bool:
    try:
        async with session.get(url, timeout=ClientTimeout(total=1), ssl=False) as response:
            return response.status == 200
    except (ClientError, TimeoutError, OSError):
        return False
