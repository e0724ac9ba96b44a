"""Parts of the objects of many kinds: conditions, owner references, timestamps and quantities."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from fractions import Fraction
from typing import Any

from llmservice_operator.api.units import amount

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


def requests_of(pod: Object) -> dict[str, Fraction]:
    """A pod's effective requests: the sum over its containers, or the largest init container if that is more."""
    total: dict[str, Fraction] = {"pods": Fraction(1)}
    for container in pod["spec"].get("containers") or []:
        for name, quantity in _requests(container).items():
            total[name] = total.get(name, Fraction(0)) + quantity
    for container in pod["spec"].get("initContainers") or []:
        for name, quantity in _requests(container).items():
            total[name] = max(total.get(name, Fraction(0)), quantity)
    return total


def _requests(container: Object) -> dict[str, Fraction]:
    resources = container.get("resources") or {}
    wanted = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {name: amount(quantity) for name, quantity in wanted.items()}


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
