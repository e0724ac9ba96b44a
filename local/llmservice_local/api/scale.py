"""The `/scale` subresource: an autoscaling/v1 Scale seen in, and written back to, an object's own fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmservice_local.api.errors import ApiError, bad_request
from llmservice_local.api.kinds import Kind, ScalePaths
from llmservice_local.api.selector import selector_string

Object = dict[str, Any]


def scale_of(kind: Kind, obj: Mapping[str, Any]) -> Object:
    """The object's Scale: wanted and actual replicas, and the pods' selector as a string."""
    paths = _paths(kind)
    metadata = obj["metadata"]
    status: Object = {"replicas": _at(obj, paths.status_replicas) or 0}
    selector = _at(obj, paths.selector) if paths.selector else None
    if selector:
        status["selector"] = selector if isinstance(selector, str) else selector_string(selector)
    replicas = _at(obj, paths.spec_replicas) or 0
    kept = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": {name: metadata[name] for name in kept if name in metadata},
        "spec": {"replicas": replicas} if replicas else {},  # a zero is left out, as upstream
        "status": status,
    }


def read_scale(kind: Kind, obj: Mapping[str, Any]) -> Object:
    """The Scale of a GET. Raises `ApiError` 500 where a custom resource has no replicas in its spec, as upstream."""
    path = _paths(kind).spec_replicas
    if kind.custom and _at(obj, path) is None:
        why = f'Internal error occurred: the spec replicas field ".{path}" does not exist'
        raise ApiError(500, "InternalError", why)
    return scale_of(kind, obj)


def scaled(kind: Kind, obj: Object, scale: Mapping[str, Any]) -> Object:
    """The object with the replicas that the Scale asks for."""
    replicas = (scale.get("spec") or {}).get("replicas", 0)
    if not isinstance(replicas, int) or isinstance(replicas, bool) or replicas < 0:
        raise bad_request(f"spec.replicas: Invalid value: {replicas!r}: must be an integer greater than or equal to 0")
    wanted = (scale.get("metadata") or {}).get("resourceVersion")
    result = _with(obj, _paths(kind).spec_replicas.split("."), replicas)
    metadata = {**obj["metadata"], "resourceVersion": wanted or obj["metadata"]["resourceVersion"]}
    return {**result, "metadata": metadata}


def _paths(kind: Kind) -> ScalePaths:
    if kind.scale is None:
        raise ApiError(404, "NotFound", "the server could not find the requested resource")
    return kind.scale


def _at(obj: Any, path: str) -> Any:
    for step in path.split("."):
        obj = obj.get(step) if isinstance(obj, Mapping) else None
    return obj


def _with(obj: Any, path: list[str], value: Any) -> Any:
    if not path:
        return value
    below = obj.get(path[0]) if isinstance(obj, Mapping) else None
    return {**(obj or {}), path[0]: _with(below or {}, path[1:], value)}
