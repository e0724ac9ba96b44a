"""Answers about the server and its models, and the shape of every error."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from llmservice_server.types.messages import ModelCode


class Model(BaseModel):
    id: str
    created: Annotated[int, Field(description="seconds since 1970")]
    root: Annotated[str, Field(description="the name that answers carry; of an adapter, its folder")]
    parent: Annotated[str | None, Field(description="the model that an adapter is for; null for the model itself")] = (
        None
    )
    max_model_len: Annotated[int | None, Field(description="null while the model is being loaded")]
    object: Literal["model"] = "model"
    owned_by: Literal["llmservice"] = "llmservice"


class ModelList(BaseModel):
    data: list[Model]
    object: Literal["list"] = "list"


class AdapterStatus(BaseModel):
    """A LoRA adapter."""

    name: str
    version: Annotated[str, Field(description="a hash of its files; empty where it could not be read")]
    state: Annotated[
        Literal["loaded", "evicted", "failed"],
        Field(description="evicted: read again from its folder when a request names it"),
    ]
    pinned: bool = False
    uri: Annotated[str | None, Field(description="where it was fetched from, if a file lists it")] = None
    error: Annotated[str | None, Field(description="why it could not be loaded")] = None


class Steps(BaseModel):
    """All steps of one kind with about as many sequences, since the server's start. All figures but the first are sums.

    The seconds of a step are those from the result before to its own while there is work, else from its begin.
    """

    model_config = ConfigDict(from_attributes=True)

    kind: Annotated[Literal["decode", "mixed"], Field(description="mixed: with prompt tokens")]
    sequences: Annotated[int, Field(description="in a step, at most: a power of two; above half of it")]
    steps: int
    seconds: float
    num_seqs: Annotated[int, Field(description="sequences that decode")]
    context_tokens: Annotated[int, Field(description="whose keys and values these read")]
    prompt_tokens: Annotated[int, Field(description="computed")]
    prompt_chunks: Annotated[int, Field(description="sequences that these are of")]
    attention_pairs: Annotated[int, Field(description="of a prompt's token with each token up to it")]


class SizingReport(BaseModel):
    """The numbers that the engine runs with, and the model's shape that they were computed from."""

    max_num_seqs: int
    max_model_len: int
    block_size: int
    num_blocks: Annotated[int, Field(description="usable ones: without the null block")]
    block_groups: Annotated[int, Field(description="of layers: a sequence takes blocks for each of them")]
    architecture: str
    model_code: Annotated[ModelCode, Field(description="own, or transformers: whose code computes the model")]
    memory_bytes: Annotated[dict[str, int], Field(description="by kind: weights, kv_cache, activations, graphs, total")]
    tool_call_format: Annotated[str, Field(description="in which the model calls tools; none: it cannot")]
    reasoning_format: Annotated[str, Field(description="none: all text is the answer's content")]
    load_s: Annotated[float, Field(description="from the engine's start until it could serve, without compiling")]
    compile_s: Annotated[float, Field(description="seconds of it in which kernels were compiled")]
    kernels_compiled: int
    kernels_loaded: Annotated[int, Field(description="from the cache of compiled kernels")]
    max_loras: Annotated[int, Field(description="LoRA adapters in memory at once")]
    adapters: list[AdapterStatus]
    shape: Annotated[
        dict[str, int | str | bool] | None,
        Field(description="as spec.model.shape of an LLMService; null: a family that the planner does not know"),
    ]
    steps: Annotated[list[Steps], Field(description="how long steps took, by what they computed")]


class Health(BaseModel):
    status: str
    reason: Annotated[str | None, Field(exclude_if=lambda reason: reason is None)] = None


class Version(BaseModel):
    version: str


class Error(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """Every error, whatever its status."""

    error: Error


REFUSALS = (400, 404, 408, 413, 429, 503)  # of every body


def error_responses(*statuses: int, model: type[BaseModel] = ErrorAnswer) -> dict[int | str, dict[str, Any]]:
    """The errors of a route, for its documentation."""
    return {status: {"model": model, "description": HTTPStatus(status).phrase} for status in sorted(statuses)}
