"""The rules that hold for objects of every kind: who they are, what an update may change, when they may go."""

from __future__ import annotations

from typing import Any

from llmservice_local.api.errors import FieldError, bad_request, conflict, invalid
from llmservice_local.api.kinds import Kind

Object = dict[str, Any]

SERVER_FIELDS = ("uid", "creationTimestamp", "generation", "deletionTimestamp", "deletionGracePeriodSeconds")


def identified(kind: Kind, namespace: str, name: str, obj: Any) -> Object:
    """The object with the name and namespace of its URL; raises where it names others."""
    if not isinstance(obj, dict):
        raise bad_request(f"a {kind.name} is an object, not {type(obj).__name__}")
    for what, expected in (("apiVersion", kind.api_version), ("kind", kind.name)):
        if obj.get(what, expected) != expected:
            raise bad_request(f"the {what} in the data ({obj[what]}) does not match the expected one ({expected})")
    if not isinstance(obj.get("metadata") or {}, dict):
        raise bad_request("metadata must be an object")
    metadata = dict(obj.get("metadata") or {})
    if name and metadata.setdefault("name", name) != name:
        raise bad_request(f"the name of the object ({metadata['name']}) does not match the name on the URL ({name})")
    if kind.namespaced:
        if (metadata.get("namespace") or namespace) != namespace:
            raise bad_request("the namespace of the provided object does not match the namespace sent on the request")
        metadata["namespace"] = namespace
    else:
        metadata.pop("namespace", None)
    return {**obj, "apiVersion": kind.api_version, "kind": kind.name, "metadata": metadata}


def refuse_unknown(kind: Kind, unknown: list[str], field_validation: str) -> list[str]:
    """Warnings about the fields that the schema doesn't know; with Strict they are an error instead."""
    listed = [f'unknown field "{path}"' for path in unknown]
    if listed and field_validation == "Strict":
        message = (
            f'{kind.name} in version "{kind.version}" cannot be handled as a {kind.name}: '
            f"strict decoding error: {', '.join(listed)}"
        )
        raise bad_request(message)
    return listed if field_validation == "Warn" else []


def check_preconditions(kind: Kind, old: Object, uid: str | None, resource_version: str | None) -> None:
    """Raise a conflict where the writer means another object, or an older state of this one."""
    metadata = old["metadata"]
    if resource_version and resource_version != metadata["resourceVersion"]:
        why = "the object has been modified; please apply your changes to the latest version and try again"
        raise conflict(kind.plural, kind.group, metadata["name"], why)
    if uid and uid != metadata["uid"]:
        why = f"Precondition failed: UID in precondition: {uid}, UID in object meta: {metadata['uid']}"
        raise conflict(kind.plural, kind.group, metadata["name"], why)


def carried_over(kind: Kind, old: Object, obj: Object, subresource: str, *, has_generation: bool) -> Object:
    """The new object with what only the server sets, and without what this endpoint may not change."""
    if subresource == "status":
        obj = {**old, "status": obj.get("status")} if obj.get("status") is not None else without(old, "status")
    elif kind.has_status:
        obj = {**obj, "status": old["status"]} if "status" in old else without(obj, "status")
    metadata = {name: value for name, value in obj["metadata"].items() if name not in SERVER_FIELDS}
    metadata |= {name: old["metadata"][name] for name in SERVER_FIELDS if name in old["metadata"]}
    metadata["resourceVersion"] = old["metadata"]["resourceVersion"]
    metadata["managedFields"] = old["metadata"].get("managedFields") or []
    obj = {**obj, "metadata": metadata}
    if "deletionTimestamp" in metadata:
        added = set(metadata.get("finalizers") or []) - set(old["metadata"].get("finalizers") or [])
        if added:
            why = f"Forbidden: no new finalizers can be added if the object is being deleted, found {sorted(added)}"
            raise invalid(
                kind.name,
                kind.group,
                metadata["name"],
                [FieldError("metadata.finalizers", "FieldValueForbidden", why)],
            )
    if has_generation and _substance(kind, obj) != _substance(kind, old):
        metadata["generation"] = metadata.get("generation", 0) + 1
    return obj


def grace_s(kind: Kind, obj: Object, asked_s: int | None) -> int:
    """How long an object may take to go: only pods take any time, and only those that are on a node and running."""
    if kind.name != "Pod":
        return 0
    finished = (obj.get("status") or {}).get("phase") in {"Succeeded", "Failed"}
    if finished or not obj["spec"].get("nodeName"):
        return 0
    own_s: int = obj["spec"].get("terminationGracePeriodSeconds", 30)
    return own_s if asked_s is None else asked_s


def may_go(kind: Kind, obj: Object) -> bool:
    """Whether nothing keeps an object that is to be deleted: no finalizer, no grace."""
    metadata = obj["metadata"]
    if metadata.get("finalizers") or metadata.get("deletionGracePeriodSeconds"):
        return False
    return not (kind.name == "Namespace" and obj["spec"].get("finalizers"))


def without(obj: Object, name: str) -> Object:
    return {key: value for key, value in obj.items() if key != name}


def _substance(kind: Kind, obj: Object) -> Object:
    """What a new generation means: the object without its metadata, and without its status where that is apart."""
    outside = {"metadata", "status"} if kind.has_status else {"metadata"}
    return {name: value for name, value in obj.items() if name not in outside}
