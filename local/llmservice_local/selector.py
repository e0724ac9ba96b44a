"""Label and field selectors, of query strings and of specs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from llmservice_local.errors import bad_request

Predicate = Callable[[Mapping[str, Any]], bool]

_SET = re.compile(r"^\s*([^\s!=,()]+)\s+(in|notin)\s*\(([^)]*)\)\s*$")
_EQUALITY = re.compile(r"^\s*([^\s!=,()]+)\s*(==|=|!=)\s*([^\s=!,()]*)\s*$")
_EXISTS = re.compile(r"^\s*(!?)\s*([^\s!=,()]+)\s*$")


def label_predicate(selector: str) -> Predicate:
    """A test of an object's labels: `a=b`, `a!=b`, `a in (b, c)`, `a notin (b)`, `a`, `!a`, joined by commas."""
    requirements = [_label_requirement(part) for part in _split(selector)]

    def matches(obj: Mapping[str, Any]) -> bool:
        labels = obj.get("metadata", {}).get("labels") or {}
        return all(requirement(labels) for requirement in requirements)

    return matches


def field_predicate(selector: str) -> Predicate:
    """A test of an object's fields by dotted path: `metadata.name=x,spec.nodeName!=y`; an absent field is ''."""
    requirements: list[tuple[list[str], bool, str]] = []
    for part in _split(selector):
        match = _EQUALITY.match(part)
        if match is None:
            raise bad_request(f"invalid field selector {selector!r}: expected field=value or field!=value")
        requirements.append((match[1].split("."), match[2] != "!=", match[3]))

    def matches(obj: Mapping[str, Any]) -> bool:
        return all((_field(obj, path) == value) == wanted for path, wanted, value in requirements)

    return matches


def matches_labels(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a `LabelSelector` of a spec (matchLabels, matchExpressions) matches these labels."""
    if any(labels.get(key) != value for key, value in (selector.get("matchLabels") or {}).items()):
        return False
    return all(_holds(expression, labels) for expression in selector.get("matchExpressions") or [])


def _holds(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether these labels meet one requirement, of a LabelSelector or a node affinity (Gt, Lt)."""
    value, values = labels.get(expression["key"]), expression.get("values") or []
    match expression["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt" if value is not None and value.isdigit():
            above = int(value) > int(values[0])
            return above if expression["operator"] == "Gt" else int(value) < int(values[0])
    return False


def selector_string(selector: Mapping[str, Any]) -> str:
    """A `LabelSelector` in the form of a query string."""
    parts = [f"{key}={value}" for key, value in sorted((selector.get("matchLabels") or {}).items())]
    for expression in selector.get("matchExpressions") or []:
        key, values = expression["key"], ",".join(expression.get("values") or [])
        parts.append(
            {
                "In": f"{key} in ({values})",
                "NotIn": f"{key} notin ({values})",
                "Exists": key,
                "DoesNotExist": f"!{key}",
            }[expression["operator"]]
        )
    return ",".join(parts)


def _split(selector: str) -> list[str]:
    """Split at the commas that are not inside parentheses."""
    return [part for part in re.split(r",(?![^(]*\))", selector) if part.strip()]


def _label_requirement(part: str) -> Callable[[Mapping[str, str]], bool]:
    if match := _SET.match(part):
        key, wanted, values = match[1], match[2] == "in", {value.strip() for value in match[3].split(",")}
        return lambda labels: (labels.get(key) in values) == wanted
    if match := _EQUALITY.match(part):
        key, wanted, value = match[1], match[2] != "!=", match[3]
        return lambda labels: (labels.get(key) == value) == wanted
    if match := _EXISTS.match(part):
        key, wanted = match[2], not match[1]
        return lambda labels: (key in labels) == wanted
    raise bad_request(f"unable to parse requirement {part!r} of the label selector")


def _field(obj: Mapping[str, Any], path: list[str]) -> str:
    value: Any = obj
    for step in path:
        value = value.get(step) if isinstance(value, Mapping) else None
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else str(value)
