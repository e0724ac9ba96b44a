"""What a schema says about merging: which lists are keyed, which are sets, which values are replaced whole.

The words are those of the OpenAPI extensions: `x-kubernetes-list-type`, `x-kubernetes-list-map-keys`,
`x-kubernetes-map-type`, and for strategic merge patches `x-kubernetes-patch-merge-key`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Schema = Mapping[str, Any]

ANY: Schema = {"x-kubernetes-preserve-unknown-fields": True}
"""The schema of what has none: maps merge by key, lists are replaced whole."""

_KEY_DEFAULTS = {"protocol": "TCP"}  # the one key of a built-in list that may be left out


def field(schema: Schema, name: str) -> Schema:
    """The schema of an object's field."""
    properties = schema.get("properties")
    if properties and name in properties:
        found: Schema = properties[name]
        return found
    additional = schema.get("additionalProperties")
    return additional if isinstance(additional, dict) else ANY


def items(schema: Schema) -> Schema:
    """The schema of a list's items."""
    found = schema.get("items")
    return found if isinstance(found, dict) else ANY


def is_atomic_map(schema: Schema) -> bool:
    return schema.get("x-kubernetes-map-type") == "atomic"


def is_set(schema: Schema) -> bool:
    return schema.get("x-kubernetes-list-type") == "set"


def map_keys(schema: Schema) -> tuple[str, ...]:
    """The fields that identify an item of a list-map; empty for other lists."""
    if schema.get("x-kubernetes-list-type") != "map":
        return ()
    return tuple(schema.get("x-kubernetes-list-map-keys") or ())


def item_key(item: Any, keys: Sequence[str], schema: Schema = ANY) -> str:
    """What identifies an item of a list-map, as canonical JSON: `{"name":"server"}`.

    A key that the item leaves out has its default; `None` stands where there is no default either.
    """
    found: dict[str, Any] = {}
    for key in keys:
        value = item.get(key) if isinstance(item, dict) else None
        if value is None:
            value = field(schema, key).get("default", _KEY_DEFAULTS.get(key))
        found[key] = value
    return canonical(found)


def canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
