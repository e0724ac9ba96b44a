from __future__ import annotations

from typing import Any

import pytest

from llmservice_local.errors import ApiError
from llmservice_local.kinds.apply import (
    Manager,
    Owners,
    apply,
    fields_of,
    from_fields_v1,
    owners_after_update,
    to_fields_v1,
    typed,
)
from llmservice_local.kinds.builtin_schema import builtin_schema

SCHEMA = builtin_schema("V1Deployment")
OPERATOR = Manager("operator", "Apply", "apps/v1")
OTHER = Manager("other", "Apply", "apps/v1")
EDITOR = Manager("kubectl-edit", "Update", "apps/v1")


def deployment(replicas: int | None = None, *containers: dict[str, Any], **labels: str) -> dict[str, Any]:
    spec: dict[str, Any] = {} if replicas is None else {"replicas": replicas}
    if containers:
        spec["template"] = {"spec": {"containers": list(containers)}}
    found: dict[str, Any] = {"metadata": {"name": "web"}}
    if labels:
        found["metadata"]["labels"] = labels
    return found | ({"spec": spec} if spec else {})


def test_first_apply_creates_and_owns_every_leaf() -> None:
    applied = deployment(2, {"name": "c", "image": "x"}, app="web")
    created, owners = apply(None, applied, SCHEMA, {}, OPERATOR, force=False)
    assert created == applied
    item = ("f:spec", "f:template", "f:spec", "f:containers", 'k:{"name":"c"}')
    assert owners == {
        OPERATOR: {
            ("f:metadata", "f:labels", "f:app"),
            ("f:spec", "f:replicas"),
            item,
            (*item, "f:name"),
            (*item, "f:image"),
        }
    }


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (deployment(2, a="1", b="2"), deployment(2, a="1"), deployment(2, a="1")),
        (deployment(2, a="1"), deployment(2), deployment(2)),
        (deployment(2, a="1"), deployment(None, a="1"), deployment(None, a="1")),
        (
            deployment(1, {"name": "a", "image": "1"}, {"name": "b", "image": "2"}),
            deployment(1, {"name": "b", "image": "2"}),
            deployment(1, {"name": "b", "image": "2"}),
        ),
        (
            deployment(1, {"name": "a", "args": ["x", "y"]}),
            deployment(1, {"name": "a", "args": ["z"]}),
            deployment(1, {"name": "a", "args": ["z"]}),
        ),
    ],
)
def test_what_the_manager_leaves_out_now_is_removed(before: Any, after: Any, expected: Any) -> None:
    live, owners = apply(None, before, SCHEMA, {}, OPERATOR, force=False)
    merged, _ = apply(live, after, SCHEMA, owners, OPERATOR, force=False)
    assert merged == expected


def test_what_another_manager_owns_too_is_kept() -> None:
    live, owners = apply(None, deployment(2, a="1"), SCHEMA, {}, OPERATOR, force=False)
    live, owners = apply(live, deployment(None, a="1"), SCHEMA, owners, OTHER, force=False)
    merged, owners = apply(live, deployment(2), SCHEMA, owners, OPERATOR, force=False)
    assert merged == deployment(2, a="1")
    assert owners[OTHER] == {("f:metadata", "f:labels", "f:a")}


def test_container_that_another_manager_added_is_kept() -> None:
    live, owners = apply(None, deployment(1, {"name": "a", "image": "1"}), SCHEMA, {}, OPERATOR, force=False)
    live, owners = apply(live, deployment(None, {"name": "z", "image": "9"}), SCHEMA, owners, OTHER, force=False)
    merged, _ = apply(live, deployment(1, {"name": "a", "image": "2"}), SCHEMA, owners, OPERATOR, force=False)
    containers = merged["spec"]["template"]["spec"]["containers"]
    assert containers == [{"name": "a", "image": "2"}, {"name": "z", "image": "9"}]


def test_disputed_field_is_a_conflict_that_names_it_and_its_owner() -> None:
    live, owners = apply(None, deployment(2), SCHEMA, {}, OPERATOR, force=False)
    with pytest.raises(ApiError) as refused:
        apply(live, deployment(5), SCHEMA, owners, OTHER, force=False)
    assert refused.value.code == 409
    assert str(refused.value) == 'Apply failed with 1 conflict: conflict with "operator": .spec.replicas'
    assert refused.value.details["causes"][0]["field"] == ".spec.replicas"


def test_same_value_from_two_managers_is_shared_not_disputed() -> None:
    live, owners = apply(None, deployment(2), SCHEMA, {}, OPERATOR, force=False)
    _, owners = apply(live, deployment(2), SCHEMA, owners, OTHER, force=False)
    assert owners[OPERATOR] == owners[OTHER] == {("f:spec", "f:replicas")}


def test_force_takes_the_field_over() -> None:
    live, owners = apply(None, deployment(2), SCHEMA, {}, OPERATOR, force=False)
    merged, owners = apply(live, deployment(5), SCHEMA, owners, OTHER, force=True)
    assert merged == deployment(5)
    assert owners == {OTHER: {("f:spec", "f:replicas")}}


def test_edit_takes_what_it_changes_and_apply_with_force_takes_it_back() -> None:
    live, owners = apply(None, deployment(2, a="1"), SCHEMA, {}, OPERATOR, force=False)
    edited = deployment(7, a="1")
    owners = owners_after_update(live, edited, SCHEMA, owners, EDITOR)
    assert owners == {
        OPERATOR: {("f:metadata", "f:labels", "f:a")},
        EDITOR: {("f:spec", "f:replicas")},
    }
    merged, owners = apply(edited, deployment(2, a="1"), SCHEMA, owners, OPERATOR, force=True)
    assert merged == deployment(2, a="1")
    assert EDITOR not in owners


def test_field_that_an_edit_removes_has_no_owner() -> None:
    live, owners = apply(None, deployment(2, a="1"), SCHEMA, {}, OPERATOR, force=False)
    assert owners_after_update(live, deployment(2), SCHEMA, owners, EDITOR) == {OPERATOR: {("f:spec", "f:replicas")}}


def test_ports_of_both_protocols_are_two_items_and_a_missing_protocol_is_tcp() -> None:
    schema = builtin_schema("V1Service")
    tcp, udp = {"port": 53, "targetPort": 53}, {"port": 53, "protocol": "UDP", "targetPort": 53}
    live, owners = apply(None, {"spec": {"ports": [tcp, udp]}}, schema, {}, OPERATOR, force=False)
    changed = {"port": 53, "protocol": "TCP", "targetPort": 54}
    merged, _ = apply(live, {"spec": {"ports": [changed, udp]}}, schema, owners, OPERATOR, force=False)
    assert merged["spec"]["ports"] == [changed, udp]


def test_fields_v1_survives_the_round_trip() -> None:
    obj = deployment(2, {"name": "c", "args": ["a"], "ports": [{"containerPort": 80}]}, app="web")
    obj["metadata"]["finalizers"] = ["one", "two"]
    paths = set(fields_of(obj, SCHEMA))
    fields = to_fields_v1(paths)
    assert set(from_fields_v1(fields)) == paths
    assert fields["f:metadata"]["f:finalizers"] == {'v:"one"': {}, 'v:"two"': {}}
    assert "." in fields["f:spec"]["f:template"]["f:spec"]["f:containers"]['k:{"name":"c"}']


def test_metadata_that_the_server_sets_has_no_owner() -> None:
    obj = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x", "uid": "1", "resourceVersion": "2"}}
    assert fields_of(obj, builtin_schema("V1Pod")) == {}


def test_owners_without_fields_are_dropped() -> None:
    owners: Owners = {OTHER: frozenset({("f:spec", "f:replicas")})}
    live = deployment(1)
    _, after = apply(live, deployment(2), SCHEMA, owners, OPERATOR, force=True)
    assert OTHER not in after


def test_item_that_another_manager_edited_loses_only_the_applied_fields() -> None:
    live, owners = apply(None, deployment(1, {"name": "a", "image": "1"}), SCHEMA, {}, OPERATOR, force=False)
    edited = deployment(1, {"name": "a", "image": "1", "workingDir": "/"})
    owners = owners_after_update(live, edited, SCHEMA, owners, EDITOR)
    merged, _ = apply(edited, deployment(1), SCHEMA, owners, OPERATOR, force=False)
    assert merged == deployment(1, {"name": "a", "workingDir": "/"})


def test_an_apply_of_unknown_fields_and_of_two_items_with_one_key_is_the_servers_error() -> None:
    container = {"name": "a", "resorces": {}, "args": ["x", "x"], "env": [{"name": "A"}, {"name": "A"}]}
    applied = {"apiVersion": "apps/v1", "kind": "Deployment", **deployment(1, container, app="web")}

    with pytest.raises(ApiError) as refused:
        typed(applied, SCHEMA)

    at = '.spec.template.spec.containers[name="a"]'
    assert refused.value.code == 500
    assert str(refused.value).splitlines() == [
        "failed to create typed patch object (web; apps/v1, Kind=Deployment): errors:",
        f"  {at}.resorces: field not declared in schema",
        f'  {at}.env: duplicate entries for key [name="A"]',
    ]


@pytest.mark.parametrize(
    ("container", "says"),
    [
        (
            {"image": 3},
            "failed to create typed patch object (web; apps/v1, Kind=Deployment): {at}.image: expected string",
        ),
        ({"env": {"A": "b"}}, "{at}.env: expected list"),
        ({"env": [None]}, "{at}.env: element 0: associative list with keys may not have a null element"),
        ({"ports": [{"containerPort": "80"}]}, "containerPort: expected numeric (int or float), got string"),
        (
            {"resources": {"requests": {"cpu": "lots"}}},
            "failed to convert new object (web; {kind}) to proper version: unable to convert unstructured object",
        ),
    ],
)
def test_an_apply_of_values_of_other_types_is_the_servers_error(container: dict[str, Any], says: str) -> None:
    applied = {"apiVersion": "apps/v1", "kind": "Deployment", **deployment(1, {"name": "a", **container}, app="web")}

    with pytest.raises(ApiError) as refused:
        typed(applied, SCHEMA)

    assert refused.value.code == 500
    assert says.format(kind="apps/v1, Kind=Deployment", at='.spec.template.spec.containers[name="a"]') in str(
        refused.value
    )


@pytest.mark.parametrize("amount", [1, 0.5, "1", "500m", "1.5Gi", "1e3", "1Gi\n"])
def test_an_apply_takes_quantities_as_text_and_as_numbers(amount: Any) -> None:
    def applied(cpu: Any) -> dict[str, Any]:
        container = {"name": "a", "resources": {"requests": {"cpu": cpu}}}
        return {"apiVersion": "apps/v1", "kind": "Deployment", **deployment(1, container, app="web")}

    assert typed(applied(amount), SCHEMA) == applied(str(amount).strip())


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "x-kubernetes-embedded-resource": True, "properties": {"spec": {"type": "object"}}},
        {
            "type": "object",
            "x-kubernetes-preserve-unknown-fields": True,
            "properties": {"metadata": {"type": "object", "properties": {"labels": {"type": "object"}}}},
        },
    ],
    ids=["without properties", "embedded", "below unknown fields"],
)
def test_an_apply_takes_fields_that_a_definition_leaves_open(schema: dict[str, Any]) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": {}}
    thing = {"apiVersion": "example.com/v1", "kind": "Thing", "metadata": {"name": "t"}, "spec": pod}
    typed(thing, {"type": "object", "properties": {**{name: {} for name in thing}, "spec": schema}})
