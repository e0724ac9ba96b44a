from __future__ import annotations

from typing import Any

import pytest

from llmservice_local.kinds.cel import Rules


def rules(rule: dict[str, Any], **fields: dict[str, Any]) -> Rules:
    spec = {"type": "object", "properties": fields, "x-kubernetes-validations": [rule]}
    return Rules({"type": "object", "properties": {"spec": spec}})


INTEGER = {"type": "integer"}


@pytest.mark.parametrize(
    ("rule", "spec", "holds"),
    [
        ("self.a <= self.b", {"a": 1, "b": 2}, True),
        ("self.a <= self.b", {"a": 3, "b": 2}, False),
        ("!has(self.a) || self.a > 0", {}, True),
        ("has(self.a) != has(self.b)", {"a": 1, "b": 1}, False),
        ("self.u.matches('^(hf|file)://')", {"u": "hf://x"}, True),
        ("self.u.matches('^(hf|file)://')", {"u": "ftp://x"}, False),
        ("self.r > 0.5", {"r": 1}, True),  # a whole number in a field of type number is a double
        ("self.l.all(x, x.size() < 3)", {"l": ["ab", "abc"]}, False),
        ("duration(self.u) >= duration('1s')", {"u": "500ms"}, False),
        ("self.u in ['a', 'b']", {"u": "b"}, True),
        ("self.n == 0", {"n": "25%"}, False),
        ("self.n != 0 && self.n == '25%'", {"n": "25%"}, True),
        ("self.n == 0 && self.n != '25%'", {"n": 0}, True),
    ],
)
def test_rule_result(rule: str, spec: dict[str, Any], holds: bool) -> None:
    compiled = rules(
        {"rule": rule, "message": "no"},
        a=INTEGER,
        b=INTEGER,
        u={"type": "string"},
        r={"type": "number"},
        n={"x-kubernetes-int-or-string": True},
        l={"type": "array", "items": {"type": "string"}},
    )
    errors = [str(error) for error in compiled.check({"spec": spec})]
    assert errors == ([] if holds else ['spec: Invalid value: "object": no'])


def test_transition_rule_runs_only_where_there_is_an_old_value() -> None:
    compiled = rules({"rule": "self.a == oldSelf.a", "message": "a is immutable"}, a=INTEGER)
    assert list(compiled.check({"spec": {"a": 1}})) == []
    assert list(compiled.check({"spec": {"a": 1}}, {"spec": {"a": 1}})) == []
    (error,) = compiled.check({"spec": {"a": 2}}, {"spec": {"a": 1}})
    assert error.detail.endswith("a is immutable")


def test_transition_rule_with_an_optional_old_value_runs_at_creation_too() -> None:
    rule = {"rule": "self.a == 1 || (oldSelf.hasValue() && self.a == oldSelf.value().a)", "optionalOldSelf": True}
    compiled = rules(rule | {"message": "a stays"}, a=INTEGER)
    assert list(compiled.check({"spec": {"a": 1}})) == []
    (error,) = compiled.check({"spec": {"a": 2}})
    assert error.detail.endswith("a stays")
    assert list(compiled.check({"spec": {"a": 2}}, {"spec": {"a": 2}})) == []
    assert len(list(compiled.check({"spec": {"a": 3}}, {"spec": {"a": 2}}))) == 1


def test_transition_rule_inside_a_list_map_compares_items_of_one_key() -> None:
    item = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "n": INTEGER},
        "x-kubernetes-validations": [{"rule": "self.n >= oldSelf.n", "message": "n never falls"}],
    }
    listed = {"type": "array", "items": item, "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}
    compiled = Rules({"type": "object", "properties": {"items": listed}})
    old = {"items": [{"name": "a", "n": 5}, {"name": "b", "n": 1}]}
    assert list(compiled.check({"items": [{"name": "b", "n": 2}, {"name": "c", "n": 0}]}, old)) == []
    (error,) = compiled.check({"items": [{"name": "b", "n": 2}, {"name": "a", "n": 4}]}, old)
    assert error.path == "items[1]"


def test_message_expression_path_and_reason_are_honoured() -> None:
    rule = {
        "rule": "self.a <= self.b",
        "messageExpression": "'a is ' + string(self.a)",
        "fieldPath": ".a",
        "reason": "FieldValueForbidden",
    }
    (error,) = rules(rule, a=INTEGER, b=INTEGER).check({"spec": {"a": 3, "b": 2}})
    assert str(error) == "spec.a: Forbidden: a is 3"


def test_rule_without_a_message_is_quoted() -> None:
    (error,) = rules({"rule": "self.a >\n  1"}, a=INTEGER).check({"spec": {"a": 1}})
    assert error.detail == 'Invalid value: "object": failed rule: self.a > 1'


def test_rule_that_cannot_be_evaluated_refuses_the_object() -> None:
    (error,) = rules({"rule": "self.a > 1"}, a=INTEGER).check({"spec": {}})
    assert "rule evaluation error" in error.detail


def test_rule_that_does_not_compile_is_refused_with_its_place() -> None:
    with pytest.raises(ValueError, match=r"spec: rule 'self\.a \+' does not compile"):
        rules({"rule": "self.a +"}, a=INTEGER)
