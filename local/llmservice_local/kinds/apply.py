"""Server-side apply: field paths, `metadata.managedFields`, and the merge of an applied configuration.

Follows https://kubernetes.io/docs/reference/using-api/server-side-apply/: a field that the manager applied before and
omits now is removed unless another manager owns it too; a field that another manager owns with a different value is a
conflict, or with `force` becomes the applier's.

A path is a tuple of steps written as in `fieldsV1`: `f:name` a field, `k:{"name":"x"}` an item of a list-map, `v:"x"` a
member of a set (see also structured-merge-diff).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from llmservice_local.errors import ApiError
from llmservice_local.kinds.schema import (
    Schema,
    canonical,
    declares,
    field_schema,
    is_atomic_map,
    is_set,
    item_key,
    item_schema,
    json_type,
    map_keys,
    mistyped,
    with_quantities,
)
from llmservice_local.objects import Object

Path = tuple[str, ...]

_UNTRACKED = {  # of the metadata
    "name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp",
    "deletionGracePeriodSeconds", "managedFields", "selfLink", "generateName",
}  # fmt: skip


def fields_of(obj: Mapping[str, Any], schema: Schema) -> dict[Path, Any]:
    """The paths and values of an object's leaves, atomic values and list-map items (whose value is None)."""
    metadata = {name: value for name, value in (obj.get("metadata") or {}).items() if name not in _UNTRACKED}
    found = dict(_walk({**obj, "metadata": metadata}, schema, ()))
    for name in ("f:apiVersion", "f:kind", "f:metadata"):
        found.pop((name,), None)
    return found


def to_fields_v1(paths: Iterable[Path]) -> dict[str, Any]:
    """The nested form used in `metadata.managedFields`."""
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


def typed(applied: Object, schema: Schema) -> Object:
    """The object with quantities as text. Raises the API server's error for other types: it has status 500."""
    errors = list(_untyped(applied, schema, ""))
    metadata = applied["metadata"]
    name = "/".join(filter(None, (metadata.get("namespace"), metadata["name"])))
    kind = f"{applied['apiVersion']}, Kind={applied['kind']}"
    what = f"{name}; {kind}"
    if errors:
        listed = errors[0] if len(errors) == 1 else "\n".join(["errors:", *(f"  {error}" for error in errors)])
        raise ApiError(500, "", f"failed to create typed patch object ({what}): {listed}")
    try:
        return dict(with_quantities(applied, schema))
    except ValueError as error:
        unconverted = f"unable to convert unstructured object to {kind}: {error}"
        raise ApiError(500, "", f"failed to convert new object ({what}) to proper version: {unconverted}") from error


_EXPECTED = {"array": "list", "object": "map", "integer": "numeric (int or float)", "number": "numeric (int or float)"}


def _untyped(value: Any, schema: Schema, path: str, *, is_open: bool = False) -> Iterator[str]:
    """The fields that the schema lacks, the values of another type, and the items with the same key.

    Below a schema that preserves unknown fields (`is_open`), no field is unknown.
    """
    is_open = is_open or bool(schema.get("x-kubernetes-preserve-unknown-fields"))
    if wanted := mistyped(value, schema):
        yield f"{path}: expected {_EXPECTED.get(wanted, wanted)}, got {json_type(value)}"
    elif isinstance(value, dict):
        for name, child in value.items():
            at = f"{path}.{name}"
            if is_open or declares(schema, name):
                yield from _untyped(child, field_schema(schema, name), at, is_open=is_open)
            else:
                yield f"{at}: field not declared in schema"
    elif isinstance(value, list):
        keys, below = map_keys(schema), item_schema(schema)
        seen: set[str] = set()
        for index, item in enumerate(value):
            if keys and item is None:
                yield f"{path}: element {index}: associative list with keys may not have a null element"
                continue
            key = dotted(("k:" + item_key(item, keys, below),)) if keys else f"[{index}]"
            if key in seen:
                yield f"{path}: duplicate entries for key {key}"
            seen.add(key)
            yield from _untyped(item, below, path + key, is_open=is_open)


def is_item_key(path: Path) -> bool:
    """Whether the path is a key field of a list-map item, which exists as long as the item."""
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


def _walk(value: Any, schema: Schema, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, dict) and value and not is_atomic_map(schema):
        for name, child in value.items():
            yield from _walk(child, field_schema(schema, name), (*path, f"f:{name}"))
    elif isinstance(value, list) and value and (keys := map_keys(schema)):
        below = item_schema(schema)
        for item in value:
            at = (*path, "k:" + item_key(item, keys, below))
            yield at, None
            yield from _walk(item, below, at)
    elif isinstance(value, list) and value and is_set(schema):
        for item in value:
            yield (*path, "v:" + canonical(item)), item
    elif path:
        yield path, value


def _without_lone_dots(node: dict[str, Any]) -> dict[str, Any]:
    if set(node) == {"."}:
        return {}
    return {step: _without_lone_dots(below) if step != "." else below for step, below in node.items()}


@dataclass(frozen=True, slots=True)
class Manager:
    """A field manager: its name, operation (`Apply` or `Update`), API version and subresource."""

    name: str
    operation: str
    api_version: str
    subresource: str = ""

    @property
    def identity(self) -> tuple[str, str, str]:
        """Without the version: an apply through v1beta1 continues that of the same manager through v1alpha1."""
        return self.name, self.operation, self.subresource


Owners = dict[Manager, frozenset[Path]]


def read_owners(obj: Mapping[str, Any]) -> Owners:
    return {manager: frozenset(from_fields_v1(entry.get("fieldsV1") or {})) for manager, entry in _entries(obj).items()}


def _entries(obj: Mapping[str, Any]) -> dict[Manager, Object]:
    return {
        Manager(one.get("manager", ""), one["operation"], one["apiVersion"], one.get("subresource", "")): one
        for one in obj["metadata"].get("managedFields") or []
    }


def with_owners(obj: Object, owners: Owners, now: str) -> Object:
    """The object with these owners in `managedFields`; an entry with unchanged fields keeps its time."""
    before = _entries(obj)
    order = {manager: index for index, manager in enumerate(before)}
    entries = []
    for manager, paths in sorted(owners.items(), key=lambda item: order.get(item[0], len(order))):
        fields = to_fields_v1(paths)
        known = before.get(manager)
        if known is not None and known.get("fieldsV1") == fields:
            entries.append(known)
            continue
        entry = {
            "manager": manager.name,
            "operation": manager.operation,
            "apiVersion": manager.api_version,
            "time": now,
            "fieldsType": "FieldsV1",
            "fieldsV1": fields,
        }
        if manager.subresource:
            entry["subresource"] = manager.subresource
        entries.append(entry)
    return {**obj, "metadata": {**obj["metadata"], "managedFields": entries}}


def owners_after_update(
    before: Object | None, after: Object, schema: Schema, owners: Owners, manager: Manager
) -> Owners:
    """The owners after a create, update or patch: changed fields belong to the writer, removed ones to no manager."""
    old = fields_of(before, schema) if before is not None else {}
    new = fields_of(after, schema)
    changed = frozenset(path for path, value in new.items() if path not in old or old[path] != value)
    result: Owners = {}
    for other, owned in owners.items():
        kept = frozenset(path for path in owned if path in new)
        if other != manager:
            kept -= changed
        if kept:
            result[other] = kept
    if changed:
        result[manager] = result.get(manager, frozenset()) | changed
    return result


def apply(
    live: Object | None, applied: Object, schema: Schema, owners: Owners, manager: Manager, *, force: bool
) -> tuple[Object, Owners]:
    """The object and its owners after the apply. Raises `ApiError` 409 that names every conflict."""
    wanted = fields_of(applied, schema)
    if live is None:
        return applied, {manager: frozenset(wanted)}
    current = fields_of(live, schema)
    changed = {path for path, value in wanted.items() if path not in current or current[path] != value}
    conflicts = {
        other: disputed
        for other, owned in owners.items()
        if other.identity != manager.identity and (disputed := owned & changed)
    }
    if conflicts and not force:
        raise _conflict(conflicts)
    others = {other: owned - conflicts.get(other, frozenset()) for other, owned in owners.items() if other != manager}
    merged = merge(live, applied, schema)
    dropped = owners.get(manager, frozenset()) - wanted.keys()
    kept_by_others: set[Path] = set().union(*others.values()) if others else set()
    for path in sorted(dropped, key=len):  # an item before its fields, which are removed with it
        if not is_item_key(path) and not any(other[: len(path)] == path for other in kept_by_others):
            merged = remove(merged, path, schema)
    result = {other: owned for other, owned in others.items() if owned}
    result[manager] = frozenset(wanted)
    return merged, result


def merge(live: Any, applied: Any, schema: Schema) -> Any:
    """The live value merged with the applied one: maps by field, list-maps by key, other values replaced."""
    if isinstance(live, Mapping) and isinstance(applied, Mapping) and not is_atomic_map(schema):
        result = dict(live)
        for name, value in applied.items():
            below = field_schema(schema, name)
            result[name] = merge(live[name], value, below) if name in live else value
        return result
    if not (isinstance(live, list) and isinstance(applied, list)):
        return applied
    if is_set(schema):
        return live + [item for item in applied if item not in live]
    if keys := map_keys(schema):
        return _merge_list_map(live, applied, keys, item_schema(schema))
    return applied


def remove(value: Any, path: Path, schema: Schema) -> Any:
    """The value without the field or item at the path, and without parents that become empty."""
    step, rest = path[0], path[1:]
    if isinstance(value, Mapping) and step.startswith("f:") and step[2:] in value:
        name = step[2:]
        below = remove(value[name], rest, field_schema(schema, name)) if rest else None
        result = dict(value)
        if below in (None, {}, []):
            del result[name]
        else:
            result[name] = below
        return result
    if isinstance(value, list) and step.startswith("v:"):
        return [item for item in value if canonical(item) != step[2:]]
    if isinstance(value, list) and step.startswith("k:"):
        keys, below = map_keys(schema), item_schema(schema)
        matches = [item_key(item, keys, below) == step[2:] for item in value]
        if not rest:
            return [item for item, match in zip(value, matches, strict=True) if not match]
        return [remove(item, rest, below) if match else item for item, match in zip(value, matches, strict=True)]
    return value


def _merge_list_map(live: list[Any], applied: list[Any], keys: tuple[str, ...], schema: Schema) -> list[Any]:
    """Applied items in their order, each merged with its live item; other live items keep their position."""
    existing = {item_key(item, keys, schema): item for item in live}
    wanted = {item_key(item, keys, schema): item for item in applied}
    merged = {key: merge(existing[key], item, schema) if key in existing else item for key, item in wanted.items()}
    pending = list(wanted)
    result: list[Any] = []
    for key, item in existing.items():
        if key not in wanted:
            result.append(item)
            continue
        while key in pending:
            result.append(merged[pending.pop(0)])
    return result + [merged[key] for key in pending]


def _conflict(conflicts: Mapping[Manager, frozenset[Path] | set[Path]]) -> ApiError:
    causes, listed = [], []
    for manager, paths in sorted(conflicts.items(), key=lambda item: item[0].name):
        who = f'conflict with "{manager.name}"' + (
            f" using {manager.api_version}" if manager.operation != "Apply" else ""
        )
        shown = [dotted(path) for path in sorted(paths)]
        causes += [{"reason": "FieldManagerConflict", "message": who, "field": field} for field in shown]
        listed.append(f"{who}: {shown[0]}" if len(shown) == 1 else f"{who}:\n- " + "\n- ".join(shown))
    count = len(causes)
    noun = "conflict" if count == 1 else "conflicts"
    message = f"Apply failed with {count} {noun}: " + ", ".join(listed)
    return ApiError(409, "Conflict", message, {"causes": causes})
