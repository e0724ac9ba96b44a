"""JSON patch (RFC 6902), JSON merge patch (RFC 7386) and Kubernetes' strategic merge patch, as pure functions."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from llmservice_local.api import structure
from llmservice_local.api.errors import ApiError, bad_request


def json_patch(document: Any, operations: Any) -> Any:
    """Apply the operations in order to a copy of the document; raises `ApiError` 400, or 422 where one can't apply."""
    if not isinstance(operations, Sequence) or isinstance(operations, str):
        raise bad_request("a JSON patch is a list of operations")
    result = copy.deepcopy(document)
    for operation in operations:
        try:
            result = _operate(result, operation)
        except (KeyError, IndexError, ValueError, TypeError) as error:
            message = f"the server rejected our request: JSON patch operation {operation!r} does not apply: {error}"
            raise ApiError(422, "Invalid", message) from error
    return result


def merge_patch(target: Any, patch: Any) -> Any:
    """RFC 7386: maps merge, null removes, anything else replaces."""
    if not isinstance(patch, Mapping):
        return copy.deepcopy(patch)
    result = dict(target) if isinstance(target, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge_patch(result.get(key), value)
    return result


def strategic_merge_patch(target: Any, patch: Any, schema: structure.Schema) -> Any:
    """Kubernetes' strategic merge: as `merge_patch`, but lists with a merge key are merged item by item.

    Understands `$patch: replace|delete|merge`, `$retainKeys`, `$setElementOrder/…` and `$deleteFromPrimitiveList/…`.
    """
    if not isinstance(patch, Mapping):
        return copy.deepcopy(patch)
    directive = patch.get("$patch")
    if directive == "replace":
        return {key: value for key, value in patch.items() if key != "$patch"}
    if directive == "delete":
        return {}
    result = dict(target) if isinstance(target, Mapping) else {}
    if (retained := patch.get("$retainKeys")) is not None:
        result = {key: value for key, value in result.items() if key in retained}
    for key, value in patch.items():
        if key.startswith("$deleteFromPrimitiveList/"):
            name = key.partition("/")[2]
            result[name] = [item for item in result.get(name) or [] if item not in value]
        if key.startswith("$"):
            continue
        if value is None:
            result.pop(key, None)
        elif isinstance(value, list):
            result[key] = _merge_list(result.get(key), value, structure.field(schema, key))
        else:
            result[key] = strategic_merge_patch(result.get(key), value, structure.field(schema, key))
    _reorder(result, patch, schema)
    return result


def _merge_list(target: Any, patch: list[Any], schema: structure.Schema) -> list[Any]:
    existing: list[Any] = list(target) if isinstance(target, list) else []
    if schema.get("x-kubernetes-patch-strategy", "").startswith("merge") is False:
        return copy.deepcopy(patch)
    merge_key = schema.get("x-kubernetes-patch-merge-key")
    if merge_key is None:
        return existing + [item for item in patch if item not in existing]
    if any(isinstance(item, Mapping) and item.get("$patch") == "replace" for item in patch):
        return [item for item in patch if item.get("$patch") != "replace"]
    for item in patch:
        if not isinstance(item, Mapping) or merge_key not in item:
            raise bad_request(f"strategic merge patch: each item of this list needs its merge key {merge_key!r}")
        at = next((i for i, old in enumerate(existing) if old.get(merge_key) == item[merge_key]), None)
        if item.get("$patch") == "delete":
            if at is not None:
                del existing[at]
        elif at is None:
            existing.append(strategic_merge_patch({}, item, structure.items(schema)))
        else:
            existing[at] = strategic_merge_patch(existing[at], item, structure.items(schema))
    return existing


def _reorder(result: dict[str, Any], patch: Mapping[str, Any], schema: structure.Schema) -> None:
    """Put lists in the order that `$setElementOrder/NAME` gives; items that it does not name keep to the end."""
    for key, order in patch.items():
        if not key.startswith("$setElementOrder/"):
            continue
        name = key.partition("/")[2]
        merge_key = structure.field(schema, name).get("x-kubernetes-patch-merge-key")
        wanted = [item.get(merge_key) if merge_key and isinstance(item, Mapping) else item for item in order]

        def position(item: Any, merge_key: str | None = merge_key, wanted: list[Any] = wanted) -> int:
            value = item.get(merge_key) if merge_key and isinstance(item, Mapping) else item
            return wanted.index(value) if value in wanted else len(wanted)

        if isinstance(result.get(name), list):
            result[name] = sorted(result[name], key=position)


def _operate(document: Any, operation: Mapping[str, Any]) -> Any:
    verb, path = operation["op"], _pointer(operation["path"])
    if verb == "test":
        if _get(document, path) != operation["value"]:
            raise ValueError(f"test failed: {operation['path']} is {_get(document, path)!r}")
        return document
    if verb == "remove":
        return _remove(document, path)
    if verb == "add":
        return _add(document, path, copy.deepcopy(operation["value"]))
    if verb == "replace":
        _get(document, path)
        return _add(_remove(document, path), path, copy.deepcopy(operation["value"])) if path else operation["value"]
    if verb in {"move", "copy"}:
        source = _pointer(operation["from"])
        value = copy.deepcopy(_get(document, source))
        return _add(_remove(document, source) if verb == "move" else document, path, value)
    raise ValueError(f"unknown operation {verb!r}: expected add, remove, replace, move, copy or test")


def _pointer(path: str) -> list[str]:
    if path and not path.startswith("/"):
        raise ValueError(f"{path!r} is no JSON pointer: it must begin with '/'")
    return [step.replace("~1", "/").replace("~0", "~") for step in path.split("/")[1:]]


def _get(document: Any, path: list[str]) -> Any:
    for step in path:
        document = document[int(step)] if isinstance(document, list) else document[step]
    return document


def _add(document: Any, path: list[str], value: Any) -> Any:
    if not path:
        return value
    parent = _get(document, path[:-1])
    if isinstance(parent, list):
        index = len(parent) if path[-1] == "-" else int(path[-1])
        if not 0 <= index <= len(parent):
            raise IndexError(f"index {path[-1]} is past the list's end")
        parent.insert(index, value)
    else:
        parent[path[-1]] = value
    return document


def _remove(document: Any, path: list[str]) -> Any:
    parent = _get(document, path[:-1])
    del parent[int(path[-1]) if isinstance(parent, list) else path[-1]]
    return document
