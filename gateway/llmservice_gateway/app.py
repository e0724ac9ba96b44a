"""The gateway's HTTP API: OpenAI's paths, forwarded to the pods, health, readiness and metrics."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from llmservice_gateway.metrics import UNKNOWN_MODEL, GatewayMetrics
from llmservice_gateway.openai_error import error_response
from llmservice_gateway.proxy import BrokenAnswerError, Proxy
from llmservice_gateway.routes import ModelNotFoundError, Route
from llmservice_gateway.routing import Routing

logger = logging.getLogger(__name__)

INFERENCE_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/rerank", "/v1/score")
LONGEST_REQUEST_ID = 128
CLIENT_LEFT = "499"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Limits of requests."""

    max_body_bytes: int = 16 * 1024**2
    read_timeout_s: float = 600.0
    """How long a pod may pause within a response."""


class _BadRequestError(Exception):
    def __init__(self, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class Gateway:
    """The handlers and their shared state. `app()` returns the application that a runner serves."""

    def __init__(self, routing: Routing, config: GatewayConfig | None = None) -> None:
        self._routing = routing
        self._config = config or GatewayConfig()
        self.metrics = GatewayMetrics()
        self._proxy: Proxy | None = None
        self.draining = False
        """Set on SIGTERM: not ready any more, though requests are still served."""

    def app(self, *, serves_metrics: bool = False) -> web.Application:
        """The API; `serves_metrics`: with /metrics, which otherwise `metrics_app` serves."""
        app = web.Application(client_max_size=self._config.max_body_bytes, middlewares=[_openai_errors])
        app.cleanup_ctx.append(self._connections)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        if serves_metrics:
            app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{model:.+}", self._model)
        for path in INFERENCE_PATHS:
            app.router.add_post(path, self._infer)
        return app

    def metrics_app(self) -> web.Application:
        """/metrics alone, for a port that clients cannot reach."""
        app = web.Application(middlewares=[_openai_errors])
        app.router.add_get("/metrics", self._metrics)
        return app

    async def _connections(self, _app: web.Application) -> AsyncIterator[None]:
        async with Proxy(self._routing.balancer, self.metrics, self._config.read_timeout_s) as self._proxy:
            yield

    async def _health(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _ready(self, _request: web.Request) -> web.Response:
        reason = "draining" if self.draining else None if self._routing.synced else "the cluster has not been read yet"
        return web.json_response({"ready": reason is None, "reason": reason}, status=503 if reason else 200)

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self.metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _models(self, _request: web.Request) -> web.Response:
        models = [_model_object(model, route) for model, route in self._routing.table.models()]
        return web.json_response({"object": "list", "data": models})

    async def _model(self, request: web.Request) -> web.Response:
        model = request.match_info["model"]
        try:
            return web.json_response(_model_object(model, self._routing.table.find(model)))
        except ModelNotFoundError as error:
            return _not_found(error)

    async def _infer(self, request: web.Request) -> web.StreamResponse:
        request_id = _request_id(request)
        try:
            raw = await request.read()
            payload = _parse(raw)
            model = payload["model"]
            route = self._routing.table.find(model)
        except _BadRequestError as error:
            response = error_response(400, str(error), error.code, error.param)
        except ModelNotFoundError as error:
            response = _not_found(error)
        except web.HTTPRequestEntityTooLarge as error:
            response = error_response(413, f"The request is too large: {error.text}.", "request_too_large")
        else:
            body = raw if model == route.served_name else _renamed(payload, route.served_name)
            return await self._forward(request, model, body, request_id)
        self.metrics.requests.labels(UNKNOWN_MODEL, response.status).inc()
        response.headers["X-Request-Id"] = request_id
        return response

    async def _forward(self, request: web.Request, model: str, body: bytes, request_id: str) -> web.StreamResponse:
        if self._proxy is None:
            raise RuntimeError("the application has not been started")
        code = CLIENT_LEFT  # where the handler is cancelled, or a write fails, because the client left
        with self.metrics.in_flight.labels(model).track_inprogress():
            try:
                response = await self._proxy.forward(
                    request, model, lambda: self._routing.table.find(model), body, request_id
                )
                code = str(response.status)
            except ModelNotFoundError as error:  # deleted meanwhile
                response = _not_found(error)
                code = "404"
            except BrokenAnswerError as error:
                response = error.response
                code = "502"
            finally:
                self.metrics.requests.labels(model, code).inc()
        if not response.prepared:
            response.headers["X-Request-Id"] = request_id
        return response


@web.middleware
async def _openai_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """aiohttp's own errors in OpenAI's shape."""
    try:
        return await handler(request)
    except web.HTTPNotFound:
        return error_response(404, f"There is no {request.method} {request.path} here.", "not_found")
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        response = error_response(405, f"{request.path} takes {allowed}, not {request.method}.", "method_not_allowed")
        response.headers["Allow"] = allowed
        return response


def _parse(raw: bytes) -> dict[str, Any]:
    """The request's body; only `model` is validated here, the rest by the pod."""
    try:
        payload = json.loads(raw)
    except UnicodeDecodeError as error:
        raise _BadRequestError("The request's body is not valid UTF-8.", "invalid_json") from error
    except (ValueError, RecursionError) as error:
        raise _BadRequestError(f"The request's body is not valid JSON: {error}.", "invalid_json") from error
    if not isinstance(payload, dict):
        raise _BadRequestError("The request's body must be a JSON object.", "invalid_json")
    if not isinstance(payload.get("model"), str) or not payload["model"]:
        raise _BadRequestError("`model` must name a served model; GET /v1/models lists them.", "missing_model", "model")
    return payload


def _renamed(payload: dict[str, Any], served_name: str) -> bytes:
    """The body with the served name alone: pods do not know their namespace."""
    return json.dumps(payload | {"model": served_name}).encode()


def _not_found(error: ModelNotFoundError) -> web.Response:
    return error_response(404, str(error), "model_not_found", "model")


def _model_object(model: str, route: Route) -> dict[str, Any]:
    return {
        "id": model,
        "object": "model",
        "created": route.created,
        "owned_by": "llmservice",
        "namespace": route.namespace,
        "ready": bool(route.backends),
        "ready_replicas": len(route.backends),
        "parent": route.parent,
    }


def _request_id(request: web.Request) -> str:
    """The client's own, truncated, so that its logs and ours can be joined; else a new one."""
    return request.headers.get("X-Request-Id", "")[:LONGEST_REQUEST_ID] or uuid.uuid4().hex
