from __future__ import annotations

from contextlib import nullcontext
from datetime import UTC, datetime
from typing import Any

import pytest

from llmservice_local.api.registry import (
    APPLY_PATCH,
    JSON_PATCH,
    MERGE_PATCH,
    STRATEGIC_PATCH,
    DeleteOptions,
    Registry,
    WriteOptions,
)
from llmservice_local.errors import ApiError
from llmservice_local.kinds.catalogue import Kind, read_scale
from llmservice_operator.api.crd import crd

OPTIONS = WriteOptions(manager="test")


@pytest.fixture
def registry() -> Registry:
    return Registry(clock=lambda: datetime(2026, 1, 1, tzinfo=UTC))


@pytest.fixture
def services(registry: Registry) -> Kind:
    registry.create(registry.kinds.find("apiextensions.k8s.io", "v1", "customresourcedefinitions"), "", crd(), OPTIONS)
    return registry.kinds.find("serving.llmservice.io", "v1alpha1", "llmservices")


def pods(registry: Registry) -> Kind:
    return registry.kinds.find("", "v1", "pods")


def config_maps(registry: Registry) -> Kind:
    return registry.kinds.find("", "v1", "configmaps")


def pod(name: str = "p", **metadata: Any) -> dict[str, Any]:
    containers = [{"name": "c", "image": "x", "resources": {"limits": {"cpu": "1"}}}]
    return {"metadata": {"name": name, **metadata}, "spec": {"containers": containers}}


def llm(**spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": "m"}, "spec": {"model": {"uri": "file:///m"}, **spec}}


def test_created_pod_has_what_a_server_gives_it(registry: Registry) -> None:
    written = registry.create(pods(registry), "default", pod(), OPTIONS)
    assert written.created
    metadata, spec = written.obj["metadata"], written.obj["spec"]
    assert (metadata["namespace"], metadata["creationTimestamp"]) == ("default", "2026-01-01T00:00:00Z")
    assert metadata["uid"]
    assert metadata["managedFields"][0]["manager"] == "test"
    assert (spec["restartPolicy"], spec["terminationGracePeriodSeconds"]) == ("Always", 30)
    assert spec["containers"][0]["resources"]["requests"] == {"cpu": "1"}
    assert written.obj["status"] == {"phase": "Pending", "qosClass": "Burstable"}


def test_generated_names_differ(registry: Registry) -> None:
    body = pod() | {"metadata": {"generateName": "web-"}}
    names = {registry.create(pods(registry), "default", body, OPTIONS).obj["metadata"]["name"] for _ in range(20)}
    assert len(names) == 20
    assert all(name.startswith("web-") and len(name) == 9 for name in names)


@pytest.mark.parametrize(
    ("body", "namespace", "code", "message"),
    [
        (pod("Bad_Name"), "default", 422, 'Pod "Bad_Name" is invalid: metadata.name: Invalid value: "Bad_Name"'),
        (pod(labels={"a": "b c"}), "default", 422, "metadata.labels: Invalid value"),
        ({"metadata": {"name": "p"}, "spec": {"containers": []}}, "default", 422, "spec.containers: Required value"),
        (pod(), "nowhere", 404, 'namespaces "nowhere" not found'),
        (pod(namespace="other"), "default", 400, "namespace of the provided object does not match"),
        ({"kind": "Node", "metadata": {"name": "p"}}, "default", 400, "kind in the data"),
        ([], "default", 400, "a Pod is an object"),
        ({"metadata": {}, "spec": {}}, "default", 422, "name or generateName is required"),
    ],
)
def test_bad_pod_is_refused_with_the_reason(
    registry: Registry, body: Any, namespace: str, code: int, message: str
) -> None:
    with pytest.raises(ApiError) as refused:
        registry.create(pods(registry), namespace, body, OPTIONS)
    assert refused.value.code == code
    assert message in str(refused.value)


def test_second_creation_of_a_name_is_refused(registry: Registry) -> None:
    registry.create(pods(registry), "default", pod(), OPTIONS)
    with pytest.raises(ApiError, match='pods "p" already exists'):
        registry.create(pods(registry), "default", pod(), OPTIONS)


def test_update_of_what_has_changed_meanwhile_is_a_conflict(registry: Registry) -> None:
    kind = config_maps(registry)
    old = registry.create(kind, "default", {"metadata": {"name": "c"}, "data": {"a": "1"}}, OPTIONS).obj
    registry.update(kind, "default", "c", {**old, "data": {"a": "2"}}, OPTIONS)
    with pytest.raises(ApiError, match="the object has been modified") as refused:
        registry.update(kind, "default", "c", {**old, "data": {"a": "3"}}, OPTIONS)
    assert refused.value.code == 409


def test_update_that_changes_nothing_keeps_the_resource_version(registry: Registry) -> None:
    kind = config_maps(registry)
    old = registry.create(kind, "default", {"metadata": {"name": "c"}, "data": {"a": "1"}}, OPTIONS).obj
    again = registry.update(kind, "default", "c", {"metadata": {"name": "c"}, "data": {"a": "1"}}, OPTIONS).obj
    assert again == old


def test_apply_twice_keeps_the_resource_version_and_edit_then_apply_restores(
    registry: Registry, services: Kind
) -> None:
    applied = registry.patch(services, "default", "m", llm(replicas=1), APPLY_PATCH, OPTIONS)
    assert applied.created
    again = registry.patch(services, "default", "m", llm(replicas=1), APPLY_PATCH, OPTIONS)
    assert (again.created, again.obj) == (False, applied.obj)
    editor = WriteOptions(manager="editor")
    edited = registry.patch(services, "default", "m", {"spec": {"replicas": 5}}, MERGE_PATCH, editor).obj
    assert edited["metadata"]["generation"] == 2
    with pytest.raises(ApiError, match=r'conflict with "editor" using serving.llmservice.io/v1alpha1: .spec.replicas'):
        registry.patch(services, "default", "m", llm(replicas=1), APPLY_PATCH, OPTIONS)
    forced = WriteOptions(manager="test", force=True)
    restored = registry.patch(services, "default", "m", llm(replicas=1), APPLY_PATCH, forced).obj
    assert restored["spec"]["replicas"] == 1
    assert [entry["manager"] for entry in restored["metadata"]["managedFields"]] == ["test"]


@pytest.mark.parametrize("subresource", ["", "status"])
def test_update_of_a_custom_resource_names_the_version_that_it_replaces(
    registry: Registry, services: Kind, subresource: str
) -> None:
    created = registry.create(services, "default", llm(), OPTIONS).obj
    message = 'llmservices.serving.llmservice.io "m" is invalid: metadata.resourceVersion: Invalid value: 0: must be'
    with pytest.raises(ApiError, match=message) as refused:
        registry.update(services, "default", "m", llm(), OPTIONS, subresource)
    assert refused.value.code == 422
    registry.update(services, "default", "m", created, OPTIONS, subresource)


@pytest.mark.parametrize("precondition", [{"resourceVersion": "1"}, {"uid": "another"}])
def test_apply_of_an_older_object_is_a_conflict(
    registry: Registry, services: Kind, precondition: dict[str, str]
) -> None:
    registry.create(services, "default", llm(), OPTIONS)
    stale = {**llm(replicas=2), "metadata": {"name": "m", **precondition}}
    with pytest.raises(ApiError) as refused:
        registry.patch(services, "default", "m", stale, APPLY_PATCH, OPTIONS)
    assert refused.value.code == 409


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"status": {"replica": 1}}, ".status.replica: field not declared in schema"),
        ({"status": {"replicas": "one"}}, r".status.replicas: expected numeric \(int or float\), got string"),
    ],
)
def test_apply_of_what_the_schema_of_a_custom_resource_lacks_is_an_error(
    registry: Registry, services: Kind, body: dict[str, Any], why: str
) -> None:
    registry.create(services, "default", llm(), OPTIONS)
    with pytest.raises(ApiError, match=f"failed to create typed patch object .*: {why}") as refused:
        registry.patch(services, "default", "m", {**llm(), **body}, APPLY_PATCH, OPTIONS, "status")
    assert refused.value.code == 500


def test_status_and_spec_are_written_apart(registry: Registry, services: Kind) -> None:
    created = registry.create(services, "default", {**llm(), "status": {"replicas": 9}}, OPTIONS).obj
    assert "status" not in created
    patch = {"spec": {"replicas": 7}, "status": {"replicas": 2}}
    after = registry.patch(services, "default", "m", patch, MERGE_PATCH, OPTIONS, "status").obj
    assert (after["spec"], after["status"]["replicas"]) == (created["spec"], 2)
    assert after["metadata"]["generation"] == 1
    after = registry.patch(services, "default", "m", patch, MERGE_PATCH, OPTIONS).obj
    assert (after["spec"]["replicas"], after["status"]["replicas"], after["metadata"]["generation"]) == (7, 2, 2)


def test_a_scale_without_replicas_is_an_error_until_the_schema_has_a_default(registry: Registry) -> None:
    """As a real API server answers; it reads stored objects by the schema of now."""
    definitions = registry.kinds.find("apiextensions.k8s.io", "v1", "customresourcedefinitions")
    newer, older = crd(), crd()
    schema = older["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    del schema["properties"]["spec"]["properties"]["replicas"]["default"]
    registry.create(definitions, "", older, OPTIONS)
    services = registry.kinds.find("serving.llmservice.io", "v1alpha1", "llmservices")
    created = registry.create(services, "default", llm(), OPTIONS).obj
    with pytest.raises(ApiError, match=r'the spec replicas field "\.spec\.replicas" does not exist') as refused:
        read_scale(services, created)
    assert refused.value.code == 500

    registry.update(definitions, "", newer["metadata"]["name"], newer, OPTIONS)

    found = registry.get(services, "default", "m")
    assert found["metadata"]["resourceVersion"] == created["metadata"]["resourceVersion"]
    assert read_scale(services, found)["spec"] == {"replicas": 1}


def test_scale_writes_the_replicas_of_the_spec(registry: Registry, services: Kind) -> None:
    registry.create(services, "default", llm(replicas=1), OPTIONS)
    scale = {"spec": {"replicas": 3}}
    assert registry.patch(services, "default", "m", scale, MERGE_PATCH, OPTIONS, "scale").obj["spec"]["replicas"] == 3
    with pytest.raises(ApiError, match="must be an integer"):
        registry.patch(services, "default", "m", {"spec": {"replicas": "x"}}, MERGE_PATCH, OPTIONS, "scale")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"replicas": -1},
            "spec.replicas: Invalid value: -1: spec.replicas in body should be greater than or equal to 0",
        ),
        ({"autoscaling": {"minReplicas": 3, "maxReplicas": 2}}, "spec.autoscaling: Invalid value: "),
        ({"model": {"uri": "ftp://x"}}, 'spec.model: Invalid value: "object": uri must be hf:'),
        ({"model": {}}, "spec.model.uri: Required value"),
        ({"slo": {"ttftP99": "soon"}}, "spec.slo.ttftP99: Invalid value: "),
    ],
)
def test_bad_service_is_refused_with_the_fields_path(
    registry: Registry, services: Kind, spec: dict[str, Any], message: str
) -> None:
    with pytest.raises(ApiError) as refused:
        registry.create(services, "default", llm(**spec), OPTIONS)
    assert refused.value.code == 422
    assert message in str(refused.value)


def test_unknown_field_is_an_error_a_warning_or_nothing(registry: Registry, services: Kind) -> None:
    body = llm(modell=1)
    with pytest.raises(ApiError, match=r'strict decoding error: unknown field "spec.modell"'):
        registry.create(services, "default", body, WriteOptions(field_validation="Strict"))
    warned = registry.create(services, "default", body, WriteOptions(field_validation="Warn", dry_run=True))
    assert warned.warnings == ['unknown field "spec.modell"']
    silent = registry.create(services, "default", body, WriteOptions(field_validation="Ignore"))
    assert silent.warnings == []
    assert "modell" not in silent.obj["spec"]


def test_dry_run_stores_nothing(registry: Registry, services: Kind) -> None:
    registry.create(services, "default", llm(), WriteOptions(dry_run=True))
    assert registry.select(services, None) == []


def test_custom_kinds_take_no_strategic_merge_patch(registry: Registry, services: Kind) -> None:
    registry.create(services, "default", llm(), OPTIONS)
    with pytest.raises(ApiError) as refused:
        registry.patch(services, "default", "m", {}, STRATEGIC_PATCH, OPTIONS)
    assert refused.value.code == 415


def test_object_with_finalizers_is_removed_with_the_last_of_them(registry: Registry, services: Kind) -> None:
    body = llm()
    body["metadata"]["finalizers"] = ["a/one"]
    registry.create(services, "default", body, OPTIONS)
    marked, is_gone = registry.delete(services, "default", "m", DeleteOptions())
    assert not is_gone
    assert marked["metadata"]["deletionTimestamp"]
    with pytest.raises(ApiError, match="no new finalizers can be added"):
        registry.patch(services, "default", "m", {"metadata": {"finalizers": ["a/one", "b/two"]}}, MERGE_PATCH, OPTIONS)
    registry.patch(services, "default", "m", [{"op": "remove", "path": "/metadata/finalizers/0"}], JSON_PATCH, OPTIONS)
    with pytest.raises(ApiError, match="not found"):
        registry.get(services, "default", "m")


def test_running_pod_is_marked_and_removed_by_its_node(registry: Registry) -> None:
    kind = pods(registry)
    registry.create(kind, "default", pod(), OPTIONS)
    registry.bind("default", "p", {"target": {"name": "n"}})
    marked, is_gone = registry.delete(kind, "default", "p", DeleteOptions(grace_period_s=5))
    assert not is_gone
    assert marked["metadata"]["deletionTimestamp"] == "2026-01-01T00:00:05Z"
    assert registry.delete(kind, "default", "p", DeleteOptions(grace_period_s=0))[1]


def test_pod_without_a_node_is_removed_at_once(registry: Registry) -> None:
    registry.create(pods(registry), "default", pod(), OPTIONS)
    assert registry.delete(pods(registry), "default", "p", DeleteOptions())[1]


def test_pod_is_bound_once(registry: Registry) -> None:
    registry.create(pods(registry), "default", pod(), OPTIONS)
    registry.bind("default", "p", {"target": {"name": "n"}})
    with pytest.raises(ApiError, match="already assigned"):
        registry.bind("default", "p", {"target": {"name": "m"}})


def test_delete_of_another_uid_is_a_conflict(registry: Registry) -> None:
    registry.create(pods(registry), "default", pod(), OPTIONS)
    with pytest.raises(ApiError, match="Precondition failed: UID"):
        registry.delete(pods(registry), "default", "p", DeleteOptions(uid="other"))


@pytest.mark.parametrize("name", ["default", "kube-system", "kube-public"])
def test_namespace_of_the_cluster_is_never_deleted(registry: Registry, name: str) -> None:
    with pytest.raises(
        ApiError, match=f'namespaces "{name}" is forbidden: this namespace may not be deleted'
    ) as refused:
        registry.delete(registry.kinds.find("", "v1", "namespaces"), "", name, DeleteOptions())
    assert refused.value.code == 403


def test_definition_and_its_kind_are_removed_after_its_objects(registry: Registry, services: Kind) -> None:
    body = llm()
    body["metadata"]["finalizers"] = ["a/one"]
    registry.create(services, "default", body, OPTIONS)
    definitions = registry.kinds.find("apiextensions.k8s.io", "v1", "customresourcedefinitions")
    name = "llmservices.serving.llmservice.io"
    assert not registry.delete(definitions, "", name, DeleteOptions())[1]
    assert registry.get(services, "default", "m")["metadata"]["deletionTimestamp"]
    registry.patch(services, "default", "m", {"metadata": {"finalizers": None}}, MERGE_PATCH, OPTIONS)
    with pytest.raises(ApiError):
        registry.get(definitions, "", name)
    with pytest.raises(ApiError):
        registry.kinds.find("serving.llmservice.io", "v1alpha1", "llmservices")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"$ref": "#/x"}, r"\$ref: Forbidden"),
        ({"type": "array"}, "items: Required value"),
        (
            {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False},
            "mutually exclusive",
        ),
        ({"type": "integer", "exclusiveMinimum": 3}, "must be a boolean"),
        ({}, "type: Required value"),
        ({"type": "string", "x-kubernetes-validations": [{"rule": "self +"}]}, "compilation failed"),
    ],
)
def test_definition_that_is_not_structural_is_refused(registry: Registry, change: dict[str, Any], message: str) -> None:
    definition = crd()
    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    schema["properties"]["spec"] = {"type": "object", "properties": {"f": change}}
    definitions = registry.kinds.find("apiextensions.k8s.io", "v1", "customresourcedefinitions")
    with pytest.raises(ApiError, match=message):
        registry.create(definitions, "", definition, OPTIONS)


@pytest.mark.parametrize(
    ("group", "approval", "refusal"),
    [
        ("gateway.networking.k8s.io", None, "Required value: protected groups"),
        ("k8s.io", "", "Required value: protected groups"),
        ("a.kubernetes.io", "soon", 'Invalid value: "soon": protected groups'),
        ("a.kubernetes.io", "https://github.com/kubernetes/kubernetes/pull/1", None),
        ("gateway.networking.k8s.io", "unapproved, experimental", None),
        ("notk8s.io", None, None),
    ],
)
def test_definition_in_a_group_of_kubernetes_needs_its_approval(
    registry: Registry, group: str, approval: str | None, refusal: str | None
) -> None:
    definition = crd()
    definition["spec"]["group"] = group
    definition["metadata"]["name"] = f"{definition['spec']['names']['plural']}.{group}"
    if approval is not None:
        definition["metadata"]["annotations"] = {"api-approved.kubernetes.io": approval}
    definitions = registry.kinds.find("apiextensions.k8s.io", "v1", "customresourcedefinitions")
    with nullcontext() if refusal is None else pytest.raises(ApiError, match=refusal):
        registry.create(definitions, "", definition, OPTIONS)


def test_event_is_the_same_in_both_of_its_apis(registry: Registry) -> None:
    new_style = registry.kinds.find("events.k8s.io", "v1", "events")
    body = {
        "metadata": {"name": "e"},
        "note": "hello",
        "eventTime": "2026-01-01T00:00:00.000000Z",
        "reason": "Why",
        "regarding": {"kind": "Pod", "name": "p"},
        "reportingController": "me",
    }
    registry.create(new_style, "default", body, OPTIONS)
    core = registry.get(registry.kinds.find("", "v1", "events"), "default", "e")
    assert (core["apiVersion"], core["message"], core["involvedObject"]["name"]) == ("v1", "hello", "p")
    back = registry.get(new_style, "default", "e")
    assert (back["apiVersion"], back["note"], back["reportingController"]) == ("events.k8s.io/v1", "hello", "me")
