"""Server-side apply: merging an applied configuration into a live object, by who owns which field.

Follows https://kubernetes.io/docs/reference/using-api/server-side-apply/: fields that the manager applied before and
leaves out now are removed unless somebody else owns them too; a field that another manager owns with a different value
is a conflict, or with force changes hands.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmservice_local.api import structure
from llmservice_local.api.errors import ApiError
from llmservice_local.api.field_set import Path, dotted, fields_of, is_item_key
from llmservice_local.api.managed_fields import Manager, Owners

Object = dict[str, Any]


def apply(
    live: Object | None, applied: Object, schema: structure.Schema, owners: Owners, manager: Manager, *, force: bool
) -> tuple[Object, Owners]:
    """The object after the apply, and who owns what then. Raises `ApiError` 409 naming every conflict."""
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
    for path in sorted(dropped, key=len):  # an item of a list before its fields: they go with it
        if not is_item_key(path) and not any(other[: len(path)] == path for other in kept_by_others):
            merged = remove(merged, path, schema)
    result = {other: owned for other, owned in others.items() if owned}
    result[manager] = frozenset(wanted)
    return merged, result


def merge(live: Any, applied: Any, schema: structure.Schema) -> Any:
    """The live value with the applied one laid over it: maps by field, list-maps by key, the rest whole."""
    if isinstance(live, Mapping) and isinstance(applied, Mapping) and not structure.is_atomic_map(schema):
        result = dict(live)
        for name, value in applied.items():
            below = structure.field(schema, name)
            result[name] = merge(live[name], value, below) if name in live else value
        return result
    if not (isinstance(live, list) and isinstance(applied, list)):
        return applied
    if structure.is_set(schema):
        return live + [item for item in applied if item not in live]
    if keys := structure.map_keys(schema):
        return _merge_list_map(live, applied, keys, structure.items(schema))
    return applied


def remove(value: Any, path: Path, schema: structure.Schema) -> Any:
    """The value without what stands at the path; parents that this empties go too, as nobody owns them."""
    step, rest = path[0], path[1:]
    if isinstance(value, Mapping) and step.startswith("f:") and step[2:] in value:
        name = step[2:]
        below = remove(value[name], rest, structure.field(schema, name)) if rest else None
        result = dict(value)
        if below in (None, {}, []):
            del result[name]
        else:
            result[name] = below
        return result
    if isinstance(value, list) and step.startswith("v:"):
        return [item for item in value if structure.canonical(item) != step[2:]]
    if isinstance(value, list) and step.startswith("k:"):
        keys, below = structure.map_keys(schema), structure.items(schema)
        matches = [structure.item_key(item, keys, below) == step[2:] for item in value]
        if not rest:
            return [item for item, match in zip(value, matches, strict=True) if not match]
        return [remove(item, rest, below) if match else item for item, match in zip(value, matches, strict=True)]
    return value


def _merge_list_map(live: list[Any], applied: list[Any], keys: tuple[str, ...], schema: structure.Schema) -> list[Any]:
    """Applied items in their order, each merged with its live self; live items not applied keep their place."""
    existing = {structure.item_key(item, keys, schema): item for item in live}
    wanted = {structure.item_key(item, keys, schema): item for item in applied}
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
