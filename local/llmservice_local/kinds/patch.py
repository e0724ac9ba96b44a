"""JSON patch (RFC 6902), JSON merge patch (RFC 7386) and Kubernetes' strategic merge patch, as pure functions."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import jsonpatch

from llmservice_local.errors import ApiError, bad_request
from llmservice_local.kinds.schema import Schema, field_schema, item_schema


def json_patch(document: Any, operations: Any) -> Any:
    """Apply the operations in order to a copy of the document; raises `ApiError` 400, or 422 if one does not apply."""
    if not isinstance(operations, Sequence) or isinstance(operations, str):
        raise bad_request("a JSON patch is a list of operations")
    try:
        return jsonpatch.apply_patch(document, operations)
    except (jsonpatch.JsonPatchException, jsonpatch.JsonPointerException, KeyError, TypeError) as error:
        raise ApiError(422, "Invalid", f"the server rejected our request: {error}") from error


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


def strategic_merge_patch(target: Any, patch: Any, schema: Schema) -> Any:
    """Kubernetes' strategic merge: as `merge_patch`, but lists with a merge key are merged item by item.

    Supports `$patch: replace|delete|merge`, `$retainKeys`, `$setElementOrder/…` and `$deleteFromPrimitiveList/…`.
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
            result[key] = _merge_list(result.get(key), value, field_schema(schema, key))
        else:
            result[key] = strategic_merge_patch(result.get(key), value, field_schema(schema, key))
    _reorder(result, patch, schema)
    return result


def _merge_list(target: Any, patch: list[Any], schema: Schema) -> list[Any]:
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
            existing.append(strategic_merge_patch({}, item, item_schema(schema)))
        else:
            existing[at] = strategic_merge_patch(existing[at], item, item_schema(schema))
    return existing


def _reorder(result: dict[str, Any], patch: Mapping[str, Any], schema: Schema) -> None:
    """Put lists in the order that `$setElementOrder/NAME` gives; other items go to the end."""
    for key, order in patch.items():
        if not key.startswith("$setElementOrder/"):
            continue
        name = key.partition("/")[2]
        merge_key = field_schema(schema, name).get("x-kubernetes-patch-merge-key")
        wanted = [item.get(merge_key) if merge_key and isinstance(item, Mapping) else item for item in order]

        def position(item: Any, merge_key: str | None = merge_key, wanted: list[Any] = wanted) -> int:
            value = item.get(merge_key) if merge_key and isinstance(item, Mapping) else item
            return wanted.index(value) if value in wanted else len(wanted)

        if isinstance(result.get(name), list):
            result[name] = sorted(result[name], key=position)
