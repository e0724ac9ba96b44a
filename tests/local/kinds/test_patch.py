from __future__ import annotations

from typing import Any

import pytest

from llmservice_local.errors import ApiError
from llmservice_local.kinds.builtin_schema import builtin_schema
from llmservice_local.kinds.patch import json_patch, merge_patch, strategic_merge_patch


@pytest.mark.parametrize(
    ("operations", "expected"),
    [
        ([{"op": "add", "path": "/b", "value": 2}], {"a": [1, 2], "b": 2}),
        ([{"op": "add", "path": "/a/-", "value": 3}], {"a": [1, 2, 3]}),
        ([{"op": "add", "path": "/a/0", "value": 0}], {"a": [0, 1, 2]}),
        ([{"op": "remove", "path": "/a/1"}], {"a": [1]}),
        ([{"op": "replace", "path": "/a", "value": {}}], {"a": {}}),
        ([{"op": "move", "from": "/a", "path": "/b"}], {"b": [1, 2]}),
        ([{"op": "copy", "from": "/a/0", "path": "/c"}], {"a": [1, 2], "c": 1}),
        ([{"op": "test", "path": "/a/0", "value": 1}, {"op": "remove", "path": "/a"}], {}),
        ([{"op": "add", "path": "/x~1y~0z", "value": 1}], {"a": [1, 2], "x/y~z": 1}),
    ],
)
def test_json_patch_applies_each_operation_of_rfc_6902(operations: list[Any], expected: Any) -> None:
    assert json_patch({"a": [1, 2]}, operations) == expected


@pytest.mark.parametrize(
    "operation",
    [
        {"op": "remove", "path": "/missing"},
        {"op": "replace", "path": "/missing", "value": 1},
        {"op": "test", "path": "/a", "value": 2},
        {"op": "add", "path": "a", "value": 2},
        {"op": "add", "path": "/list/9", "value": 2},
        {"op": "jump", "path": "/a"},
        {"path": "/a"},
    ],
)
def test_json_patch_that_does_not_apply_is_refused_and_changes_nothing(operation: dict[str, Any]) -> None:
    document = {"a": 1, "list": []}
    with pytest.raises(ApiError) as refused:
        json_patch(document, [operation])
    assert refused.value.code == 422
    assert document == {"a": 1, "list": []}


@pytest.mark.parametrize(
    ("target", "patch", "expected"),
    [  # the examples of RFC 7386, appendix A
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        (["a", "b"], ["c", "d"], ["c", "d"]),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ],
)
def test_merge_patch_follows_rfc_7386(target: Any, patch: Any, expected: Any) -> None:
    assert merge_patch(target, patch) == expected


POD = {
    "spec": {
        "containers": [{"name": "a", "image": "a:1", "args": ["x"]}, {"name": "b", "image": "b:1"}],
        "tolerations": [{"key": "old"}],
    },
    "metadata": {"finalizers": ["one"], "labels": {"x": "1"}},
}


@pytest.mark.parametrize(
    ("patch", "path", "expected"),
    [
        (
            {"spec": {"containers": [{"name": "a", "image": "a:2"}]}},
            ("spec", "containers"),
            [{"name": "a", "image": "a:2", "args": ["x"]}, {"name": "b", "image": "b:1"}],
        ),
        (
            {"spec": {"containers": [{"name": "b", "$patch": "delete"}]}},
            ("spec", "containers"),
            [{"name": "a", "image": "a:1", "args": ["x"]}],
        ),
        (
            {"spec": {"$setElementOrder/containers": [{"name": "c"}, {"name": "a"}], "containers": [{"name": "c"}]}},
            ("spec", "containers"),
            [{"name": "c"}, {"name": "a", "image": "a:1", "args": ["x"]}, {"name": "b", "image": "b:1"}],
        ),
        ({"spec": {"tolerations": [{"key": "new"}]}}, ("spec", "tolerations"), [{"key": "new"}]),
        ({"metadata": {"finalizers": ["two"]}}, ("metadata", "finalizers"), ["one", "two"]),
        ({"metadata": {"$deleteFromPrimitiveList/finalizers": ["one"]}}, ("metadata", "finalizers"), []),
        ({"metadata": {"labels": {"x": None, "y": "2"}}}, ("metadata", "labels"), {"y": "2"}),
        ({"metadata": {"labels": {"$patch": "replace", "z": "3"}}}, ("metadata", "labels"), {"z": "3"}),
        ({"metadata": {"labels": {"$retainKeys": ["q"], "q": "1"}}}, ("metadata", "labels"), {"q": "1"}),
    ],
)
def test_strategic_merge_follows_the_merge_keys_of_the_kind(
    patch: dict[str, Any], path: tuple[str, str], expected: Any
) -> None:
    merged = strategic_merge_patch(POD, patch, builtin_schema("V1Pod"))
    assert merged[path[0]][path[1]] == expected


def test_strategic_merge_refuses_an_item_without_its_merge_key() -> None:
    with pytest.raises(ApiError, match="merge key 'name'"):
        strategic_merge_patch(POD, {"spec": {"containers": [{"image": "x"}]}}, builtin_schema("V1Pod"))
