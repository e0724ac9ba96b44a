"""Which LoRA adapters each pod has loaded, as the pods report it: polled, for it changes while they serve."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Mapping

import aiohttp

from llmservice_gateway.routes import Backend

logger = logging.getLogger(__name__)

PERIOD_S = 2.0
_TIMEOUT_S = 2.0
_ANSWER_LIMIT_BYTES = 2**18


class AdapterPoll:
    """Asks the pods of services that list adapters. A pod that does not answer keeps what it reported before."""

    def __init__(self, backends: Callable[[], Iterable[Backend]], changed: Callable[[], None]) -> None:
        self._backends = backends
        self._changed = changed
        self.loaded: Mapping[str, frozenset[str]] = {}
        """Names of adapters by the pod's uid."""

    async def run(self, period_s: float = PERIOD_S) -> None:
        """Poll until cancelled."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)) as session:
            while True:
                await self.poll(session)
                await asyncio.sleep(period_s)

    async def poll(self, session: aiohttp.ClientSession) -> None:
        """Ask each pod once, and call `changed` where the answers differ from those before."""
        backends = list(self._backends())
        answers = await asyncio.gather(*(self._ask(session, backend) for backend in backends))
        loaded = {backend.uid: answer for backend, answer in zip(backends, answers, strict=True) if answer is not None}
        if loaded != self.loaded:
            self.loaded = loaded
            self._changed()

    async def _ask(self, session: aiohttp.ClientSession, backend: Backend) -> frozenset[str] | None:
        try:
            async with session.get(f"{backend.url}/sizing") as response:
                response.raise_for_status()
                return _names(await _bounded(response))
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            logger.debug("pod %s: no report of its adapters: %s", backend.name, error)
            return self.loaded.get(backend.uid)


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    """Raises ValueError for a body that no report has."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > _ANSWER_LIMIT_BYTES:
            raise ValueError(f"the answer is longer than {_ANSWER_LIMIT_BYTES} bytes")
    return bytes(body)


def _names(text: bytes) -> frozenset[str]:
    """Of those that requests may name. Raises ValueError for anything but a server's report."""
    try:
        return frozenset(str(one["name"]) for one in json.loads(text)["adapters"] if one["state"] != "failed")
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"no report of llmservice serve: {type(error).__name__} {error}") from error
