"""Forwards a request to a pod and streams its response back.

Until a response begins the request may be retried on another pod, and after that not.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

import aiohttp
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

from llmservice_gateway.balancer import Balancer, Ticket
from llmservice_gateway.metrics import GatewayMetrics
from llmservice_gateway.openai_error import RETRY_AFTER_S, error_response, unavailable
from llmservice_gateway.routes import ModelNotFoundError, Route

logger = logging.getLogger(__name__)

MOST_ATTEMPTS = 3
LOST, MOVED = "lost", "moved"
MOST_LOST = 2
"""Attempts that may end with a lost pod: a request that kills pods must not kill them all."""
REFUSALS = frozenset({429, 503})
"""Statuses of a pod whose queue is full, or that drains: another one may have capacity."""
CONNECT_TIMEOUT_S = 5.0
KEEPALIVE_S = 2.0
"""Below the pods' own keep-alive (uvicorn: 5 s), so that no connection is reused while the pod closes it."""

# RFC 9110, section 7.6.1: these concern one connection and are not forwarded.
HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer"}
    | {"transfer-encoding", "upgrade"}
)
SLOTS_HEADER = "x-admissible-sequences"
"""How many requests like those before a pod runs at once, as it reports with each response."""
NOT_SENT_ON = HOP_BY_HOP | {"host", "content-length", "expect"}


class _AnotherPodError(Exception):
    """This pod refused the request, and no part of a response has reached the client."""

    def __init__(self, reason: str, refusal: web.Response | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.refusal = refusal
        """The pod's response, used if no other pod accepts the request."""


class BrokenAnswerError(Exception):
    """The pod ended its response early; the client's connection is closed, and `response` is the partial one."""

    def __init__(self, response: web.StreamResponse) -> None:
        super().__init__("the pod broke off its answer")
        self.response = response


class Proxy:
    """Sends requests to pods through one connection pool."""

    def __init__(
        self,
        balancer: Balancer,
        metrics: GatewayMetrics,
        read_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._balancer = balancer
        self._metrics = metrics
        self._clock = clock
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=read_timeout_s),
            auto_decompress=False,  # responses are forwarded unchanged
            skip_auto_headers=("User-Agent", "Accept-Encoding", "Accept", "Content-Type"),
        )

    async def __aenter__(self) -> Proxy:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def forward(
        self, request: web.Request, model: str, find: Callable[[], Route], body: bytes, request_id: str
    ) -> web.StreamResponse:
        """Answer `request` from a ready pod of the route that `find` returns, or with an error.

        `find` is called before each attempt, so that pods that became ready or left meanwhile are considered.
        """
        tried: set[str] = set()
        lost = 0
        answer = unavailable(f"No replica of `{model}` is ready yet: retry shortly.", "no_ready_replica")
        while len(tried) < MOST_ATTEMPTS and lost < MOST_LOST:
            backend = self._balancer.pick(find().backends, tried, self._clock())
            if backend is None:
                break
            try:
                with self._balancer.hold(backend) as ticket:
                    return await self._attempt(ticket, request, model, body, request_id)
            except _AnotherPodError as again:
                tried.add(ticket.backend.uid)
                lost += again.reason == LOST
                answer = again.refusal or unavailable(
                    f"No replica of `{model}` could take the request: retry shortly.", "replicas_unavailable"
                )
                self._metrics.retries.labels(model, again.reason).inc()
                logger.info("request %s: pod %s: %s", request_id, ticket.backend.name, again.reason)
            finally:
                self._rebalance(find)
        return answer

    def _rebalance(self, find: Callable[[], Route]) -> None:
        """A slot is free, and requests may wait on other pods."""
        with suppress(ModelNotFoundError):  # deleted while its last requests ran
            self._balancer.rebalance(find().backends, self._clock())

    async def _attempt(
        self, ticket: Ticket, request: web.Request, model: str, body: bytes, request_id: str
    ) -> web.StreamResponse:
        headers = _passed_on(request.headers, NOT_SENT_ON)
        headers["X-Request-Id"] = request_id
        started = self._clock()
        try:
            upstream = await self._response(ticket, request, model, body, headers)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            self._balancer.mark_failed(ticket.backend, self._clock())
            raise _AnotherPodError("refused") from error
        except TimeoutError:
            return error_response(504, f"A replica of `{model}` did not answer in time.", "upstream_timeout")
        except aiohttp.ClientError as error:
            self._balancer.mark_failed(ticket.backend, self._clock())
            raise _AnotherPodError(LOST) from error
        if (slots := upstream.headers.get(SLOTS_HEADER, "")).isdecimal():
            self._balancer.set_slots(ticket.backend, int(slots))
        async with upstream:
            self._metrics.upstream_latency.labels(model).observe(self._clock() - started)
            if upstream.status in REFUSALS:
                raise _AnotherPodError(str(upstream.status), await _refusal(upstream))
            return await _relay(request, upstream, request_id)

    async def _response(
        self, ticket: Ticket, request: web.Request, model: str, body: bytes, headers: CIMultiDict[str]
    ) -> aiohttp.ClientResponse:
        """The response of the ticket's pod, once it begins; sends the request again each time the ticket is moved."""
        while True:
            url = ticket.backend.url + request.path_qs
            sending = asyncio.ensure_future(
                self._session.request(request.method, url, data=body, headers=headers, allow_redirects=False)
            )
            ticket.leave = sending.cancel
            try:
                return await sending
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():  # the client left, which cancelled the request as well
                    raise
                self._metrics.retries.labels(model, MOVED).inc()
            finally:
                ticket.leave = None


async def _refusal(upstream: aiohttp.ClientResponse) -> web.Response | None:
    try:
        body = await upstream.read()
    except (aiohttp.ClientError, TimeoutError):
        return None
    headers = _passed_on(upstream.headers, HOP_BY_HOP | {"content-length"})
    headers.setdefault("Retry-After", str(RETRY_AFTER_S))
    return web.Response(status=upstream.status, headers=headers, body=body)


async def _relay(request: web.Request, upstream: aiohttp.ClientResponse, request_id: str) -> web.StreamResponse:
    """Stream the pod's response to the client.

    Where the pod's response ends early the client's connection is aborted, so that it does not look complete.
    """
    response = web.StreamResponse(status=upstream.status, headers=_passed_on(upstream.headers, HOP_BY_HOP))
    response.headers["X-Request-Id"] = request_id
    await response.prepare(request)
    try:
        async for piece in upstream.content.iter_any():
            await response.write(piece)
    except (aiohttp.ClientPayloadError, TimeoutError) as error:
        logger.warning("request %s: the pod broke off its answer: %s", request_id, type(error).__name__)
        if request.transport is not None:
            request.transport.abort()
        raise BrokenAnswerError(response) from error
    await response.write_eof()
    return response


def _passed_on(headers: CIMultiDictProxy[str], without: frozenset[str]) -> CIMultiDict[str]:
    named = {name.strip().lower() for name in headers.get("Connection", "").split(",")}
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in without | named)
