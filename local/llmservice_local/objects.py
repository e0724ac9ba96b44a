"""Parts of the objects of many kinds: conditions, owner references, timestamps and quantities."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

Object = dict[str, Any]


def with_condition(status: Mapping[str, Any], condition: Mapping[str, Any], now: str) -> Object:
    """The status with this condition; lastTransitionTime changes (to `now`) only with its status."""
    conditions = list(status.get("conditions") or [])
    at = next((i for i, known in enumerate(conditions) if known["type"] == condition["type"]), None)
    if at is None:
        conditions.append({**condition, "lastTransitionTime": now})
    else:
        flipped = conditions[at].get("status") != condition["status"]
        since = now if flipped else conditions[at].get("lastTransitionTime", now)
        conditions[at] = {**condition, "lastTransitionTime": since}
    return {**status, "conditions": conditions}


def condition_of(obj: Mapping[str, Any], kind: str) -> Object:
    """The condition of type `kind` of an object, or an empty dict."""
    conditions = (obj.get("status") or {}).get("conditions") or []
    return next((condition for condition in conditions if condition["type"] == kind), {})


def is_ready(obj: Mapping[str, Any]) -> bool:
    return bool(condition_of(obj, "Ready").get("status") == "True")


def has_ended(pod: Mapping[str, Any]) -> bool:
    return (pod.get("status") or {}).get("phase") in {"Succeeded", "Failed"}


def controller_of(obj: Object) -> Object | None:
    """The owner reference that controls an object."""
    references = obj["metadata"].get("ownerReferences") or []
    return next((reference for reference in references if reference.get("controller")), None)


def owned_by(obj: Object, owner: Object) -> bool:
    reference = controller_of(obj)
    return reference is not None and reference["uid"] == owner["metadata"]["uid"]


def controller_reference(owner: Object) -> Object:
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def timestamp(moment: datetime | None = None) -> str:
    return (moment or datetime.now(UTC)).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds_since(stamp: str, now: datetime) -> float:
    return (now - datetime.fromisoformat(stamp)).total_seconds()
