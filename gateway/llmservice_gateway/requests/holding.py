"""Requests held while their service has no ready pod: for a service scaled to zero, they are what starts one.

A request is held while a pod can be expected. It goes to a pod in the order of arrival, as soon as one has room; so
many clients that wake a service do not all land on its first pod.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from starlette.datastructures import Headers

from llmservice_gateway.metrics import GatewayMetrics
from llmservice_gateway.openai_error import GatewayError, unavailable
from llmservice_gateway.reply import Reply
from llmservice_gateway.routing.balancer import Balancer
from llmservice_gateway.routing.demand import Demand
from llmservice_gateway.routing.routes import Backend, Route

AHEAD = 2
"""Requests that a pod gets at once for each of its slots: one runs, and the next one is there when it ends."""
RETRY_AFTER_FULL_S = 10
FAILED_FOR_S = 5.0
"""A request is tried again on pods that have failed it after this time, if they are still there."""


@dataclass(frozen=True, slots=True)
class HoldLimits:
    """Of one gateway, over all services. With `timeout_s` 0 no request is held."""

    requests: int = 1000
    body_bytes: int = 128 * 1024**2
    timeout_s: float = 600.0
    comment_s: float = 10.0
    """Clients of streams receive a comment each time that this has passed, so that no proxy closes the connection."""


@dataclass(slots=True)
class PodRequest:
    """What is sent to a pod, and held while there is none."""

    path: str
    """With the query."""
    headers: Headers
    """The client's."""
    body: bytes
    """Empty once a response has begun."""
    request_id: str
    arrived_s: float
    is_stream: bool
    """Whether the client expects server-sent events."""
    timeout_s: float | None
    """What the client allows for its answer."""
    model: str
    """As the client named it."""
    find: Callable[[], Route]
    """The present route of the model; raises a GatewayError where there is none any more."""
    pod_headers: Callable[[Backend], Mapping[str, str]] = lambda _: {}
    """Of the gateway itself, for one pod."""
    withheld: frozenset[str] = frozenset()
    """Further headers of the client that no pod gets to see."""
    is_counted: bool = False
    """Whether a pod has counted its arrival."""


@dataclass(slots=True, eq=False)
class _Held:
    request: PodRequest
    demand: Demand
    key: tuple[str, str]
    """Of its queue."""
    service: str
    since_s: float
    avoid: set[str]
    """Pods (uids) that have just failed this request; cleared as they leave the table."""
    outcome: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Holding:
    """The queues of held requests, one for each served name. `advance` is to be called on every change."""

    def __init__(self, balancer: Balancer, metrics: GatewayMetrics, limits: HoldLimits) -> None:
        self._balancer = balancer
        self._metrics = metrics
        self._limits = limits
        self._queues: dict[tuple[str, str], dict[_Held, None]] = {}
        self._released: dict[_Held, None] = {}
        """Those that may go and have not gone yet: they are in flight nowhere."""
        self._body_bytes = 0

    def is_holding(self, route: Route) -> bool:
        """Whether a request has to queue behind others."""
        return _key(route) in self._queues

    def can_hold(self, route: Route) -> bool:
        """Whether a pod can be expected, and requests are held at all."""
        return self._limits.timeout_s > 0 and _is_awaited(route)

    def report(self) -> dict[str, Mapping[str, float]]:
        """By `namespace/name` of the LLMService: the number of held requests, their tokens, and the oldest's age."""
        now, report = time.monotonic(), dict[str, dict[str, float]]()
        for queue in self._queues.values():
            for held in queue:
                one = report.setdefault(held.service, {"requests": 0, "tokens": 0, "oldest_s": 0.0})
                one["requests"] += 1
                one["tokens"] += held.demand.prompt_tokens + held.demand.output_tokens
                one["oldest_s"] = max(one["oldest_s"], round(now - held.since_s, 3))
        return dict(report)

    async def wait(self, request: PodRequest, demand: Demand, reply: Reply, failed: set[str]) -> set[str]:
        """Return once a pod has room for the request, which must then be put on one without another `await`.

        `failed` are the pods (uids) that the request has been tried on; returns those that are still the same.

        Raises:
            GatewayError: no pod is to be expected, too much is held already, or it took too long.
        """
        route = request.find()
        if not self.can_hold(route):
            raise _no_replica(route, request.model)
        if self._is_full(request):
            self._metrics.held_seconds.labels(request.model, "refused").observe(0.0)
            message = f"No replica of `{request.model}` is ready yet, and too many requests are waiting for one: retry."
            raise unavailable(message, "too_many_held_requests", RETRY_AFTER_FULL_S)
        service = next(service for service in route.services if service.is_awaited)
        held = _Held(request, demand, _key(route), f"{route.namespace}/{service.name}", time.monotonic(), set(failed))
        with self._queued(held):
            self.advance()
            deadline_s = request.arrived_s + min(self._limits.timeout_s, request.timeout_s or math.inf)
            comment_s = request.arrived_s + self._limits.comment_s if request.is_stream else math.inf
            retry_s = held.since_s + FAILED_FOR_S if failed else math.inf
            while not held.outcome.done():
                now = time.monotonic()
                if now >= deadline_s:
                    raise self._too_late(request, deadline_s - request.arrived_s)
                if now >= retry_s:
                    held.avoid.clear()
                    retry_s = math.inf
                    self.advance()
                if now >= comment_s:
                    await reply.keep_waiting()
                    comment_s = now + self._limits.comment_s
                wake_s = min(deadline_s, comment_s, retry_s)
                await asyncio.wait([held.outcome], timeout=max(0.0, wake_s - now))
            held.outcome.result()
        return held.avoid

    def advance(self) -> None:
        """Release held requests for which there is room now, and refuse those for which no pod is to be expected."""
        for queue in list(self._queues.values()):
            for held in list(queue):
                try:
                    if not self._may_go(held):
                        break
                except GatewayError as error:
                    held.outcome.set_exception(error)
                else:
                    held.outcome.set_result(None)
                    self._released[held] = None
                del queue[held]
        self._queues = {key: queue for key, queue in self._queues.items() if queue}

    def _may_go(self, held: _Held) -> bool:
        """Raises GatewayError where no pod is to be expected."""
        route = held.request.find()
        held.avoid &= {backend.uid for backend in route.backends}
        candidates = [backend for backend in route.backends if backend.uid not in held.avoid]
        if not candidates and not _is_awaited(route):
            raise _no_replica(route, held.request.model)
        released = sum(other.key == held.key for other in self._released)
        return bool(candidates) and self._has_room(candidates, released)

    def _is_full(self, request: PodRequest) -> bool:
        count = sum(map(len, self._queues.values()))
        return count >= self._limits.requests or self._body_bytes + len(request.body) > self._limits.body_bytes

    @contextmanager
    def _queued(self, held: _Held) -> Iterator[None]:
        key, model, size = held.key, held.request.model, len(held.request.body)
        queue = self._queues.setdefault(key, {})
        if not queue:
            self._metrics.wake_ups.labels(model).inc()
        queue[held] = None
        self._body_bytes += size
        self._metrics.held.labels(model).inc()
        outcome = "left"
        try:
            yield
            outcome = "forwarded"
        except GatewayError:
            outcome = "refused"
            raise
        finally:
            self._released.pop(held, None)
            if self._queues.get(key, {}).pop(held, held) is None and not self._queues[key]:
                del self._queues[key]
            self._body_bytes -= size
            self._metrics.held.labels(model).dec()
            self._metrics.held_seconds.labels(model, outcome).observe(time.monotonic() - held.since_s)
            if held.outcome.done():
                held.outcome.exception()  # seen, also where the client left meanwhile

    def _has_room(self, backends: list[Backend], released: int) -> bool:
        room = 0
        for backend in backends:
            slots = self._balancer.slots(backend)
            if not slots:  # unknown: the pod's own queue decides
                return True
            room += max(0, AHEAD * slots - self._balancer.in_flight(backend))
        return room > released

    def _too_late(self, request: PodRequest, after_s: float) -> GatewayError:
        message = f"No replica of `{request.model}` became ready within {after_s:g} s: retry."
        return unavailable(message, "no_ready_replica", RETRY_AFTER_FULL_S)


def _key(route: Route) -> tuple[str, str]:
    return route.namespace, route.served_name


def _is_awaited(route: Route) -> bool:
    return any(service.is_awaited for service in route.services)


def _no_replica(route: Route, model: str) -> GatewayError:
    why = next((f"{one.reason}: {one.message}" for one in route.services if not one.is_awaited), "retry shortly")
    return unavailable(f"No replica of `{model}` is ready: {why}", "no_ready_replica")
