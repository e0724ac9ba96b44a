"""The OpenAPI document tells the truth: whatever it allows, and much that it does not, is answered as it says."""

from __future__ import annotations

import json
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode, checks

from llmservice_server.api.access_log import PROBES
from llmservice_server.api.openapi import document

OPERATIONS = [
    (method, path) for path, methods in document(["tiny"], needs_key=False)["paths"].items() for method in methods
]
CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]


def _exercise(server: Any, method: str, path: str, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_dict(json.loads(server.get("/openapi.json")[1]))

    @settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
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
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/v1/models", "/version"):
        assert ("post" if server.get(path)[0] == 405 else "get", path) in OPERATIONS


def test_a_server_with_keys_says_where_they_are_wanted() -> None:
    paths = document(["tiny"], needs_key=True)["paths"]
    for _, path in OPERATIONS:
        (described,) = paths[path].values()
        assert ("security" in described) == ("401" in described["responses"]) == (path not in PROBES)
