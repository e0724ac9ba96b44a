"""Which LoRA adapters each pod has loaded or cannot load, as it reports: polled, for it changes while pods serve."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Mapping

import aiohttp

from llmservice_gateway.routing.routes import Adapters, Backend

logger = logging.getLogger(__name__)

PERIOD_S = 2.0
_TIMEOUT_S = 2.0
_ANSWER_LIMIT_BYTES = 2**18


class AdapterPoll:
    """Asks the pods of services that list adapters. A pod that does not answer keeps what it reported before."""

    def __init__(self, backends: Callable[[], Iterable[Backend]], changed: Callable[[], None]) -> None:
        self._backends = backends
        self._changed = changed
        self.reported: Mapping[str, Adapters] = {}
        """By the pod's uid."""

    async def run(self) -> None:
        """Poll until cancelled."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)) as session:
            while True:
                await self.poll(session)
                await asyncio.sleep(PERIOD_S)

    async def poll(self, session: aiohttp.ClientSession) -> None:
        """Ask each pod once, and call `changed` where the answers differ from those before."""
        backends = list(self._backends())
        answers = await asyncio.gather(*(self._ask(session, backend) for backend in backends))
        answered = zip(backends, answers, strict=True)
        reported = {backend.uid: answer for backend, answer in answered if answer is not None}
        if reported != self.reported:
            self.reported = reported
            self._changed()

    async def _ask(self, session: aiohttp.ClientSession, backend: Backend) -> Adapters | None:
        try:
            async with session.get(f"{backend.url}/sizing") as response:
                response.raise_for_status()
                return _adapters(await _bounded(response))
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            logger.debug("pod %s: no report of its adapters: %s", backend.name, error)
            return self.reported.get(backend.uid)


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    """Raises ValueError for a body that no report has."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > _ANSWER_LIMIT_BYTES:
            raise ValueError(f"the answer is longer than {_ANSWER_LIMIT_BYTES} bytes")
    return bytes(body)


def _adapters(text: bytes) -> Adapters:
    """An adapter whose new version cannot be loaded keeps the old one. Raises ValueError for no report of a server."""
    try:
        listed = json.loads(text)["adapters"]
        failed = {str(one["name"]): str(one["error"]) for one in listed if one["state"] == "failed"}
        return {**failed, **{str(one["name"]): None for one in listed if one["state"] != "failed"}}
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"no report of llmservice serve: {type(error).__name__} {error}") from error
