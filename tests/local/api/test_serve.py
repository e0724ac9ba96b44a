"""The emulated API over a real socket, as its clients see it."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import ClientSession

from llmservice_local.api.serve import Api, serve_api
from llmservice_operator.api.crd import crd

LLMS = "/apis/serving.llmservice.io/v1alpha1/namespaces/default/llmservices"
TABLE = {"Accept": "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"}


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    async with serve_api() as served:
        yield served


@pytest.fixture
async def http(api: Api) -> AsyncIterator[ClientSession]:
    async with ClientSession(api.url) as session:
        yield session


async def install(http: ClientSession) -> None:
    async with http.post("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", json=crd()) as response:
        assert response.status == 201


async def get(http: ClientSession, path: str, **options: Any) -> Any:
    async with http.get(path, **options) as response:
        assert response.status == 200, await response.text()
        return await response.json()


def llm(name: str = "m", **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": {"model": {"uri": "file:///m"}, **spec}}


async def test_discovery_lists_a_custom_kind_once_its_definition_is_there(http: ClientSession) -> None:
    groups = {group["name"] for group in (await get(http, "/apis"))["groups"]}
    assert "apps" in groups
    assert "serving.llmservice.io" not in groups
    await install(http)
    resources = (await get(http, "/apis/serving.llmservice.io/v1alpha1"))["resources"]
    assert [resource["name"] for resource in resources] == ["llmservices", "llmservices/status", "llmservices/scale"]
    assert resources[0]["shortNames"] == ["llm", "llms"]


async def test_openapi_names_the_field_validation_that_kubectl_asks_for(http: ClientSession) -> None:
    await install(http)
    index = await get(http, "/openapi/v3")
    url = index["paths"]["apis/serving.llmservice.io/v1alpha1"]["serverRelativeURL"]
    document = await get(http, url)
    path = document["paths"]["/apis/serving.llmservice.io/v1alpha1/namespaces/{namespace}/llmservices/{name}"]
    assert "fieldValidation" in [parameter["name"] for parameter in path["patch"]["parameters"]]
    schema = document["components"]["schemas"]["io.llmservice.serving.v1alpha1.LLMService"]
    assert schema["properties"]["spec"]["properties"]["model"]["required"] == ["uri"]


async def test_life_of_an_object_over_http(http: ClientSession) -> None:
    await install(http)
    async with http.post(LLMS, json=llm()) as response:
        assert response.status == 201
    async with http.patch(
        f"{LLMS}/m", data=b'{"spec": {"replicas": 2}}', headers={"Content-Type": "application/merge-patch+json"}
    ) as response:
        assert (await response.json())["spec"]["replicas"] == 2
    scale = await get(http, f"{LLMS}/m/scale")
    assert (scale["kind"], scale["spec"]["replicas"]) == ("Scale", 2)
    async with http.delete(f"{LLMS}/m") as response:
        assert (await response.json())["status"] == "Success"
    async with http.get(f"{LLMS}/m") as response:
        assert response.status == 404
        assert (await response.json())["reason"] == "NotFound"


async def test_apply_creates_with_201_and_needs_a_field_manager(http: ClientSession) -> None:
    await install(http)
    headers = {"Content-Type": "application/apply-patch+yaml"}
    body = b"apiVersion: serving.llmservice.io/v1alpha1\nkind: LLMService\nspec: {model: {uri: 'file:///m'}}\n"
    async with http.patch(f"{LLMS}/m", data=body, headers=headers) as response:
        assert response.status == 422
    async with http.patch(f"{LLMS}/m", params={"fieldManager": "me"}, data=body, headers=headers) as response:
        assert response.status == 201


async def test_invalid_object_is_a_422_whose_causes_name_the_fields(http: ClientSession) -> None:
    await install(http)
    async with http.post(LLMS, json=llm(replicas="two")) as response:
        status = await response.json()
    assert (response.status, status["reason"]) == (422, "Invalid")
    assert [cause["field"] for cause in status["details"]["causes"]] == ["spec.replicas"]


@pytest.mark.parametrize(
    ("method", "path", "body", "code"),
    [
        ("GET", "/api/v1/nothings", b"", 404),
        ("GET", "/api/v1/namespaces/default/pods/p/exec", b"", 404),
        ("GET", "/apis/apps/v1/namespaces/default/deployments/d/log", b"", 404),
        ("GET", "/somewhere", b"", 404),
        ("POST", "/api/v1/namespaces/default/configmaps", b"{nonsense", 400),
        ("POST", "/api/v1/namespaces/default/configmaps", b"\xff\xfe", 400),
        ("POST", "/api/v1/namespaces/default/configmaps", b"[]", 400),
        ("POST", "/api/v1/pods", b"{}", 405),
        ("PUT", "/api/v1/namespaces/default/configmaps", b"{}", 405),
        ("GET", "/api/v1/pods?labelSelector=a==b==c", b"", 400),
        ("GET", "/api/v1/pods?resourceVersion=latest&watch=1", b"", 400),
        ("POST", "/api/v1/namespaces/default/configmaps?fieldValidation=Maybe", b"{}", 400),
        ("POST", "/api/v1/namespaces/default/configmaps?dryRun=Some", b"{}", 400),
        ("GET", "/api/v1/namespaces/default/pods/p/log", b"", 404),
    ],
)
async def test_request_that_makes_no_sense_gets_a_status_not_a_500(
    http: ClientSession, method: str, path: str, body: bytes, code: int
) -> None:
    async with http.request(method, path, data=body, headers={"Content-Type": "application/json"}) as response:
        status = await response.json()
    assert (response.status, status["kind"], status["code"]) == (code, "Status", code)


async def test_body_past_the_limit_is_refused(http: ClientSession) -> None:
    body = io.BytesIO(b"{" + b" " * 4 * 1024 * 1024 + b"}")
    async with http.post("/api/v1/namespaces/default/configmaps", data=body) as response:
        assert response.status == 413


async def test_table_has_the_columns_of_the_definition(http: ClientSession) -> None:
    await install(http)
    async with http.post(LLMS, json=llm()) as response:
        assert response.status == 201
    table = await get(http, LLMS, headers=TABLE)
    names = [column["name"] for column in table["columnDefinitions"]]
    assert names == ["Name", "Model", "Ready", "Replicas", "Desired", "MaxSeqs", "TTFT-p99", "Age", "Reason"]
    (row,) = table["rows"]
    assert row["cells"][:2] == ["m", "file:///m"]
    assert row["object"]["kind"] == "PartialObjectMetadata"


async def test_list_comes_in_pages_that_miss_nothing_where_asked(http: ClientSession) -> None:
    """Whatever is deleted between them."""
    path = "/api/v1/namespaces/default/configmaps"
    for name in "abc":
        async with http.post(path, json={"metadata": {"name": name}}) as response:
            assert response.status == 201
    first = await get(http, path, params={"limit": "2"})
    assert [item["metadata"]["name"] for item in first["items"]] == ["a", "b"]
    async with http.delete(f"{path}/a") as response:
        assert response.status == 200
    rest = await get(http, path, params={"limit": "2", "continue": first["metadata"]["continue"]})
    assert [item["metadata"]["name"] for item in rest["items"]] == ["c"]
    assert rest["metadata"] == {"resourceVersion": first["metadata"]["resourceVersion"]}
    async with http.get(path, params={"continue": "2"}) as response:
        assert response.status == 400


async def test_watch_streams_lines_of_json(http: ClientSession) -> None:
    path = "/api/v1/namespaces/default/configmaps"
    version = (await get(http, path))["metadata"]["resourceVersion"]
    async with http.get(path, params={"watch": "1", "resourceVersion": version}) as response:
        assert response.content_type == "application/json"
        async with http.post(path, json={"metadata": {"name": "a"}}) as created:
            assert created.status == 201
        event = json.loads(await asyncio.wait_for(response.content.readline(), 5))
    assert (event["type"], event["object"]["metadata"]["name"]) == ("ADDED", "a")


async def test_collection_can_be_deleted_by_selector(http: ClientSession) -> None:
    path = "/api/v1/namespaces/default/configmaps"
    for name, label in (("a", "x"), ("b", "y")):
        async with http.post(path, json={"metadata": {"name": name, "labels": {"l": label}}}) as response:
            assert response.status == 201
    async with http.delete(path, params={"labelSelector": "l=x"}) as response:
        assert response.status == 200
    assert [item["metadata"]["name"] for item in (await get(http, path))["items"]] == ["b"]


async def test_warning_about_an_unknown_field_comes_in_a_header(http: ClientSession) -> None:
    await install(http)
    async with http.post(LLMS, json=llm(modell=1)) as response:
        assert response.headers["Warning"] == '299 - "unknown field \\"spec.modell\\""'
