"""How kopf reaches the API server: with the official client's TLS, proxy and credentials, through one session.

A middleware sees each of kopf's requests: it counts them with all others, reports the kinds that can't be followed,
spaces watches that are closed at once, and keeps kopf from ending for want of a CRD.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import kopf
from kubernetes.aio.client.rest import RESTClientObject

from llmservice_operator.api.kinds import FOLLOWED, Kind
from llmservice_operator.framework.resync import Resync
from llmservice_operator.monitoring.metrics import ProcessMetrics

logger = logging.getLogger(__name__)

_LOGIN_PAUSE_S = 10.0
"""Between two logins: credentials that are refused are refused again."""
_WATCH_PAUSE_S = 1.0
"""From the start of a watch to the next one's."""
_MISSING_PAUSE_S = 5.0


@dataclass(frozen=True, slots=True)
class Watches:
    """The kinds whose last list or watch failed, and why."""

    metrics: ProcessMetrics
    paths: dict[tuple[str, str], str] = field(default_factory=dict)
    """By the kind's plural and the path, of which each namespace has its own: why it can't be followed."""

    @property
    def failing(self) -> dict[str, str]:
        """By the kind's plural: why it, or one of its namespaces, can't be followed."""
        return {plural: why for (plural, _), why in self.paths.items()}

    def answered(self, plural: str, path: str) -> None:
        if self.paths.pop((plural, path), None) and plural not in self.failing:
            self.metrics.watch_failing(plural, failing=False)
            logger.info("%s are followed again", plural)

    def failed(self, plural: str, path: str, why: str) -> None:
        """Logged once for each reason, not at each attempt."""
        is_known = (plural, why) in {(kind, known) for (kind, _), known in self.paths.items()}
        self.paths[plural, path] = why
        if not is_known:
            self.metrics.watch_failing(plural, failing=True)
            logger.warning("%s can't be followed, will be repeated: %s", plural, why)


@dataclass(slots=True, eq=False)
class Login:
    """Makes kopf's sessions, with the middleware."""

    configuration: Any
    """The official client's."""
    resync: Resync
    watches: Watches
    metrics: ProcessMetrics
    namespaces: Iterable[str] = ()
    _kinds: dict[str, Kind] = field(init=False)
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
            self.resync.missing(kind.name)  # it makes kopf discover the API again, which ends this request
            await asyncio.sleep(_MISSING_PAUSE_S)
            response = await self._followed(request, handler, kind)
        return response

    async def _followed(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType, kind: Kind
    ) -> aiohttp.ClientResponse:
        path = request.url.path
        try:
            response = await self._counted(request, handler)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self.watches.failed(kind.plural, path, f"the API server can't be reached ({type(error).__name__})")
            raise
        query = request.url.query
        if response.status >= 400:
            self.watches.failed(
                kind.plural,
                path,
                f"{'WATCH' if query.get('watch') else 'GET'} {path}: {response.status} {response.reason}",
            )
            return response
        self.watches.answered(kind.plural, path)
        if not query.get("watch") and not query.get("continue"):
            self.resync.listed(kind.name, path)
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


def register_probes(
    registry: kopf.OperatorRegistry, watches: Watches, loops_alive: Callable[[], bool], leads: Callable[[], bool]
) -> None:
    """/healthz answers 200 with one value for each probe, and 500 where only a restart would help.

    A request that the API server refuses is reported and does not fail the probe: a restart would not change that.
    kopf repeats a probe that raises anything but PermanentError until it succeeds, while the kubelet waits.
    """
    permanent = kopf.ErrorsMode.PERMANENT

    @kopf.on.probe(id="loops", registry=registry, errors=permanent)
    async def loops(**_: object) -> str:
        if not loops_alive():
            raise kopf.PermanentError("the loop of a service has died")
        return "ok"

    @kopf.on.probe(id="watches", registry=registry, errors=permanent)
    async def follows(**_: object) -> dict[str, str] | str:
        return watches.failing or "ok"

    @kopf.on.probe(id="leader", registry=registry, errors=permanent)
    async def leader(**_: object) -> bool:
        return leads()
