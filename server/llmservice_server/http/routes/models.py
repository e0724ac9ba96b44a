"""GET endpoints: the served models, the server's state, and its metrics."""

from __future__ import annotations

import logging
import time
from importlib.metadata import version

from fastapi import APIRouter
from starlette.responses import Response

from llmservice_server.http.protocol.models import (
    AdapterStatus,
    Health,
    Model,
    ModelList,
    SizingReport,
    Steps,
    Version,
    error_responses,
)
from llmservice_server.http.state import ServerState, ServingDep, StateDep
from llmservice_server.types.messages import AdapterInfo

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
    own = [_model(state, name) for name in state.config.served_model_names]
    return ModelList(data=[*own, *(_model(state, each.name, each) for each in state.engine.adapters.values())])


@router.head("/v1/models/{name:path}", include_in_schema=False)
@router.get("/v1/models/{name:path}", response_model=Model, responses=error_responses(404), summary="One served name")
async def show_model(name: str, state: StateDep) -> Model:
    return _model(state, name, state.require_model(name))


@router.head("/version", include_in_schema=False)
@router.get("/version", response_model=Version, summary="The server's version")
async def show_version() -> Version:
    return Version(version=version("llmservice"))


@probe_router.head("/health", include_in_schema=False)
@probe_router.get("/health", response_model=Health, responses=_UNHEALTHY, summary="Whether the process is healthy")
async def health(state: StateDep, response: Response) -> Health:
    """200 while the model loads, 503 once the engine has died or is stuck."""
    if (reason := state.why_unhealthy) is not None:
        log.error("unhealthy", extra={"fields": {"reason": reason}})
        response.status_code = 503
        return Health(status="failed", reason=reason)
    return Health(status="ok")


@probe_router.head("/ready", include_in_schema=False)
@probe_router.get(
    "/ready", response_model=Health, responses=_UNHEALTHY, summary="Whether a request sent now would be served"
)
async def ready(state: StateDep, response: Response) -> Health:
    if (reason := state.why_unready) is not None:
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
        block_groups=engine.block_groups,
        architecture=engine.architecture,
        model_code=engine.model_code,
        memory_bytes=engine.memory_bytes,
        tool_call_format=serving.tokenizer.formats.names.tool_calls,
        reasoning_format=serving.tokenizer.formats.names.reasoning,
        load_s=engine.load_s,
        compile_s=engine.compile_s,
        kernels_compiled=engine.kernels_compiled,
        kernels_loaded=engine.kernels_loaded,
        max_loras=engine.max_loras,
        adapters=_adapters(state),
        shape=dict(state.config.shape) if state.config.shape is not None else None,
        steps=[Steps.model_validate(each) for each in state.metrics.steps.sums],
    )


@metrics_router.head("/metrics", include_in_schema=False)
@metrics_router.get("/metrics", response_class=Response, summary="Prometheus's text format")
async def metrics(state: StateDep) -> Response:
    return Response(state.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _adapters(state: ServerState) -> list[AdapterStatus]:
    loaded = [
        AdapterStatus(
            name=each.name,
            version=each.version,
            state=each.state,
            pinned=each.pinned,
            uri=state.adapter_uris.get(each.name),
        )
        for each in state.engine.adapters.values()
    ]
    failed = [
        AdapterStatus(name=name, version="", state="failed", uri=uri, error=error)
        for (name, uri), error in state.adapter_failures.items()
    ]
    return [*loaded, *failed]


def _model(state: ServerState, name: str, adapter: AdapterInfo | None = None) -> Model:
    engine, own_name = state.engine.ready, state.config.served_model_names[0]
    return Model(
        id=name,
        created=_CREATED,
        root=own_name if adapter is None else adapter.folder,
        parent=None if adapter is None else own_name,
        max_model_len=None if engine is None else engine.max_model_len,
    )
