"""The OpenAPI document is correct: what it allows, and much that it forbids, is answered as it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode, checks

from llmservice_server.http.access_log import PROBES
from llmservice_server.http.app import create_app
from llmservice_server.http.authentication import ApiKeys
from llmservice_server.http.protocol.base import Body
from llmservice_server.http.protocol.chat import ChatRequest
from llmservice_server.http.protocol.completions import CompletionRequest
from llmservice_server.http.protocol.embeddings import EmbeddingRequest
from llmservice_server.http.protocol.responses import ResponsesRequest
from llmservice_server.http.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from llmservice_server.http.state import ServeConfig, ServerState
from llmservice_server.ipc.metrics import Metrics


def _document(keys: ApiKeys | None = None) -> dict[str, Any]:
    config = ServeConfig(served_model_names=("tiny",), queue_bounds={}, request_timeout_s=None, queue_timeout_s=None)
    state = ServerState(config=config, engine=None, metrics=Metrics("llmservice_", "tiny"))  # type: ignore[arg-type]
    return create_app(state, keys).openapi()


OPERATIONS = [(method, path) for path, methods in _document()["paths"].items() for method in methods]
CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]


def _exercise(server: Any, method: str, path: str, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_dict(json.loads(server.get("/openapi.json")[1]))

    @settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=schema[path][method.upper()].as_strategy(generation_mode=mode))
    def conforms(case: Any) -> None:
        case.call_and_validate(base_url=server.url, checks=CHECKS)

    conforms()


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_what_the_document_allows_is_answered_as_it_says(server: Any, method: str, path: str) -> None:
    _exercise(server, method, path, GenerationMode.POSITIVE)


@pytest.mark.parametrize(("method", "path"), [operation for operation in OPERATIONS if operation[0] == "post"])
def test_what_the_document_forbids_is_refused_as_it_says(server: Any, method: str, path: str) -> None:
    _exercise(server, method, path, GenerationMode.NEGATIVE)


def test_every_route_is_in_the_document(server: Any) -> None:
    for path in (
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/embeddings",
        "/tokenize",
        "/v1/models",
        "/version",
    ):
        assert ("post" if server.get(path)[0] == 405 else "get", path) in OPERATIONS


def test_the_document_has_examples_and_a_page_for_people(server: Any) -> None:
    document = json.loads(server.get("/openapi.json")[1])
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
        reference = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        (example,) = document["components"]["schemas"][reference.rsplit("/", 1)[1]]["examples"]
        assert server.post(path, example | {"model": "tiny"})[0] == 200
    status, page = server.get("/docs")
    assert status == 200
    assert b"/openapi.json" in page


def test_a_server_with_keys_documents_where_they_are_needed(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    paths = _document(ApiKeys(keys))["paths"]
    for _, path in OPERATIONS:
        (described,) = paths[path].values()
        assert ("security" in described) == ("401" in described["responses"]) == (path not in PROBES)


@pytest.mark.parametrize(
    "kind",
    [CompletionRequest, ChatRequest, ResponsesRequest, EmbeddingRequest, TokenizeRequest, DetokenizeRequest],
)
def test_the_page_about_the_api_has_every_parameter(kind: type[Body]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "api.md").read_text(encoding="utf-8")
    missing = [name for name in [*kind.model_fields, *kind.refused] if f"`{name}`" not in page]
    assert missing == []
