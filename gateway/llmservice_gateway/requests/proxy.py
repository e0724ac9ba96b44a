"""Forwards a request to a pod and streams its response back.

Until a response begins the request may be retried on another pod, and after that not.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from llmservice_gateway.access.signing import TOKEN_HEADER
from llmservice_gateway.metrics import GatewayMetrics
from llmservice_gateway.openai_error import RETRY_AFTER_S, GatewayError, unavailable
from llmservice_gateway.reply import Reply
from llmservice_gateway.requests.holding import Holding, PodRequest
from llmservice_gateway.routing.balancer import Balancer, Ticket
from llmservice_gateway.routing.demand import Demand, Usage
from llmservice_gateway.routing.routes import Backend, Route

logger = logging.getLogger(__name__)

MOST_ATTEMPTS = 3
LOST, LOST_WAITING, MOVED, UNTRUSTED = "lost", "lost_waiting", "moved", "untrusted"
MOST_LOST = 2
"""Attempts that may end with a pod lost while it ran the request: one that kills pods must not kill them all."""
MOST_LOST_WAITING = 6
"""Attempts that may end with a pod lost while the request waited there, which is not its fault. They are bounded: the
order of arrival tells that it waited, and a pod with lanes may run a later request first."""
QUEUE_FULL = "429"
REFUSALS = frozenset({429, 503})
"""Statuses of a pod whose queue is full, or that drains: another one may have capacity."""
CONNECT_TIMEOUT_S = 5.0
KEEPALIVE_S = 2.0
"""Far below the keep-alive of the pods, so that no connection is reused while the pod closes it."""

LOST_AFTER = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}
"""Ends the connections to a node that is lost, which nothing closes, after 25 s: while requests wait for its answer by
probes, while it has not acknowledged one by the timeout (in ms). Else they would wait for the read timeout."""

# RFC 9110, section 7.6.1: these concern one connection and are not forwarded.
HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer"}
    | {"transfer-encoding", "upgrade"}
)
SLOTS_HEADER = "x-admissible-sequences"
"""How many requests like those before a pod runs at once, as it reports with each response."""
TIMEOUT_HEADER = "x-llmservice-timeout"
"""The client's time limit; a pod is sent what is left of it."""
USAGE_HEADER = "x-llmservice-usage"
"""Of a request: asks the pod to report the tokens of its answer; of a response: the report."""
COUNTED_HEADER = "x-llmservice-counted"
"""Sent to a pod where another one has counted the request's arrival, and then refused it or had it moved."""
OURS = frozenset({USAGE_HEADER, TOKEN_HEADER, COUNTED_HEADER})
"""Headers between gateway and pods: a client's are not forwarded, nor are the pods' sent to clients."""
NOT_PASSED_ON = HOP_BY_HOP | OURS | {"date"}
NOT_SENT_ON = HOP_BY_HOP | OURS | {"host", "content-length", "expect"}
_USAGE_COMMENT = re.compile(rb"^: llmservice-usage ([0-9 ]+)\n\n", re.MULTILINE)
_LONGEST_EVENT_BYTES = 2**20
"""A longer part of an event is passed on before the event ends."""


class _AnotherPodError(Exception):
    """This pod refused the request, and no part of a response has reached the client."""

    def __init__(self, reason: str, refusal: _Refusal | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.refusal = refusal
        """The pod's response, used if no other pod accepts the request."""


@dataclass(frozen=True, slots=True)
class _Refusal:
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Proxy:
    """Sends requests to pods through one connection pool. Made in the event loop in which it is used."""

    def __init__(self, balancer: Balancer, metrics: GatewayMetrics, holding: Holding, read_timeout_s: float) -> None:
        self._balancer = balancer
        self._metrics = metrics
        self._holding = holding
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, socket_factory=_watched_socket),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=read_timeout_s),
            auto_decompress=False,  # responses are forwarded unchanged
            skip_auto_headers=("User-Agent", "Accept-Encoding", "Accept", "Content-Type"),
            cookie_jar=aiohttp.DummyCookieJar(),  # one client's cookies are not for another's requests
        )

    async def close(self) -> None:
        await self._session.close()

    async def forward(self, request: PodRequest, demand: Demand, reply: Reply) -> Usage | None:
        """Answer `request` from a ready pod of its route; returns what the pod reports to have used.

        The route is looked up before each attempt, so that pods that became ready or left meanwhile are considered.
        Without a pod to try, the request is held.

        Raises:
            GatewayError: no pod could answer, or the answer broke off.
        """
        tried: set[str] = set()
        failures = Counter[str]()
        held_s = 0.0
        refusal: _Refusal | None = None
        while _may_try(failures):
            route = request.find()
            backend = None if self._holding.is_holding(route) else self._pick(route, tried, demand)
            if backend is None and refusal is not None:
                is_ending = refusal.status == 503  # not full: another pod takes its place, or it becomes ready again
                if not (is_ending and self._holding.can_hold(route)):
                    break
            if backend is None:  # no pod is ready, or those that are have just failed
                since_s = time.monotonic()
                tried = await self._holding.wait(request, demand, reply, tried)
                held_s += time.monotonic() - since_s
                backend = self._pick(request.find(), tried, demand)
                if backend is None:
                    continue
            if not failures:
                self._metrics.added_latency.labels(request.model).observe(time.monotonic() - request.arrived_s - held_s)
            self._count_affinity(request, backend, demand)
            try:
                with self._balancer.hold(backend, demand) as ticket:
                    usage = await self._attempt(ticket, request, reply)
                    self._balancer.learn(ticket.backend, demand, usage)
                    return usage
            except _AnotherPodError as again:
                tried.add(ticket.backend.uid)
                failures[again.reason] += 1
                refusal = again.refusal
                request.is_counted |= again.reason == QUEUE_FULL
                self._metrics.retries.labels(request.model, again.reason).inc()
                logger.info("request %s: pod %s: %s", request.request_id, ticket.backend.name, again.reason)
            finally:
                self._rebalance(request)
                self._holding.advance()
        if refusal is None:
            message = f"No replica of `{request.model}` could take the request: retry shortly."
            raise unavailable(message, "replicas_unavailable")
        await reply.refuse(refusal.status, refusal.headers, refusal.body)
        return None

    def _pick(self, route: Route, tried: set[str], demand: Demand) -> Backend | None:
        return self._balancer.pick(route.backends, tried, time.monotonic(), demand, by_prefix=route.by_prefix)

    def _count_affinity(self, request: PodRequest, backend: Backend, demand: Demand) -> None:
        if (has_prefix := self._balancer.has_prefix(backend, demand)) is not None:
            self._metrics.affinity.labels(request.model, "hit" if has_prefix else "miss").inc()

    def _rebalance(self, request: PodRequest) -> None:
        """A slot is free, and requests may wait on other pods."""
        with suppress(GatewayError):  # deleted while its last requests ran
            self._balancer.rebalance(request.find().backends, time.monotonic())

    async def _attempt(self, ticket: Ticket, request: PodRequest, reply: Reply) -> Usage | None:
        started = time.monotonic()
        try:
            upstream = await self._response(ticket, request)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            self._balancer.mark_failed(ticket.backend, time.monotonic())
            raise _AnotherPodError("refused") from error
        except TimeoutError:
            message = f"A replica of `{request.model}` did not answer in time."
            raise GatewayError(504, message, "upstream_timeout") from None
        except aiohttp.ClientError as error:
            self._balancer.mark_failed(ticket.backend, time.monotonic())
            raise _AnotherPodError(LOST_WAITING if ticket.has_waited else LOST) from error
        if (slots := upstream.headers.get(SLOTS_HEADER, "")).isdecimal():
            self._balancer.set_slots(ticket.backend, int(slots))
        async with upstream:
            self._metrics.upstream_latency.labels(request.model).observe(time.monotonic() - started)
            if upstream.status == 401 and upstream.headers.get("WWW-Authenticate") == TOKEN_HEADER:
                logger.error(
                    "pod %s takes only signed requests, and not this gateway's: give it --signing-keys with the key"
                    " whose public half the operator has, and let the nodes' clocks agree",
                    ticket.backend.name,
                )
                raise _AnotherPodError(UNTRUSTED)
            if upstream.status in REFUSALS:
                raise _AnotherPodError(str(upstream.status), await _refusal(upstream))
            request.body = b""  # no other pod is sent it any more
            try:
                return await _relay(upstream, request, reply)
            except GatewayError:
                self._balancer.mark_failed(ticket.backend, time.monotonic())
                raise

    async def _response(self, ticket: Ticket, request: PodRequest) -> aiohttp.ClientResponse:
        """The response of the ticket's pod, once it begins; sends the request again each time the ticket is moved."""
        passed = _sent_on(request)
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("must run in a task")
        is_moved = False

        def leave() -> bool:
            nonlocal is_moved
            is_moved = is_moved or task.cancel()  # it may be moved twice before it notices
            return is_moved

        while True:
            headers = passed.copy()
            if request.is_counted:
                headers[COUNTED_HEADER] = "1"
            if request.timeout_s is not None and (waited_s := time.monotonic() - request.arrived_s) >= 1:
                headers[TIMEOUT_HEADER] = f"{max(0.001, request.timeout_s - waited_s):.3f}"
            headers.update(request.pod_headers(ticket.backend))
            url = URL(ticket.backend.url + request.path, encoded=True)
            ticket.leave = leave
            try:  # not in a task of its own, which would be two more turns of the event loop
                return await self._session.request(
                    "POST", url, data=request.body, headers=headers, allow_redirects=False
                )
            except asyncio.CancelledError:
                if not is_moved or task.uncancel():  # the client left
                    raise
                is_moved = False
                request.is_counted = True
                self._metrics.retries.labels(request.model, MOVED).inc()
            finally:
                ticket.leave = None


def _watched_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in LOST_AFTER.items():
        if hasattr(socket, option):  # macOS lacks some
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return made


def _may_try(failures: Counter[str]) -> bool:
    waiting = failures[LOST_WAITING]
    return failures.total() - waiting < MOST_ATTEMPTS and failures[LOST] < MOST_LOST and waiting < MOST_LOST_WAITING


async def _refusal(upstream: aiohttp.ClientResponse) -> _Refusal | None:
    try:
        body = await upstream.read()
    except (aiohttp.ClientError, TimeoutError):
        return None
    headers = [one for one in _passed_on(upstream) if one[0].lower() != b"content-length"]
    headers.append((b"content-length", b"%d" % len(body)))
    if "Retry-After" not in upstream.headers:
        headers.append((b"retry-after", b"%d" % RETRY_AFTER_S))
    return _Refusal(upstream.status, headers, body)


async def _relay(upstream: aiohttp.ClientResponse, request: PodRequest, reply: Reply) -> Usage | None:
    """Stream the pod's response to the client."""
    if reply.status is None:
        await reply.start(upstream.status, _passed_on(upstream))
    elif upstream.status != 200:  # the client has been sent comments, and with them the status
        answer = await _refusal(upstream)
        await reply.refuse(upstream.status, [], b"" if answer is None else answer.body)
        return None
    events = EventRelay() if reply.is_event_stream else None
    read, write = upstream.content.readany, reply.write
    try:
        while piece := await read():
            if events is not None:
                piece = events.feed(piece)
                if not piece:
                    continue
            await write(piece)
    except (aiohttp.ClientError, TimeoutError) as error:
        logger.warning("request %s: the pod broke off its answer: %s", request.request_id, type(error).__name__)
        message = f"The replica of `{request.model}` broke off its answer: send the request again."
        raise GatewayError(502, message, "upstream_broke_off") from error
    if events is None:
        await reply.end()
        return Usage.parse(upstream.headers.get(USAGE_HEADER, ""))
    await reply.end(events.rest)
    return events.usage


class EventRelay:
    """Takes a pod's server-sent events in any pieces and returns whole ones, without the pod's report of its usage.

    So a stream that breaks off does so between two events, and an error can follow.
    """

    def __init__(self) -> None:
        self.usage: Usage | None = None
        self.rest = b""
        """The beginning of an event that has not ended."""

    def feed(self, piece: bytes) -> bytes:
        """The events that end within `piece`."""
        if self.rest:
            piece = self.rest + piece
            self.rest = b""
        if not piece.endswith(b"\n\n"):
            end = piece.rfind(b"\n\n") + 2 if b"\n\n" in piece else 0
            if len(piece) - end <= _LONGEST_EVENT_BYTES:
                piece, self.rest = piece[:end], piece[end:]
        if b": llmservice-usage" in piece and (found := _USAGE_COMMENT.search(piece)):
            self.usage = Usage.parse(found[1].decode())
            piece = piece[: found.start()] + piece[found.end() :]
        return piece


def _sent_on(request: PodRequest) -> CIMultiDict[str]:
    """The client's headers, and ours."""
    named = _named(request.headers.get("connection", ""))
    headers = CIMultiDict(
        (name.decode("latin-1"), value.decode("utf-8", "surrogateescape"))
        for name, value in request.headers.raw
        if (lower := name.decode("latin-1")) not in NOT_SENT_ON and lower not in named and lower not in request.withheld
    )
    headers["X-Request-Id"] = request.request_id
    headers[USAGE_HEADER] = "1"
    return headers


def _passed_on(upstream: aiohttp.ClientResponse) -> list[tuple[bytes, bytes]]:
    named = _named(upstream.headers.get("Connection", ""))
    return [
        (name, value)
        for name, value in upstream.raw_headers
        if (lower := name.decode("latin-1").lower()) not in NOT_PASSED_ON and lower not in named
    ]


def _named(connection: str) -> set[str]:
    """The headers that a Connection header names: they concern this connection alone."""
    return {name.strip().lower() for name in connection.split(",")}
