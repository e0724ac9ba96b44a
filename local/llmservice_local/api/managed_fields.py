"""`metadata.managedFields`: reading it, writing it, and keeping it true when somebody writes without apply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from llmservice_local.api import structure
from llmservice_local.api.field_set import Path, fields_of, from_fields_v1, to_fields_v1

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Manager:
    """Who writes: a name, `Apply` or `Update`, in which version, and through which subresource."""

    name: str
    operation: str
    api_version: str
    subresource: str = ""

    @property
    def identity(self) -> tuple[str, str, str]:
        """Versions aside: an apply through v1beta1 goes on with what the same manager applied through v1alpha1."""
        return self.name, self.operation, self.subresource


Owners = dict[Manager, frozenset[Path]]


def read(obj: Mapping[str, Any]) -> Owners:
    owners: Owners = {}
    for entry in obj["metadata"].get("managedFields") or []:
        manager = Manager(
            entry.get("manager", ""), entry["operation"], entry["apiVersion"], entry.get("subresource", "")
        )
        owners[manager] = frozenset(from_fields_v1(entry.get("fieldsV1") or {}))
    return owners


def write(obj: Object, owners: Owners, now: str) -> Object:
    """The object with these owners; an entry whose fields are what they were keeps its time."""
    before = {
        (entry.get("manager"), entry["operation"], entry["apiVersion"], entry.get("subresource", "")): entry
        for entry in obj["metadata"].get("managedFields") or []
    }
    order = list(before)
    entries = []

    def position(manager: Manager) -> int:
        key = (manager.name, manager.operation, manager.api_version, manager.subresource)
        return order.index(key) if key in order else len(order)

    for manager, paths in sorted(owners.items(), key=lambda item: position(item[0])):
        fields = to_fields_v1(paths)
        known = before.get((manager.name, manager.operation, manager.api_version, manager.subresource))
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


def after_update(
    before: Object | None, after: Object, schema: structure.Schema, owners: Owners, manager: Manager
) -> Owners:
    """Who owns what after a create, an update or a patch: what changed is the writer's, what is gone is nobody's."""
    manager = replace(manager, operation="Update")
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
