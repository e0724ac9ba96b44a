"""The part of kubectl's JSONPath that printer columns use: fields, indexes, wildcards and equality filters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_STEP = re.compile(
    r"""
    \.(?P<field>(?:[^.\[\]\\]|\\.)+)
    | \[\?\(\s*@\.(?P<key>[^=\s]+)\s*==\s*(?P<quote>['"])(?P<value>.*?)(?P=quote)\s*\)\]
    | \[(?P<star>\*)\]
    | \[(?P<index>-?\d+)\]
    | \[(?P<name_quote>['"])(?P<name>.*?)(?P=name_quote)\]
    """,
    re.VERBOSE,
)


def find(obj: Any, path: str) -> list[Any]:
    """All values at the path: `.status.conditions[?(@.type=="Ready")].status`. Raises `ValueError` on other syntax."""
    values = [obj]
    at = 0
    while at < len(path):
        match = _STEP.match(path, at)
        if match is None:
            raise ValueError(f"JSONPath {path!r}: cannot read {path[at:]!r}")
        values = [found for value in values for found in _step(value, match)]
        at = match.end()
    return values


def _step(value: Any, match: re.Match[str]) -> list[Any]:
    name = match["field"] or match["name"]
    if name is not None:
        name = name.replace("\\.", ".")
        if isinstance(value, Mapping) and value.get(name) is not None:
            return [value[name]]
        return []
    if match["star"]:
        return list(value.values()) if isinstance(value, Mapping) else list(value or [])
    if not isinstance(value, list):
        return []
    if match["index"]:
        index = int(match["index"])
        return [value[index]] if -len(value) <= index < len(value) else []
    return [item for item in value if str(_at(item, match["key"])) == match["value"]]


def _at(item: Any, dotted: str) -> Any:
    for step in dotted.split("."):
        item = item.get(step) if isinstance(item, Mapping) else None
    return item
