"""Events exist in two APIs, core/v1 and events.k8s.io/v1, over the same objects: the conversion between the two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Object = dict[str, Any]

_RENAMED = {
    "note": "message",
    "regarding": "involvedObject",
    "reportingController": "reportingComponent",
    "deprecatedSource": "source",
    "deprecatedFirstTimestamp": "firstTimestamp",
    "deprecatedLastTimestamp": "lastTimestamp",
    "deprecatedCount": "count",
}


def to_core(event: Mapping[str, Any]) -> Object:
    """An events.k8s.io/v1 event as core/v1 has it."""
    return {**{_RENAMED.get(name, name): value for name, value in event.items()}, "apiVersion": "v1"}


def from_core(event: Mapping[str, Any]) -> Object:
    """A core/v1 event as events.k8s.io/v1 has it."""
    back = {core: name for name, core in _RENAMED.items()}
    return {**{back.get(name, name): value for name, value in event.items()}, "apiVersion": "events.k8s.io/v1"}
