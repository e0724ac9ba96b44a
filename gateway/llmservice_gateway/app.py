"""The gateway's HTTP API: the inference endpoints, and with FastAPI models, health, readiness and metrics."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from llmservice_gateway.access.admission import Access
from llmservice_gateway.metrics import GatewayMetrics
from llmservice_gateway.openai_error import GatewayError
from llmservice_gateway.reply import Receive, Send
from llmservice_gateway.requests.inference import INFERENCE_PATHS, GatewayConfig, Inference
from llmservice_gateway.routing.routes import Route
from llmservice_gateway.routing.table import Routing

logger = logging.getLogger(__name__)

RATE_LIMIT_HEADERS = [
    f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")
]


class Model(BaseModel):
    """A served model or LoRA adapter."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "llmservice"
    namespace: str
    ready: bool
    ready_replicas: int
    parent: str | None
    """Of an adapter, the name of its model."""


class Models(BaseModel):
    """What requests may name."""

    object: str = "list"
    data: list[Model]


class Health(BaseModel):
    """The process answers."""

    status: str = "ok"


class Readiness(BaseModel):
    """Whether requests should be sent here, and why not."""

    ready: bool
    reason: str | None


class Gateway:
    """The two applications and their shared state. Made in the event loop that serves them; `close` it at the end."""

    def __init__(
        self,
        routing: Routing,
        config: GatewayConfig | None = None,
        access: Access | None = None,
        metrics: GatewayMetrics | None = None,
    ) -> None:
        self._routing = routing
        self._access = access
        self.metrics = metrics or GatewayMetrics()
        self._inference = Inference(routing, self.metrics, config or GatewayConfig(), access)
        self.draining = False
        """Set on SIGTERM: not ready any more, though requests are still served."""

    async def close(self) -> None:
        await self._inference.close()

    def app(self, *, serves_metrics: bool = False, cors_allow_origins: Sequence[str] = ()) -> Any:
        """The API, an ASGI application; `serves_metrics`: with the paths that otherwise `metrics_app` serves."""
        documented = FastAPI(title="llmservice gateway", version=version("llmservice"), redoc_url=None)
        documented.include_router(self._models_router())
        documented.include_router(self._probe_router())
        if serves_metrics:
            documented.include_router(self._metrics_router())
        _add_error_handlers(documented)
        inference = self._inference

        async def app(scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and scope["path"] in INFERENCE_PATHS:
                await inference(scope, receive, send)
            else:
                await documented(scope, receive, send)  # type: ignore[arg-type]

        if not cors_allow_origins:
            return app
        return CORSMiddleware(
            app,  # type: ignore[arg-type]
            allow_origins=cors_allow_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", *RATE_LIMIT_HEADERS],
        )

    def metrics_app(self) -> FastAPI:
        """Metrics and held requests, for a port that clients cannot reach."""
        app = FastAPI(openapi_url=None)
        app.include_router(self._metrics_router())
        _add_error_handlers(app)
        return app

    def _models_router(self) -> APIRouter:
        router = APIRouter(tags=["models"])

        @router.get("/v1/models")
        async def models(request: Request) -> Models:
            """The models that the caller may use."""
            is_allowed = self._is_allowed(request)
            return Models(data=[_model(*each) for each in self._routing.table.models() if is_allowed(each[1])])

        @router.get("/v1/models/{model:path}")
        async def model(model: str, request: Request) -> Model:
            """One of them."""
            is_allowed = self._is_allowed(request)
            route = self._routing.table.find(model)
            if not is_allowed(route):
                message = f"The model `{model}` does not exist, or this key may not use it."
                raise GatewayError(404, message, "model_not_found", "model")
            return _model(model, route)

        return router

    def _is_allowed(self, request: Request) -> Callable[[Route], bool]:
        """Whether the sender may use a model. Raises 401, and 503 until the keys have been read."""
        if self._access is None:
            return lambda _: True
        return partial(self._access.may_use, self._access.identify(request.headers))

    def _probe_router(self) -> APIRouter:
        router = APIRouter(tags=["probes"])

        @router.get("/health")
        async def health() -> Health:
            """The process answers."""
            return Health()

        @router.get("/ready", responses={503: {"model": Readiness}})
        async def ready() -> JSONResponse:
            """200 while requests should be sent here."""
            unread = None if self._routing.synced else "the cluster has not been read yet"
            if unread is None and self._access is not None:
                unread = self._access.unready
            reason = "draining" if self.draining else unread
            readiness = Readiness(ready=reason is None, reason=reason)
            return JSONResponse(readiness.model_dump(), 503 if reason else 200)

        return router

    def _metrics_router(self) -> APIRouter:
        router = APIRouter(include_in_schema=False)

        @router.get("/metrics")
        async def metrics() -> Response:
            return Response(generate_latest(self.metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

        @router.get("/internal/held")
        async def held() -> JSONResponse:
            """What the operator starts pods for."""
            return JSONResponse({"held": self._inference.holding.report()})

        return router


def _model(model: str, route: Route) -> Model:
    return Model(
        id=model,
        created=route.created,
        namespace=route.namespace,
        ready=bool(route.backends),
        ready_replicas=len(route.backends),
        parent=route.parent,
    )


def _add_error_handlers(app: FastAPI) -> None:
    """Every error in OpenAI's shape."""

    @app.exception_handler(GatewayError)
    async def refused(_: Request, error: GatewayError) -> Response:
        return _response(error)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        method, path, headers = request.method, request.url.path, error.headers or {}
        if error.status_code == 404:
            return _response(GatewayError(404, f"There is no {method} {path} here.", "not_found"))
        if error.status_code == 405:
            message = f"{path} takes {headers.get('Allow', 'another method')}, not {method}."
            return _response(GatewayError(405, message, "method_not_allowed", headers=headers))
        return _response(GatewayError(error.status_code, f"{method} {path}: {error.detail}", "http_error"))

    @app.exception_handler(Exception)
    async def unexpected(_: Request, error: Exception) -> Response:
        logger.error("unexpected error", exc_info=error)
        return _response(GatewayError(500, "The gateway failed: see its log.", "internal_error"))


def _response(error: GatewayError) -> Response:
    return Response(error.body, error.status, error.headers, "application/json")
