"""CEL validation rules of a CRD (`x-kubernetes-validations`), compiled once and evaluated with cel-python.

Reference: https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/#validation-rules
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import celpy
from celpy import celtypes
from celpy.adapter import json_to_cel
from celpy.celparser import CELParseError
from celpy.evaluation import CELEvalError, bool_eq, bool_ne

from llmservice_local.errors import FieldError
from llmservice_local.kinds.schema import Schema, field_schema, item_key, item_schema, json_type, map_keys
from llmservice_operator.api.units import amount

_ABSENT = object()


@dataclass(frozen=True, slots=True)
class _Optional:
    """CEL's optional, for which cel-python has no type."""

    value: Any

    def has_value(self) -> celtypes.BoolType:
        return celtypes.BoolType(self.value is not None)


Evaluate = Callable[[Mapping[str, Any]], Any]


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """One compiled rule of one schema node."""

    schema: Schema
    evaluate: Evaluate
    message: Callable[[Mapping[str, Any]], str]
    reason: str
    field_path: str
    transition: bool
    optional_old_self: bool


class Rules:
    """All the rules of a schema. The constructor raises `ValueError` for an expression that does not compile."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._compiled: dict[int, tuple[Rule, ...]] = {}
        self._guarded: set[int] = set()
        self._compile(schema, "")

    def check(self, obj: Any, old: Any = None) -> Iterator[FieldError]:
        """The violated rules; transition rules (`oldSelf`) without optionalOldSelf run only if there is an old value.

        Unchanged values are not validated again (validation ratcheting, on by default since Kubernetes 1.33).
        """
        yield from self._check(obj, _ABSENT if old is None else old, self._schema, "")

    def _compile(self, schema: Schema, path: str) -> bool:
        declared = schema.get("x-kubernetes-validations") or []
        if declared:
            self._compiled[id(schema)] = tuple(_compile(rule, schema, path) for rule in declared)
        below = [self._compile(child, f"{path}.{name}") for name, child in (schema.get("properties") or {}).items()]
        for name, suffix in (("items", "[]"), ("additionalProperties", "{}")):
            if isinstance(schema.get(name), dict):
                below.append(self._compile(schema[name], path + suffix))
        if declared or any(below):
            self._guarded.add(id(schema))
            return True
        return False

    def _check(self, value: Any, old: Any, schema: Schema, path: str) -> Iterator[FieldError]:
        if id(schema) not in self._guarded:
            return
        if rules := self._compiled.get(id(schema)):
            yield from _violations(rules, value, old, path)
        if isinstance(value, dict):
            for name, item in value.items():
                before = old.get(name, _ABSENT) if isinstance(old, dict) else _ABSENT
                at = f"{path}.{name}" if path else name
                yield from self._check(item, before, field_schema(schema, name), at)
        elif isinstance(value, list):
            below, keys = item_schema(schema), map_keys(schema)
            known = {item_key(item, keys, below): item for item in old} if keys and isinstance(old, list) else {}
            for index, item in enumerate(value):
                before = known.get(item_key(item, keys, below), _ABSENT) if keys else _ABSENT
                yield from self._check(item, before, below, f"{path}[{index}]")


def to_cel(value: Any, schema: Schema) -> Any:
    """A JSON value as a CEL value of the type in its schema: double, duration, timestamp …"""
    if isinstance(value, dict):
        return celtypes.MapType(
            {celtypes.StringType(name): to_cel(item, field_schema(schema, name)) for name, item in value.items()}
        )
    if isinstance(value, list):
        return celtypes.ListType([to_cel(item, item_schema(schema)) for item in value])
    if isinstance(value, float) or (schema.get("type") == "number" and isinstance(value, int)):
        return celtypes.DoubleType(value)
    typed = {"duration": celtypes.DurationType, "date-time": celtypes.TimestampType}.get(schema.get("format", ""))
    if isinstance(value, str) and typed is not None:
        return typed(value)
    return json_to_cel(value)


def _compile(rule: Mapping[str, Any], schema: Schema, path: str) -> Rule:
    expression = rule["rule"]
    explain = rule.get("messageExpression")
    evaluate_message = program(explain, path) if explain else None
    fallback = rule.get("message") or f"failed rule: {' '.join(expression.split())}"

    def message(variables: Mapping[str, Any]) -> str:
        if evaluate_message is not None:
            try:
                return str(evaluate_message(variables)) or fallback
            except CELEvalError:  # the API server falls back to the plain message, too
                return fallback
        return fallback

    return Rule(
        schema=schema,
        evaluate=program(expression, path),
        message=message,
        reason=rule.get("reason", "FieldValueInvalid"),
        field_path=rule.get("fieldPath", ""),
        transition=re.search(r"\boldSelf\b", expression) is not None,
        optional_old_self=bool(rule.get("optionalOldSelf")),
    )


def program(expression: str, path: str) -> Evaluate:
    try:
        program = _compiled(expression)
    except CELParseError as error:
        raise ValueError(f"{path.lstrip('.') or 'the root'}: rule {expression!r} does not compile: {error}") from error
    return lambda variables: program.evaluate(dict(variables))


@lru_cache(1024)
def _compiled(expression: str) -> celpy.Runner:
    """A definition is compiled when it is validated, and again when it is served."""
    environment = celpy.Environment()
    return environment.program(environment.compile(expression), functions=_FUNCTIONS)


def _violations(rules: tuple[Rule, ...], value: Any, old: Any, path: str) -> Iterator[FieldError]:
    is_new = old is _ABSENT
    changed = value != old
    ruling = tuple(rule for rule in rules if (rule.optional_old_self or not is_new if rule.transition else changed))
    if not ruling:
        return
    before = json.dumps(old) if not is_new and any(rule.transition for rule in ruling) else None
    for rule, why in zip(ruling, _whys_not(ruling, json.dumps(value), before), strict=True):
        if why is not None:
            yield _error(rule, value, path, why)


@lru_cache(1024)
def _whys_not(rules: tuple[Rule, ...], value: str, old: str | None) -> list[str | None]:
    """The message of each rule that is violated. Values are JSON; most come again, and this takes milliseconds."""
    schema = rules[0].schema
    current, before = to_cel(json.loads(value), schema), None if old is None else to_cel(json.loads(old), schema)
    whys = []
    for rule in rules:
        variables = {"self": current}
        if rule.transition:
            variables["oldSelf"] = _Optional(before) if rule.optional_old_self else before
        whys.append(_why_not(rule, variables))
    return whys


def _why_not(rule: Rule, variables: Mapping[str, Any]) -> str | None:
    try:
        return None if rule.evaluate(variables) else rule.message(variables)
    except CELEvalError as error:
        return f"rule evaluation error: {error.args[0] if error.args else error}"


def _error(rule: Rule, value: Any, path: str, why: str) -> FieldError:
    at = path + rule.field_path
    shown = json.dumps(value) if not isinstance(value, dict | list) else f'"{json_type(value)}"'
    if rule.reason == "FieldValueRequired":
        return FieldError(at, rule.reason, f"Required value: {why}")
    if rule.reason == "FieldValueForbidden":
        return FieldError(at, rule.reason, f"Forbidden: {why}")
    return FieldError(at, rule.reason, f"Invalid value: {shown}: {why}")


def _across_types(compare: Callable[[Any, Any], Any], *, otherwise: bool) -> Callable[[Any, Any], Any]:
    """Text and a number differ, as in a field that takes both; cel-python raises."""

    def compared(one: Any, other: Any) -> Any:
        differ = isinstance(one, str) != isinstance(other, str)
        failed = isinstance(one, CELEvalError) or isinstance(other, CELEvalError)
        return celtypes.BoolType(otherwise) if differ and not failed else compare(one, other)

    return compared


def _quantity(text: celtypes.StringType) -> celtypes.DoubleType:
    """Kubernetes' `quantity` type, as far as comparisons need it."""
    try:
        return celtypes.DoubleType(float(amount(text)))
    except ValueError as error:
        raise CELEvalError(str(error)) from error


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "_==_": _across_types(bool_eq, otherwise=False),
    "_!=_": _across_types(bool_ne, otherwise=True),
    "hasValue": _Optional.has_value,
    "value": lambda optional: optional.value,
    "quantity": _quantity,
    "isGreaterThan": lambda one, other: celtypes.BoolType(one > other),
}
