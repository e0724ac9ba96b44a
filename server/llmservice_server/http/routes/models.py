"""GET endpoints: the served models, the server's state, and its metrics."""

from __future__ import annotations

import logging
import time
from importlib.metadata import version

from fastapi import APIRouter
from starlette.responses import Response

from llmservice_server.http.protocol.models import (
    Health,
    Model,
    ModelList,
    SizingReport,
    Version,
    error_responses,
)
from llmservice_server.http.state import ServerState, ServingDep, StateDep

log = logging.getLogger("llmservice.server")

_CREATED = int(time.time())
_UNHEALTHY = error_responses(503, model=Health)

router = APIRouter()
metrics_router = APIRouter()
probe_router = APIRouter()
"""Open to all clients, also where the server has API keys."""


@router.head("/v1/models", include_in_schema=False)
@router.get("/v1/models", response_model=ModelList, summary="The served names")
async def list_models(state: StateDep) -> ModelList:
    return ModelList(data=[_model(state, name) for name in state.config.served_model_names])


@router.head("/v1/models/{name:path}", include_in_schema=False)
@router.get("/v1/models/{name:path}", response_model=Model, responses=error_responses(404), summary="One served name")
async def show_model(name: str, state: StateDep) -> Model:
    state.require_model(name)
    return _model(state, name)


@router.head("/version", include_in_schema=False)
@router.get("/version", response_model=Version, summary="The server's version")
async def show_version() -> Version:
    return Version(version=version("llmservice"))


@probe_router.head("/health", include_in_schema=False)
@probe_router.get("/health", response_model=Health, responses=_UNHEALTHY, summary="Whether the process is healthy")
async def health(state: StateDep, response: Response) -> Health:
    """200 while the model loads, 503 once the engine has died or is stuck."""
    if (illness := state.ill) is not None:
        log.error("unhealthy", extra={"fields": {"reason": illness}})
        response.status_code = 503
        return Health(status="failed", reason=illness)
    return Health(status="ok")


@probe_router.head("/ready", include_in_schema=False)
@probe_router.get(
    "/ready", response_model=Health, responses=_UNHEALTHY, summary="Whether a request sent now would be served"
)
async def ready(state: StateDep, response: Response) -> Health:
    if (reason := state.unready) is not None:
        response.status_code = 503
        return Health(status="unready", reason=reason)
    return Health(status="ready")


@probe_router.head("/sizing", include_in_schema=False)
@probe_router.get(
    "/sizing",
    response_model=SizingReport,
    responses=error_responses(503),
    summary="The model's shape and the engine's numbers",
)
async def show_sizing(state: StateDep, serving: ServingDep) -> SizingReport:
    """An operator that could not size the service reads them here."""
    engine = serving.ready
    return SizingReport(
        max_num_seqs=engine.max_num_seqs,
        max_model_len=engine.max_model_len,
        block_size=engine.block_size,
        num_blocks=engine.num_blocks,
        architecture=engine.architecture,
        model_code=engine.model_code,
        memory_bytes=engine.memory_bytes,
        tool_call_format=serving.tokenizer.formats.names.tool_calls,
        reasoning_format=serving.tokenizer.formats.names.reasoning,
        shape=dict(state.config.shape) if state.config.shape is not None else None,
    )


@metrics_router.head("/metrics", include_in_schema=False)
@metrics_router.get("/metrics", response_class=Response, summary="Prometheus's text format")
async def metrics(state: StateDep) -> Response:
    return Response(state.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _model(state: ServerState, name: str) -> Model:
    engine = state.engine.ready
    return Model(
        id=name,
        created=_CREATED,
        root=state.config.served_model_names[0],
        max_model_len=None if engine is None else engine.max_model_len,
    )
