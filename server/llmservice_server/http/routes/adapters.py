"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM's; only where the server allows them."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import PlainTextResponse

from llmservice_server.http.adapter_list import ADAPTER_NAME
from llmservice_server.http.body import BodyRoute
from llmservice_server.http.error import ApiError, invalid
from llmservice_server.http.protocol.base import Body
from llmservice_server.http.protocol.models import REFUSALS, error_responses
from llmservice_server.http.state import ServerState, StateDep
from llmservice_server.types.messages import AdapterReport

router = APIRouter(route_class=BodyRoute, responses=error_responses(*REFUSALS))

AdapterName = Annotated[str, Field(pattern=ADAPTER_NAME, max_length=128)]


class LoadAdapterRequest(Body):
    lora_name: AdapterName
    lora_path: Annotated[str, Field(min_length=1, max_length=4096, description="a folder that the server can read")]
    load_inplace: Annotated[bool, Field(description="replace an adapter of this name")] = False
    pinned: Annotated[bool, Field(description="never evict it")] = False


class UnloadAdapterRequest(Body):
    lora_name: AdapterName


@router.post("/v1/load_lora_adapter", response_class=PlainTextResponse, summary="Load a LoRA adapter")
async def load_adapter(body: LoadAdapterRequest, state: StateDep) -> Any:
    if (problem := state.why_not_an_adapter(body.lora_name)) is not None:
        raise invalid(problem, "lora_name")
    async with _one_at_a_time(state, body.lora_name):
        if body.lora_name in state.engine.adapters and not body.load_inplace:
            raise invalid(
                f"The LoRA adapter `{body.lora_name}` is loaded already: set load_inplace to replace it", "lora_name"
            )
        _check(await state.engine.load_adapter(body.lora_name, body.lora_path, pinned=body.pinned))
    return f"Success: LoRA adapter '{body.lora_name}' added successfully."


@router.post("/v1/unload_lora_adapter", response_class=PlainTextResponse, summary="Unload a LoRA adapter")
async def unload_adapter(body: UnloadAdapterRequest, state: StateDep) -> Any:
    async with _one_at_a_time(state, body.lora_name):
        _check(await state.engine.unload_adapter(body.lora_name))
    return f"Success: LoRA adapter '{body.lora_name}' removed successfully."


def _one_at_a_time(state: ServerState, name: str) -> asyncio.Lock:
    return state.adapter_locks.setdefault(name, asyncio.Lock())


def _check(report: AdapterReport) -> None:
    if report.error is not None:
        code = "model_not_found" if report.error_status == 404 else None
        raise ApiError(report.error_status, report.error, param="lora_name", code=code)
