"""The inference endpoints: one ASGI callable from a client's request to its last byte.

Not FastAPI's, whose routing and middleware cost more than a chunk of a stream may.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers

from llmservice_gateway.access.admission import Access, Admission
from llmservice_gateway.access.keys import Key
from llmservice_gateway.metrics import UNKNOWN_MODEL, GatewayMetrics
from llmservice_gateway.openai_error import GatewayError, unavailable
from llmservice_gateway.reply import BrokenAnswerError, Receive, Reply, Send
from llmservice_gateway.requests.holding import Holding, HoldLimits, PodRequest
from llmservice_gateway.requests.proxy import TIMEOUT_HEADER, Proxy
from llmservice_gateway.routing.demand import Demand, Estimator, Usage, affinity
from llmservice_gateway.routing.routes import Route
from llmservice_gateway.routing.table import Routing

GENERATING_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
INFERENCE_PATHS = (*GENERATING_PATHS, "/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score")
SESSION_HEADER = "x-session-id"
LONGEST_REQUEST_ID = 128
CLIENT_LEFT = "499"
_DISCARDED_BYTES = 64 * 1024**2
"""Of a body that is too large: clients that are still sending when the connection is closed do not see the answer."""
_MOST_VALUES = 2**20
"""Of a body, by its commas. Reading more would delay all other requests, and they are more tokens than models take."""


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Limits of requests."""

    max_body_bytes: int = 16 * 1024**2
    read_timeout_s: float = 600.0
    """How long a pod may pause within a response."""
    client_timeout_s: float = 60.0
    """How long a client may take to send a request's head, or its body, or may read nothing of what it is sent."""
    hold: HoldLimits = field(default_factory=HoldLimits)


class _ClientLeftError(Exception):
    """Nobody waits for the answer."""


class Inference:
    """Serves INFERENCE_PATHS. Made in the event loop that serves it; `close` it at the end."""

    def __init__(self, routing: Routing, metrics: GatewayMetrics, config: GatewayConfig, access: Access | None) -> None:
        self._routing = routing
        self._metrics = metrics
        self._config = config
        self._access = access
        self._estimators: dict[str, Estimator] = {}
        self.holding = Holding(routing.balancer, metrics, config.hold)
        routing.changed = self.holding.advance
        self._proxy = Proxy(routing.balancer, metrics, self.holding, config.read_timeout_s)

    async def close(self) -> None:
        """Close the connections to the pods."""
        await self._proxy.close()

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        headers = Headers(raw=scope["headers"])
        reply = Reply(send)
        request_id = _request_id(headers)
        reply.headers.append((b"x-request-id", request_id.encode("latin-1")))
        model, code = UNKNOWN_MODEL, CLIENT_LEFT
        key: Key | None = None
        try:
            try:
                key = self._access.identify(headers) if self._access is not None else None
                if scope["method"] != "POST":
                    raise _wrong_method(scope)
                payload, raw = await self._body(scope, receive)
                named = payload["model"]
                route = self._routing.table.find(named)
                model = named
                request = PodRequest(
                    path=_path(scope),
                    headers=headers,
                    body=raw if model == route.served_name else _renamed(payload, route.served_name),
                    request_id=request_id,
                    arrived_s=time.monotonic(),
                    timeout_s=_timeout_s(headers),
                    is_stream=payload.get("stream") is True and scope["path"] in GENERATING_PATHS,
                    model=model,
                    find=lambda: self._routing.table.find(model),
                )
                demand = self._demand(request, payload)
                del payload, raw  # they would take memory for as long as the request is held, or runs
                await self._answer(request, demand, key, receive, reply)
            except (GatewayError, RecursionError) as error:
                refusal = error if isinstance(error, GatewayError) else _nested_too_deeply()
                code = str(refusal.status)
                await reply.fail(refusal)
            else:
                code = str(reply.status)
        except (_ClientLeftError, BrokenAnswerError) as error:
            code = CLIENT_LEFT if isinstance(error, _ClientLeftError) else "502"
        finally:
            self._metrics.requests.labels(model, code).inc()
            if self._access is not None and key is not None:
                self._access.answered(key, model, code)

    def _estimator(self, route: Route) -> Estimator:
        return self._estimators.setdefault(_name(route), Estimator())

    def _demand(self, request: PodRequest, payload: dict[str, Any]) -> Demand:
        route = request.find()
        session = request.headers.get(SESSION_HEADER)
        generates = request.path.partition("?")[0] in GENERATING_PATHS
        shared = affinity(_name(route), payload, session, generates=generates)
        return self._estimator(route).demand(payload, generates=generates, affinity=shared)

    async def _answer(
        self, request: PodRequest, demand: Demand, key: Key | None, receive: Receive, reply: Reply
    ) -> None:
        route = request.find()
        admission: Admission | None = None
        if self._access is not None and key is not None:
            admission = await self._access.admit(key, request.model, route, demand)
            reply.headers += [(name.lower().encode(), value.encode()) for name, value in admission.headers.items()]
            request.pod_headers = admission.pod_headers
            request.withheld |= {"authorization"}
        usage: Usage | None = None
        status: int | None = None  # of a refusal
        try:
            with self._metrics.in_flight.labels(request.model).track_inprogress():
                async with _cancelled_when_client_leaves(receive, reply):
                    usage = await self._proxy.forward(request, demand, reply)
            status = reply.status
        except GatewayError as error:
            status = error.status
            raise
        except asyncio.CancelledError:
            raise unavailable("The gateway is shutting down: retry.", "shutting_down") from None
        finally:
            if usage is not None:
                self._estimator(route).learn(demand, usage)
            if admission is not None:
                await admission.settle(_NOTHING if usage is None and _computed_nothing(status) else usage)

    async def _body(self, scope: Mapping[str, Any], receive: Receive) -> tuple[dict[str, Any], bytes]:
        """The body, parsed and raw. A refusal closes the connection where the rest would be read as a request."""
        limit, timeout_s = self._config.max_body_bytes, self._config.client_timeout_s
        body, num_bytes = bytearray(), 0
        try:
            async with asyncio.timeout(timeout_s):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _ClientLeftError
                    chunk = message.get("body", b"")
                    num_bytes += len(chunk)
                    if num_bytes <= limit:
                        body += chunk
                    more = message.get("more_body", False) and num_bytes <= limit + _DISCARDED_BYTES
        except TimeoutError:
            raise GatewayError(
                408,
                f"The request's body was not complete within {timeout_s:g} s: send it faster, or have the gateway's"
                " --client-timeout raised.",
                "request_timeout",
                headers={"Connection": "close"},
            ) from None
        if num_bytes > limit:
            raise GatewayError(
                413,
                f"The request is too large: its body has more than {limit} bytes. Send less at once, or"
                " have the gateway's --max-body-mib raised.",
                "request_too_large",
                headers={"Connection": "close"},
            )
        raw = bytes(body)
        return _parse(raw), raw


@asynccontextmanager
async def _cancelled_when_client_leaves(receive: Receive, reply: Reply) -> AsyncIterator[None]:
    """Run the block, whose cancellation closes the connection to the pod and frees its blocks there.

    Raises:
        _ClientLeftError: the client closed its connection before the reply had ended.
    """
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("must run in a task")
    left = False

    async def watch() -> None:
        nonlocal left
        while (await receive())["type"] != "http.disconnect":
            pass
        if not reply.ended:
            left = True
            task.cancel()

    watching = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if left and task.uncancel() == 0:
            raise _ClientLeftError from None
        raise
    finally:
        watching.cancel()


_NOTHING = Usage(0, 0, 0)


def _computed_nothing(status: int | None) -> bool:
    """Whether a request was refused, by a pod or because there is none."""
    return status is not None and (400 <= status < 500 or status == 503)


def _parse(raw: bytes) -> dict[str, Any]:
    """The request's body; only `model` is validated here, the rest by the pod."""
    if raw.count(b",") > _MOST_VALUES:
        message = f"The request is too large: its body has more than {_MOST_VALUES} commas. Send less at once."
        raise GatewayError(413, message, "request_too_large")
    try:
        payload = json.loads(raw)
    except UnicodeDecodeError:
        raise GatewayError(400, "The request's body is not valid UTF-8.", "invalid_json") from None
    except (ValueError, RecursionError) as error:
        raise GatewayError(400, f"The request's body is not valid JSON: {error}.", "invalid_json") from None
    if not isinstance(payload, dict):
        raise GatewayError(400, "The request's body must be a JSON object.", "invalid_json")
    if not isinstance(payload.get("model"), str) or not payload["model"]:
        message = "`model` must name a served model; GET /v1/models lists them."
        raise GatewayError(400, message, "missing_model", "model")
    return payload


def _nested_too_deeply() -> GatewayError:
    """Of a body that could just be parsed, and not be read further."""
    return GatewayError(
        400, "The request's body is not valid JSON for a model: it is nested too deeply.", "invalid_json"
    )


def _name(route: Route) -> str:
    return f"{route.namespace}/{route.served_name}"


def _renamed(payload: dict[str, Any], served_name: str) -> bytes:
    """The body with the served name alone: pods do not know their namespace."""
    return json.dumps(payload | {"model": served_name}).encode()


def _timeout_s(headers: Mapping[str, str]) -> float | None:
    """None also for a value that the pod will refuse."""
    try:
        timeout_s = float(headers.get(TIMEOUT_HEADER, ""))
    except ValueError:
        return None
    return timeout_s if 0 < timeout_s < math.inf else None


def _wrong_method(scope: Mapping[str, Any]) -> GatewayError:
    message = f"{scope['path']} takes POST, not {scope['method']}."
    return GatewayError(405, message, "method_not_allowed", headers={"Allow": "POST"})


def _path(scope: Mapping[str, Any]) -> str:
    query = scope["query_string"].decode("latin-1")
    return f"{scope['path']}?{query}" if query else str(scope["path"])


def _request_id(headers: Mapping[str, str]) -> str:
    """The client's own, truncated, so that its logs and ours can be joined; else a new one."""
    return headers.get("x-request-id", "")[:LONGEST_REQUEST_ID] or uuid.uuid4().hex
