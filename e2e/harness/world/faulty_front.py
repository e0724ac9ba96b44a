"""What stands between the operator and an API server, and lets one call of many go wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Fault = Literal["500", "409", "410", "429", "timeout", "reset", "half-applied", "kill"]

RETRY_AFTER_S = 65
_REFUSALS = {
    "500": (500, "InternalError", "etcdserver: request timed out"),
    "409": (409, "Conflict", "the object has been modified; please apply your changes to the latest version"),
    "410": (410, "Expired", "the provided resource version is too old"),
    "429": (429, "TooManyRequests", "too many requests, please try again later"),
}


@dataclass(frozen=True, slots=True)
class Call:
    """One request; `time_s` is by the loop's clock."""

    time_s: float
    method: str
    path: str

    @property
    def writes(self) -> bool:
        return self.method != "GET"


@dataclass
class FaultyFront:
    """A middleware of the API server: it counts the calls from `arm` on, and one of them goes wrong."""

    calls: list[Call] = field(default_factory=list)
    killed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set at the call at which the process that made it is to die."""
    _armed: bool = False
    _fault: Fault | None = None
    _at: int = -1

    def arm(self, fault: Fault | None = None, at: int = -1) -> None:
        """Count from now on; the call of this number goes wrong in this way."""
        self.calls, self.killed = [], asyncio.Event()
        self._armed, self._fault, self._at = True, fault, at

    def disarm(self) -> None:
        self._armed = False

    @web.middleware
    async def handle(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if not self._armed:
            return await handler(request)
        number = len(self.calls)
        self.calls.append(Call(asyncio.get_running_loop().time(), request.method, request.path))
        if number != self._at or self._fault is None:
            return await handler(request)
        return await self._fail(self._fault, request, handler)

    async def _fail(self, fault: Fault, request: web.Request, handler: Handler) -> web.StreamResponse:
        if fault in _REFUSALS:
            return _refusal(*_REFUSALS[fault])
        if fault == "kill":
            self.killed.set()
        if fault in {"kill", "timeout"}:
            await asyncio.Event().wait()  # until the client gives up
        if fault == "half-applied":
            await handler(request)
        if request.transport is not None:
            request.transport.abort()
        return web.Response()


def _refusal(code: int, reason: str, message: str) -> web.Response:
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason}
    headers = {"Retry-After": str(RETRY_AFTER_S)} if code == 429 else {}
    return web.json_response({**body, "message": message}, status=code, headers=headers)
