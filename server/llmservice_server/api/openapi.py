"""The OpenAPI document, made from the very types that bodies are decoded into and answers are encoded from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import msgspec

from llmservice_server.api.access_log import PROBES
from llmservice_server.api.chat_format import ChatChoice
from llmservice_server.api.completion_format import Text
from llmservice_server.api.embedding_request import EmbeddingRequest
from llmservice_server.api.embeddings import EmbeddingList
from llmservice_server.api.model import Model, ModelList
from llmservice_server.api.request import ChatRequest, CompletionRequest
from llmservice_server.api.response import Answer
from llmservice_server.api.sizing_report import SizingReport
from llmservice_server.api.tokens import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse

_REFERENCE = "#/components/schemas/{name}"


class Error(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct):
    """Every error, whatever its status."""

    error: Error


class Health(msgspec.Struct):
    status: str
    reason: str | msgspec.UnsetType | None = msgspec.UNSET


class Version(msgspec.Struct):
    version: str


def _answer(name: str, choice: type) -> type[msgspec.Struct]:
    """`Answer` with one kind of choice."""
    fields: list[tuple[str, Any, Any]] = [
        (part.name, list[choice] if part.name == "choices" else part.type, msgspec.field(default=part.default))  # type: ignore[valid-type]
        for part in msgspec.structs.fields(Answer)
    ]
    return msgspec.defstruct(name, fields)


@dataclass(frozen=True, slots=True)
class _Operation:
    method: str
    path: str
    summary: str
    answer: type | None  # None: text
    body: type | None = None
    streams: bool = False
    errors: tuple[int, ...] = ()
    failure: type = ErrorAnswer
    parameters: tuple[str, ...] = ()


_EVENT = {  # of a stream; the last one's data is [DONE]
    "type": "object",
    "properties": {"data": {"type": "string", "description": "a part of the answer as JSON, or [DONE]"}},
    "required": ["data"],
}
_REFUSED = (400, 404, 408, 413, 429, 503)
_GENERATION = (*_REFUSED, 403, 500, 504)  # 403: the lane
_OPERATIONS = (
    _Operation(
        "post",
        "/v1/completions",
        "Complete prompts",
        _answer("Completion", Text),
        CompletionRequest,
        streams=True,
        errors=_GENERATION,
    ),
    _Operation(
        "post",
        "/v1/chat/completions",
        "Answer a conversation",
        _answer("ChatCompletion", ChatChoice),
        ChatRequest,
        streams=True,
        errors=_GENERATION,
    ),
    _Operation("post", "/v1/embeddings", "Embed texts", EmbeddingList, EmbeddingRequest, errors=(*_REFUSED, 500, 504)),
    _Operation("post", "/tokenize", "Text or a chat to token ids", TokenizeResponse, TokenizeRequest, errors=_REFUSED),
    _Operation("post", "/detokenize", "Token ids to text", DetokenizeResponse, DetokenizeRequest, errors=_REFUSED),
    _Operation("get", "/v1/models", "The served names", ModelList),
    _Operation("get", "/v1/models/{name}", "One served name", Model, errors=(404,), parameters=("name",)),
    _Operation("get", "/version", "The server's version", Version),
    _Operation("get", "/health", "Whether the process lives", Health, errors=(503,), failure=Health),
    _Operation("get", "/ready", "Whether a request sent now would be served", Health, errors=(503,), failure=Health),
    _Operation("get", "/sizing", "The model's shape and the engine's numbers", SizingReport, errors=(503,)),
)
_METRICS = _Operation("get", "/metrics", "Prometheus's text format", None)


def document(model_names: Sequence[str], *, needs_key: bool, serves_metrics: bool = False) -> dict[str, Any]:
    """OpenAPI 3.1. `needs_key`: every operation but the probes wants an API key."""
    operations = (*_OPERATIONS, _METRICS) if serves_metrics else _OPERATIONS
    kinds = {kind for operation in operations for kind in (operation.answer, operation.body, operation.failure) if kind}
    ordered = sorted(kinds, key=lambda kind: kind.__name__)
    schemas, components = msgspec.json.schema_components(ordered, ref_template=_REFERENCE)
    for operation in operations:
        if operation.body is not None:
            _complete(components[operation.body.__name__], model_names)
    references = dict(zip(ordered, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, references, needs_key=needs_key)
    security = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "llmservice", "version": version("llmservice")},
        "paths": paths,
        "components": {"schemas": components} | ({"securitySchemes": security} if needs_key else {}),
    }


def _complete(body: dict[str, Any], model_names: Sequence[str]) -> None:
    """Say what the decoder's types do not: other fields are refused, and so are other models."""
    body["additionalProperties"] = False
    if "model" in body["properties"]:
        body["properties"]["model"] = {"type": "string", "enum": list(model_names)}


def _operation(operation: _Operation, references: dict[type, dict[str, Any]], *, needs_key: bool) -> dict[str, Any]:
    content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    if operation.answer is not None:
        content = {"application/json": {"schema": references[operation.answer]}}
    if operation.streams:
        content["text/event-stream"] = {"schema": _EVENT}
    failure = {"application/json": {"schema": references[operation.failure]}}
    guarded = needs_key and operation.path not in PROBES
    errors = (*operation.errors, *((401,) if guarded else ()))
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": f"{operation.method} {operation.path}",
        "responses": {"200": {"description": "Success", "content": content}}
        | {str(status): {"description": "Error", "content": failure} for status in sorted(errors)},
    }
    if operation.body is not None:
        body = {"application/json": {"schema": references[operation.body]}}
        described["requestBody"] = {"required": True, "content": body}
    if operation.parameters:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in operation.parameters
        ]
    if guarded:
        described["security"] = [{"key": []}]
    return described
