"""`as=Table`: the rows that `kubectl get` prints."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from llmservice_local.api import rows
from llmservice_local.api.json_path import find
from llmservice_local.api.kinds import Column, Kind

Object = dict[str, Any]


def table(kind: Kind, objects: Iterable[Object], now: datetime, include_object: str = "Metadata") -> Object:
    """A meta.k8s.io/v1 Table. `include_object` says what each row carries: `None`, `Metadata` or `Object`."""
    builtin = rows.BUILT_IN.get(kind.name)
    columns = builtin.columns if builtin else (kind.columns or rows.PLAIN.columns)
    printed = []
    for obj in objects:
        if builtin or not kind.columns:
            cells = (builtin or rows.PLAIN).cells(obj, now)
        else:
            cells = [_cell(obj, column, now) for column in columns]
        printed.append({"cells": cells, "object": _carried(obj, include_object)})
    definitions = [
        {
            "name": column.name,
            "type": column.type if column.type != "date" else "string",
            "format": "name" if column.name == "Name" else "",
            "description": column.description,
            "priority": column.priority,
        }
        for column in columns
    ]
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": {},
        "columnDefinitions": definitions,
        "rows": printed,
    }


def _carried(obj: Object, include_object: str) -> Object | None:
    if include_object == "None":
        return None
    if include_object == "Object":
        return obj
    return {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": obj["metadata"]}


def _cell(obj: Mapping[str, Any], column: Column, now: datetime) -> Any:
    found = find(obj, column.path)
    if not found:
        return None
    if column.type == "date":
        return rows.age(str(found[0]), now)
    value = found[0] if len(found) == 1 else ",".join(map(str, found))
    if isinstance(value, Mapping | list):
        return json.dumps(value, separators=(",", ":"))
    if column.type == "integer" and isinstance(value, int | float):
        return int(value)
    if column.type in {"number", "boolean"} and isinstance(value, int | float):
        return value
    return str(value).lower() if isinstance(value, bool) else str(value)
