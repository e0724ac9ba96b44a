"""Grammars whose intersections would take all memory are refused before llguidance reads them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llmservice_server.sampling.grammar import check_grammar, clients_grammar, json_grammar
from llmservice_server.types.errors import GrammarError

PATTERNS = [{"type": "string", "pattern": f"a.{{{count}}}b"} for count in range(30)]
"""llguidance lists all combinations of their parts: more than 2 ** 30."""
UNIONS = [
    {"oneOf": [{"oneOf": [
        {"type": "object", "required": ["kind"], "properties": {
            "kind": {"const": kind + letter + digit}, "at": {"type": "string", "format": "date-time"}}}
        for digit in "12"]} for letter in "ab"]} for kind in "xy"
]  # fmt: skip
"""Unions that one member tells apart, as pydantic nests them."""
INTERSECTED = " & ".join(f"/(.|\\n)*a.{{{count}}}b(.|\\n)*/" for count in range(30))


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": PATTERNS},
        {"allOf": [{"pattern": f"[{letter}]"} for letter in "abcdefghijklmnopqrstuvwxyz0123"]},
        {"type": "object", "allOf": [{"properties": {"a": each}} for each in PATTERNS]},
        {"allOf": [{"$ref": f"#/$defs/{number}"} for number in range(30)], "$defs": PATTERNS},
        {"allOf": [{"$ref": f"#n{number}"} for number in range(30)],
         "$defs": {str(number): each | {"$anchor": f"n{number}"} for number, each in enumerate(PATTERNS)}},
        {"anyOf": [{"allOf": PATTERNS[:15]}], "items": {}, "allOf": PATTERNS[15:]},
        {"allOf": [*PATTERNS[:8], {"oneOf": [{"allOf": PATTERNS[8:12]}, {"allOf": PATTERNS[12:]}]}]},
    ],
)  # fmt: skip
def test_schema_is_refused_where_a_text_must_match_too_many_patterns_at_once(schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarError, match="too many patterns at once"):
        json_grammar(schema)
    with pytest.raises(GrammarError, match="too many patterns at once"):
        clients_grammar(f"start: %json {json.dumps(schema)}")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "allOf": [{"pattern": each} for each in ("[A-Z]", "[a-z]", "[0-9]", "[!-/]", "^.{8,64}$")]},
        {"allOf": [{"type": "object", "properties": {f"a{number}": each, f"b{number}": {"format": "date"}}}
                   for number, each in enumerate(PATTERNS[:4])]},
        {"type": "object", "properties": {each["pattern"]: each for each in PATTERNS}},
        {"anyOf": PATTERNS},
        {"oneOf": UNIONS},
        {"$defs": {"list": {"type": "object", "properties": {"next": {"$ref": "#/$defs/list"}, "of": PATTERNS[0]}}},
         "$ref": "#/$defs/list"},
    ],
)  # fmt: skip
def test_schema_with_patterns_of_texts_of_their_own_is_taken(schema: dict[str, Any]) -> None:
    check_grammar(json_grammar(schema))


@pytest.mark.parametrize(
    "rules",
    [
        f"start: T\nT: {INTERSECTED}",
        "start: T30\nT0: /a*/\n" + "".join(f"T{each + 1}: T{each} & /(a|.b)*/\n" for each in range(30)),
        "start: T\nT: ~~/a/ & " + " & ~ ~ ".join(INTERSECTED.split(" & ")),
    ],
)
def test_rules_that_intersect_too_much_are_refused(rules: str) -> None:
    with pytest.raises(GrammarError, match="too many patterns at once"):
        clients_grammar(rules)


@pytest.mark.parametrize(
    "rules",
    [
        'start: "R&D" T\nT: /[a-z ]*/ & /(.|\\n)*x(.|\\n)*/ & ~/bad/ & ~ "worse"',
        "start: T\nT: /[a-z]*/ & " + INTERSECTED.replace("/(", "~/("),
        "start: " + " | ".join(json.dumps(f"word {number}") for number in range(3000)),
    ],
)
def test_rules_with_few_intersections_are_taken(rules: str) -> None:
    check_grammar(clients_grammar(rules))
