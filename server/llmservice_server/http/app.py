"""The HTTP application: routes, middleware, documentation, and errors in OpenAI's shape."""

from __future__ import annotations

import logging
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI, Security
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from llmservice_server.http.access_log import AccessLog
from llmservice_server.http.authentication import Authentication, Authenticator
from llmservice_server.http.body import IGNORED_HEADER
from llmservice_server.http.error import BROKE_OFF, ApiError, validation_error
from llmservice_server.http.protocol.base import Body
from llmservice_server.http.protocol.models import error_responses
from llmservice_server.http.routes import adapters, embeddings, generate, models, rerank, tokenize
from llmservice_server.http.state import Activity, ServerState
from llmservice_server.http.tracing import Tracing
from llmservice_server.ipc.client import EngineDeadError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

log = logging.getLogger("llmservice.server")

_key = HTTPBearer(auto_error=False, scheme_name="key")  # for the documentation: Authentication checks the key


def create_app(
    state: ServerState,
    keys: Authenticator | None = None,
    tracer: TracerProvider | None = None,
    *,
    serves_metrics: bool = False,
) -> FastAPI:
    """The application around one server's state; open to all clients without `keys`, and untraced without `tracer`.

    `serves_metrics`: /metrics is one of its paths; otherwise `create_metrics_app` serves it on a port of its own.
    """
    app = _Api(title="llmservice", version=version("llmservice"), redoc_url=None)
    app.state.server = state
    api = APIRouter()
    for module in (generate, embeddings, rerank, tokenize, models):
        api.include_router(module.router)
    if state.config.enable_lora_updates:
        api.include_router(adapters.router)
    needs_key = keys is not None
    app.include_router(
        api,
        dependencies=[Security(_key)] if needs_key else [],
        responses=error_responses(401) if needs_key else {},
    )
    app.include_router(models.probe_router)
    if serves_metrics:
        app.include_router(models.metrics_router)
    _add_error_handlers(app)
    app.add_middleware(Activity, state=state)
    if keys is not None:
        app.add_middleware(Authentication, keys=keys)
    if tracer is not None:
        app.add_middleware(Tracing, provider=tracer)
    if state.config.cors_allow_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=state.config.cors_allow_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", IGNORED_HEADER],
        )
    app.add_middleware(AccessLog)
    return app


def create_metrics_app(state: ServerState) -> FastAPI:
    """/metrics and nothing else, without keys: for Prometheus and the operator, on a port that clients cannot reach."""
    app = FastAPI(openapi_url=None)
    app.state.server = state
    app.include_router(models.metrics_router)
    _add_error_handlers(app)
    app.add_middleware(AccessLog)
    return app


class _Api(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """With the served names as the only models, and without FastAPI's status 422, which no route has."""
        if self.openapi_schema is None:
            document = get_openapi(title=self.title, version=self.version, routes=self.routes)
            for path in document["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
            schemas = document["components"]["schemas"]
            for unused in ("HTTPValidationError", "ValidationError"):
                schemas.pop(unused, None)
            names = list(self.state.server.config.served_model_names)
            names_are_fixed = not self.state.server.config.max_loras
            for kind in _body_kinds(Body) if names_are_fixed else ():
                if "model" in schemas.get(kind, {}).get("properties", {}):
                    schemas[kind]["properties"]["model"] = {"type": "string", "enum": names}
            self.openapi_schema = document
        return self.openapi_schema


def _body_kinds(kind: type[Body]) -> list[str]:
    return [kind.__name__, *(name for subclass in kind.__subclasses__() for name in _body_kinds(subclass))]


def _add_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestValidationError, _api_error)
    app.add_exception_handler(EngineDeadError, _engine_dead)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _client_disconnect)
    app.add_exception_handler(Exception, _unexpected)


def _api_error(request: Request, error: Exception) -> Response:
    if isinstance(error, RequestValidationError):
        error = validation_error(error.errors(), error.body)
    assert isinstance(error, ApiError)  # noqa: S101  # registered for these two classes only
    if error.code not in BROKE_OFF:
        metrics = request.app.state.server.metrics
        metrics.labels(metrics.request_rejected, reason=error.code or "invalid_request").inc()
    return error.response()


def _engine_dead(request: Request, error: Exception) -> Response:
    """The engine ended between the request's admission and its start."""
    state: ServerState = request.app.state.server
    return _api_error(request, state.not_ready(str(error)))


def _http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods, in the shape of all other errors."""
    assert isinstance(error, HTTPException)  # noqa: S101  # registered for this class only
    response = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}").response()
    response.headers.update(error.headers or {})
    return response


def _client_disconnect(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # nginx's status for it; only the access log shows it


def _unexpected(_: Request, error: Exception) -> Response:
    log.error("unexpected error", exc_info=error)
    return ApiError(500, "internal server error: see the server's log").response()
