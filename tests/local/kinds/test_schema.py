from __future__ import annotations

import re
from typing import Any

import pytest

from llmservice_local.kinds.schema import go_pattern, pruned, validate, with_defaults


def spec(field: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"spec": {"type": "object", "properties": {"f": field}}}}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ({"type": "integer"}, "x", 'spec.f: Invalid value: "string": spec.f in body must be of type integer: "string"'),
        (
            {"type": "integer"},
            True,
            'spec.f: Invalid value: "boolean": spec.f in body must be of type integer: "boolean"',
        ),
        ({"type": "string"}, 1, 'spec.f: Invalid value: "integer": spec.f in body must be of type string: "integer"'),
        (
            {"type": "array", "items": {}},
            {},
            'spec.f: Invalid value: "object": spec.f in body must be of type array: "object"',
        ),
        (
            {"type": "integer", "minimum": 1},
            0,
            "spec.f: Invalid value: 0: spec.f in body should be greater than or equal to 1",
        ),
        (
            {"type": "integer", "maximum": 8},
            9,
            "spec.f: Invalid value: 9: spec.f in body should be less than or equal to 8",
        ),
        (
            {"type": "number", "minimum": 0, "exclusiveMinimum": True},
            0,
            "spec.f: Invalid value: 0: spec.f in body should be greater than 0",
        ),
        ({"type": "string", "enum": ["a", "b"]}, "c", 'spec.f: Unsupported value: "c": supported values: "a", "b"'),
        ({"type": "string", "pattern": "^a$"}, "b", "spec.f: Invalid value: \"b\": spec.f in body should match '^a$'"),
        ({"type": "string", "maxLength": 2}, "abc", "spec.f: Too long: may not be more than 2 bytes"),
        (
            {"type": "string", "minLength": 1},
            "",
            'spec.f: Invalid value: "": spec.f in body should be at least 1 chars long',
        ),
        ({"type": "array", "items": {}, "maxItems": 1}, [1, 2], "spec.f: Too many: 2: must have at most 1 items"),
        ({"type": "object", "required": ["g"]}, {}, "spec.f.g: Required value"),
        (
            {"type": "array", "items": {"type": "string"}},
            ["a", 1],
            'spec.f[1]: Invalid value: "integer": spec.f[1] in body',
        ),
        (
            {"type": "array", "items": {"type": "string"}, "x-kubernetes-list-type": "set"},
            ["a", "a"],
            'spec.f[1]: Duplicate value: "a"',
        ),
        (
            {
                "type": "array",
                "items": {"type": "object", "properties": {"name": {"type": "string"}}},
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["name"],
            },
            [{"name": "a"}, {"name": "a"}],
            'spec.f[1]: Duplicate value: {"name":"a"}',
        ),
        (
            {"x-kubernetes-int-or-string": True},
            1.5,
            "spec.f: Invalid value: 1.5: spec.f in body must be of type integer or string",
        ),
        (
            {"type": "object", "additionalProperties": {"type": "string"}},
            {"a": 1},
            'spec.f.a: Invalid value: "integer": spec.f.a in body must be of type string',
        ),
        ({"enum": [8, 16]}, 9, 'spec.f: Unsupported value: 9: supported values: "8", "16"'),
        (
            {"anyOf": [{"type": "string"}, {"type": "integer"}]},
            True,
            "spec.f: Invalid value: true: spec.f in body must validate",
        ),
        ({"not": {"enum": [1]}}, 1, "spec.f: Invalid value: 1: spec.f in body must not validate the schema (not)"),
        (
            {"type": "string", "format": "date-time"},
            "today",
            'spec.f: Invalid value: "today": spec.f in body must be of type',
        ),
    ],
)
def test_violation_is_reported_with_its_path_and_reason(field: dict[str, Any], value: Any, message: str) -> None:
    (error,) = validate({"spec": {"f": value}}, spec(field))
    assert str(error).startswith(message)
    assert error.path.startswith("spec.f")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ({"type": "integer"}, 3.0),
        ({"type": "number"}, 3),
        ({"type": "string", "nullable": True}, None),
        ({"x-kubernetes-int-or-string": True}, "25%"),
        ({"x-kubernetes-preserve-unknown-fields": True}, {"any": ["thing"]}),
        ({"type": "string", "format": "date-time"}, "2026-11-21T10:00:00.123456Z"),
        ({"type": "object", "additionalProperties": {"type": "string"}}, {"a": "b"}),
    ],
)
def test_what_the_schema_allows_passes(field: dict[str, Any], value: Any) -> None:
    assert list(validate({"spec": {"f": value}}, spec(field))) == []


def test_defaults_are_filled_level_by_level_and_never_shared() -> None:
    schema = spec({"type": "object", "default": {}, "properties": {"n": {"type": "integer", "default": 3}}})
    first, second = with_defaults({"spec": {}}, schema), with_defaults({"spec": {}}, schema)
    assert first == {"spec": {"f": {"n": 3}}}
    first["spec"]["f"]["n"] = 4
    assert second == {"spec": {"f": {"n": 3}}}


def test_default_does_not_replace_what_is_given_but_replaces_a_null() -> None:
    schema = spec({"type": "integer", "default": 3})
    assert with_defaults({"spec": {"f": 0}}, schema) == {"spec": {"f": 0}}
    assert with_defaults({"spec": {"f": None}}, schema) == {"spec": {"f": 3}}


def test_unknown_fields_are_pruned_and_named() -> None:
    schema = spec({"type": "array", "items": {"type": "object", "properties": {"a": {"type": "integer"}}}})
    kept, unknown = pruned({"spec": {"f": [{"a": 1, "b": 2}], "g": 1}, "kind": "X", "metadata": {"x": 1}}, schema)
    assert kept == {"spec": {"f": [{"a": 1}]}, "kind": "X", "metadata": {"x": 1}}
    assert unknown == ["spec.f[0].b", "spec.g"]


def test_preserved_and_map_fields_keep_whatever_they_hold() -> None:
    schema = spec({"type": "object", "x-kubernetes-preserve-unknown-fields": True})
    assert pruned({"spec": {"f": {"any": 1}}}, schema) == ({"spec": {"f": {"any": 1}}}, [])
    schema = spec({"type": "object", "additionalProperties": {"type": "string"}})
    assert pruned({"spec": {"f": {"any": "1"}}}, schema) == ({"spec": {"f": {"any": "1"}}}, [])


@pytest.mark.parametrize(
    ("pattern", "text", "matches"),
    [
        (r"^[0-9]+s$", "60s", True),
        (r"^[0-9]+s$", "60s\n", False),
        (r"^(a$|b)", "a\n", False),
        (r"^[$]\$$", "$$", True),
    ],
)
def test_a_dollar_is_the_end_of_the_text_as_in_go(pattern: str, text: str, matches: bool) -> None:
    assert bool(re.search(go_pattern(pattern), text)) == matches
