"""Conditions in a status: set one, keeping the transition time unless it really flips."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Object = dict[str, Any]


def with_condition(status: Mapping[str, Any], condition: Mapping[str, Any], now: str) -> Object:
    """The status with this condition in place of the one of its type; `now` is an RFC 3339 time."""
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
    """The condition of this type of an object's status, or an empty dict."""
    conditions = (obj.get("status") or {}).get("conditions") or []
    return next((condition for condition in conditions if condition["type"] == kind), {})
