"""A pod's quality-of-service class, which the API server sets when the pod is created and never changes."""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]

_COUNTED = ("cpu", "memory")


def qos_class(spec: Object) -> str:
    """Guaranteed, Burstable or BestEffort, by the CPU and memory of all containers; GPUs don't count."""
    requested: list[Object] = []
    limited: list[Object] = []
    for container in [*spec.get("containers", ()), *(spec.get("initContainers") or ())]:
        resources = container.get("resources") or {}
        requested.append(
            {name: amount for name, amount in (resources.get("requests") or {}).items() if name in _COUNTED}
        )
        limited.append({name: amount for name, amount in (resources.get("limits") or {}).items() if name in _COUNTED})
    if not any(requested) and not any(limited):
        return "BestEffort"
    for requests, limits in zip(requested, limited, strict=True):
        if any(name not in limits or requests.get(name, limits[name]) != limits[name] for name in _COUNTED):
            return "Burstable"
    return "Guaranteed"
