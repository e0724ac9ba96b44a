"""The HTTP application: the routes, and errors in OpenAI's shape."""

from __future__ import annotations

import logging
import time
from importlib.metadata import version
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from llmservice_server.api.access_log import AccessLog
from llmservice_server.api.activity import Activity
from llmservice_server.api.api_keys import ApiKeys
from llmservice_server.api.authentication import Authentication
from llmservice_server.api.embeddings import embeddings
from llmservice_server.api.endpoints import chat_completions, completions
from llmservice_server.api.error import ApiError, JsonResponse
from llmservice_server.api.model import Model, ModelList
from llmservice_server.api.openapi import document
from llmservice_server.api.sizing_report import SizingReport
from llmservice_server.api.state import ServerState
from llmservice_server.api.tokens import detokenize, tokenize
from llmservice_server.api.tracing import Tracing

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

log = logging.getLogger("llmservice.server")

_CREATED = int(time.time())


def create_app(
    state: ServerState,
    keys: ApiKeys | None = None,
    tracer: TracerProvider | None = None,
    *,
    serves_metrics: bool = False,
) -> FastAPI:
    """The application around one server's state; open to everybody without `keys`, and untraced without `tracer`.

    `serves_metrics`: /metrics is one of its paths; otherwise `create_metrics_app` serves it on a port of its own.
    """
    app = FastAPI(title="llmservice", openapi_url=None, docs_url=None, redoc_url=None)
    app.state.server = state
    app.state.serves_metrics = serves_metrics
    app.add_route("/v1/completions", completions, methods=["POST"])
    app.add_route("/v1/chat/completions", chat_completions, methods=["POST"])
    app.add_route("/v1/embeddings", embeddings, methods=["POST"])
    app.add_route("/tokenize", tokenize, methods=["POST"])
    app.add_route("/detokenize", detokenize, methods=["POST"])
    app.add_route("/v1/models", list_models, methods=["GET"])
    app.add_route("/v1/models/{name:path}", show_model, methods=["GET"])
    app.add_route("/health", health, methods=["GET", "HEAD"])
    app.add_route("/ready", ready, methods=["GET", "HEAD"])
    app.add_route("/sizing", show_sizing, methods=["GET"])
    if serves_metrics:
        app.add_route("/metrics", metrics, methods=["GET"])
    app.add_route("/version", show_version, methods=["GET"])
    app.add_route("/openapi.json", show_openapi, methods=["GET"])
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _client_disconnect)
    app.add_exception_handler(Exception, _unexpected)
    app.add_middleware(Activity, state=state)
    if keys is not None:
        app.add_middleware(Authentication, keys=keys)
    if tracer is not None:
        app.add_middleware(Tracing, provider=tracer)
    app.add_middleware(AccessLog)
    return app


def create_metrics_app(state: ServerState) -> Starlette:
    """/metrics and nothing else, without keys: for Prometheus and the operator, on a port that clients cannot reach."""
    app = Starlette(
        routes=[Route("/metrics", metrics, methods=["GET"])],
        exception_handlers={HTTPException: _http_error, Exception: _unexpected},
        middleware=[Middleware(AccessLog)],
    )
    app.state.server = state
    return app


async def health(request: Request) -> Response:
    """The process is alive: true while the model loads, false once the engine has died or is stuck."""
    illness = _state(request).ill
    if illness is not None:
        log.error("unhealthy", extra={"fields": {"reason": illness}})
        return JsonResponse({"status": "failed", "reason": illness}, 503)
    return JsonResponse({"status": "ok"})


async def ready(request: Request) -> Response:
    """A request sent now would be served."""
    reason = _state(request).unready
    return (
        JsonResponse({"status": "ready"})
        if reason is None
        else JsonResponse({"status": "unready", "reason": reason}, 503)
    )


async def show_sizing(request: Request) -> Response:
    """The model's shape and the engine's numbers: an operator that could not size the service reads them here."""
    state = _state(request)
    engine, _ = state.require_ready()
    return JsonResponse(
        SizingReport(
            max_num_seqs=engine.max_num_seqs,
            max_model_len=engine.max_model_len,
            block_size=engine.block_size,
            num_blocks=engine.num_blocks,
            memory_bytes=engine.memory_bytes,
            shape=dict(state.config.shape) if state.config.shape is not None else None,
        )
    )


async def metrics(request: Request) -> Response:
    return Response(_state(request).metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def show_version(request: Request) -> Response:
    return JsonResponse({"version": version("llmservice")})


async def show_openapi(request: Request) -> Response:
    config = _state(request).config
    return JsonResponse(
        document(
            config.served_model_names,
            needs_key=config.api_key_file is not None,
            serves_metrics=request.app.state.serves_metrics,
        )
    )


async def list_models(request: Request) -> Response:
    state = _state(request)
    return JsonResponse(ModelList([_model(state, name) for name in state.config.served_model_names]))


async def show_model(request: Request) -> Response:
    state, name = _state(request), request.path_params["name"]
    state.require_model(name)
    return JsonResponse(_model(state, name))


def _model(state: ServerState, name: str) -> Model:
    engine = state.engine.ready
    return Model(
        id=name,
        created=_CREATED,
        root=state.config.served_model_names[0],
        max_model_len=None if engine is None else engine.max_model_len,
    )


def _state(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)  # noqa: S101  # registered for this class only
    if not error.broke_off:
        metrics = _state(request).metrics
        metrics.labels(metrics.request_rejected, reason=error.code or "invalid_request").inc()
    return error.response()


def _http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods, in the shape of all other errors."""
    assert isinstance(error, HTTPException)  # noqa: S101  # registered for this class only
    response = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}").response()
    response.headers.update(error.headers or {})
    return response


def _client_disconnect(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # the client left in the middle of its body


def _unexpected(_: Request, error: Exception) -> Response:
    log.error("unexpected error", exc_info=error)
    return ApiError(500, "internal server error: see the server's log").response()
