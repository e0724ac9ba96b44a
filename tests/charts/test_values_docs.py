from __future__ import annotations

import json

import pytest

import values_docs as docs


def test_schema_and_readme_are_what_the_comments_say() -> None:
    for path, text in docs.outputs().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is stale: run `make chart`"


def test_every_value_is_explained() -> None:
    values = docs.parse((docs.CHART / "values.yaml").read_text(encoding="utf-8"))
    rows = [docs._row(group, leaf) for group in values for leaf in group.leaves()]
    assert [row for row in rows if row.endswith("|  |")] == []


def test_types_come_from_the_defaults_and_the_rest_from_the_comment() -> None:
    text = """
# A head without values.

# How many,
# at least one.
# @schema {minimum: 1}
replicas: 2
group:
  # Which.
  # @schema {enum: [a, b]}
  kind: a
  # Anything.
  # @schema {$ref: "#/definitions/object"}
  free: {x: 1}
"""
    schema = json.loads(docs.schema_json(docs.parse(text)))
    replicas, group = schema["properties"]["replicas"], schema["properties"]["group"]
    assert replicas == {"description": "How many, at least one.", "type": "integer", "minimum": 1}
    assert group["additionalProperties"] is False
    assert group["properties"]["kind"] == {"description": "Which.", "enum": ["a", "b"]}
    assert group["properties"]["free"] == {"description": "Anything.", "allOf": [{"$ref": "#/definitions/object"}]}


def test_an_empty_default_without_a_type_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a\.b is empty by default"):
        docs.schema_json(docs.parse("a:\n  # What?\n  b: {}\n"))


def test_readme_without_a_place_for_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="values: begin"):
        docs.readme("# llmservice\n", ())
