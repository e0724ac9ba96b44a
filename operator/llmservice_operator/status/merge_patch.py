"""The difference of two objects as a JSON merge patch (RFC 7386)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def merge_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """What turns `before` into `after`: empty where they are equal, null where a key goes away."""
    patch: dict[str, Any] = {key: None for key in before if key not in after}
    for key, value in after.items():
        if key in before and before[key] == value:
            continue
        if isinstance(value, Mapping) and isinstance(before.get(key), Mapping):
            patch[key] = merge_patch(before[key], value)
        else:
            patch[key] = value
    return patch
