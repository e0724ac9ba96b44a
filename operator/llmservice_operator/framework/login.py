"""How kopf reaches the API server: with the official client's TLS, proxy and credentials, through one session.

A middleware sees each of kopf's requests: it counts them with all others, reports the kinds that can't be followed, and
keeps kopf from two things: opening watches without a pause where each is closed at once, and ending for want of a CRD.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import kopf
from kubernetes.aio.client.rest import RESTClientObject

from llmservice_operator.api.kinds import FOLLOWED, ChildKind
from llmservice_operator.framework.probes import Watches
from llmservice_operator.framework.resync import Resync
from llmservice_operator.monitoring.process_metrics import ProcessMetrics

_LOGIN_PAUSE_S = 10.0
"""Between two logins: credentials that are refused are refused again."""
_WATCH_PAUSE_S = 1.0
"""From the start of a watch to the next one's."""
_MISSING_PAUSE_S = 5.0


@dataclass(slots=True, eq=False)
class Login:
    """Makes kopf's sessions, and sees what is sent through them."""

    configuration: Any
    """The official client's."""
    resync: Resync
    watches: Watches
    metrics: ProcessMetrics
    namespaces: Iterable[str] = ()
    _kinds: dict[str, ChildKind] = field(init=False)
    _opened_s: dict[str, float] = field(default_factory=dict)
    """When a watch of a path was last opened."""
    _login_s: float = -_LOGIN_PAUSE_S

    def __post_init__(self) -> None:
        places = tuple(self.namespaces) or (None,)
        self._kinds = {one.path(place): one.kind for one in FOLLOWED for place in places}

    def register(self, registry: kopf.OperatorRegistry) -> None:
        """kopf asks for a session at its start, and for another one when the API server has answered 401."""

        @kopf.on.login(registry=registry, id="kubernetes", errors=kopf.ErrorsMode.PERMANENT)
        async def login(**_: object) -> kopf.AiohttpSession:
            await asyncio.sleep(max(0.0, self._login_s + _LOGIN_PAUSE_S - time.monotonic()))
            self._login_s = time.monotonic()
            return kopf.AiohttpSession(server=self.configuration.host, aiohttp_session=self.session())

    def session(self) -> aiohttp.ClientSession:
        tls = RESTClientObject(self.configuration).ssl_context
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=tls),
            proxy=self.configuration.proxy,
            trust_env=False,
            middlewares=(self._send,),
        )

    async def _send(self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        """A service account's token is renewed on disk: it is read for each request, as the official client does."""
        token = await self.configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
        if token and str(request.url).startswith(f"{self.configuration.host}/"):  # not where a redirect leads elsewhere
            request.headers["Authorization"] = token
        kind = self._kinds.get(request.url.path)
        if kind is None:
            return await self._counted(request, handler)
        if request.url.query.get("watch"):
            await self._space_watches(request.url.path)
        response = await self._followed(request, handler, kind)
        while response.status == 404 and not kind.built_in:
            response.release()
            self.resync.missing(kind.name)  # it lets kopf look at the API again, which ends this request
            await asyncio.sleep(_MISSING_PAUSE_S)
            response = await self._followed(request, handler, kind)
        return response

    async def _followed(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType, kind: ChildKind
    ) -> aiohttp.ClientResponse:
        try:
            response = await self._counted(request, handler)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self.watches.failed(kind.plural, f"the API server can't be reached ({type(error).__name__})")
            raise
        query = request.url.query
        if response.status >= 400:
            self.watches.failed(
                kind.plural,
                f"{'WATCH' if query.get('watch') else 'GET'} {request.url.path}: {response.status} {response.reason}",
            )
            return response
        self.watches.answered(kind.plural)
        if not query.get("watch") and not query.get("continue"):
            self.resync.listed(kind.name, request.url.path)
        return response

    async def _counted(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        method = "WATCH" if request.url.query.get("watch") else request.method
        started, status = time.monotonic(), 0
        try:
            response = await handler(request)
            status = response.status
        finally:
            self.metrics.answered(method, request.url.path, status, time.monotonic() - started)
        return response

    async def _space_watches(self, path: str) -> None:
        pause_s = self._opened_s.get(path, 0.0) + _WATCH_PAUSE_S - time.monotonic()
        if pause_s > 0:
            await asyncio.sleep(pause_s)
        self._opened_s[path] = time.monotonic()
