"""Sets of field paths, the currency of server-side apply: who owns which field of an object.

A path is a tuple of steps written as in `fieldsV1`: `f:name` a field, `k:{"name":"x"}` an item of a list-map, `v:"x"` a
member of a set. Format: https://kubernetes.io/docs/reference/using-api/server-side-apply/ and structured-merge-diff.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from llmservice_local.api import structure

Path = tuple[str, ...]

_UNTRACKED = frozenset(
    ("f:metadata", f"f:{name}")
    for name in (
        "name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp",
        "deletionGracePeriodSeconds", "managedFields", "selfLink", "generateName",
    )
)  # fmt: skip


def fields_of(obj: Mapping[str, Any], schema: structure.Schema) -> dict[Path, Any]:
    """Every path that owning this object means, with its value: leaves, atomic values, and items of keyed lists.

    The value of a keyed item itself is None: its fields have paths of their own.
    """
    found = dict(_walk(obj, schema, ()))
    return {
        path: value
        for path, value in found.items()
        if path[:2] not in _UNTRACKED and path not in {("f:apiVersion",), ("f:kind",), ("f:metadata",)}
    }


def to_fields_v1(paths: Iterable[Path]) -> dict[str, Any]:
    """The nested form that `metadata.managedFields` carries."""
    root: dict[str, Any] = {}
    for path in sorted(paths):
        node = root
        for step in path:
            node = node.setdefault(step, {})
        node["."] = {}
    return _without_lone_dots(root)


def from_fields_v1(fields: Mapping[str, Any], prefix: Path = ()) -> Iterator[Path]:
    """The paths of a `fieldsV1`."""
    for step, below in fields.items():
        if step == ".":
            yield prefix
        elif not below:
            yield (*prefix, step)
        else:
            yield from from_fields_v1(below, (*prefix, step))


def is_item_key(path: Path) -> bool:
    """Whether the path is a field that identifies its item: it stays for as long as the item does."""
    return len(path) > 1 and path[-2].startswith("k:") and path[-1][2:] in json.loads(path[-2][2:])


def dotted(path: Path) -> str:
    """A path as error messages show it: `.spec.containers[name="server"].image`."""
    shown = ""
    for step in path:
        if step.startswith("f:"):
            shown += "." + step[2:]
        elif step.startswith("k:"):
            keys = json.loads(step[2:])
            shown += "[" + ",".join(f"{key}={json.dumps(value)}" for key, value in keys.items()) + "]"
        else:
            shown += f"[={step[2:]}]"
    return shown


def _walk(value: Any, schema: structure.Schema, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, dict) and value and not structure.is_atomic_map(schema):
        for name, child in value.items():
            yield from _walk(child, structure.field(schema, name), (*path, f"f:{name}"))
    elif isinstance(value, list) and value and (keys := structure.map_keys(schema)):
        below = structure.items(schema)
        for item in value:
            at = (*path, "k:" + structure.item_key(item, keys, below))
            yield at, None
            yield from _walk(item, below, at)
    elif isinstance(value, list) and value and structure.is_set(schema):
        for item in value:
            yield (*path, "v:" + structure.canonical(item)), item
    elif path:
        yield path, value


def _without_lone_dots(node: dict[str, Any]) -> dict[str, Any]:
    if set(node) == {"."}:
        return {}
    return {step: _without_lone_dots(below) if step != "." else below for step, below in node.items()}
