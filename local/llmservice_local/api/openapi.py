"""OpenAPI v3 of the served kinds: what `kubectl apply` asks before it sends, and what `kubectl explain` shows."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from llmservice_local.api.errors import ApiError
from llmservice_local.api.kinds import Kind, Kinds
from llmservice_local.api.registry import Registry

Object = dict[str, Any]

_FIELD_VALIDATION = {
    "name": "fieldValidation",
    "in": "query",
    "description": "What to do with unknown or duplicate fields: Ignore, Warn or Strict.",
    "schema": {"type": "string", "uniqueItems": True},
}
_DRY_RUN = {"name": "dryRun", "in": "query", "schema": {"type": "string", "uniqueItems": True}}


def index(kinds: Kinds) -> Object:
    """The documents by group version; each URL carries a hash, so that clients may keep what they have."""
    paths: Object = {}
    for name, versions in kinds.group_versions().items():
        for version in versions:
            root = f"apis/{name}/{version}" if name else f"api/{version}"
            served = sorted(repr(kind) for kind in kinds if (kind.group, kind.version) == (name, version))
            digest = hashlib.sha256(json.dumps(served).encode()).hexdigest()[:32]
            paths[root] = {"serverRelativeURL": f"/openapi/v3/{root}?hash={digest.upper()}"}
    return {"paths": paths}


def document(registry: Registry, root: str) -> Object:
    """One group version's document; `root` is `api/v1` or `apis/GROUP/VERSION`."""
    paths: Object = {}
    schemas: Object = {}
    for kind in registry.kinds:
        if (f"apis/{kind.group}/{kind.version}" if kind.group else f"api/{kind.version}") != root:
            continue
        name = _schema_name(kind)
        schemas[name] = {**registry.strategy(kind).schema, "x-kubernetes-group-version-kind": [_gvk(kind)]}
        scope = "/namespaces/{namespace}" if kind.namespaced else ""
        paths[f"/{root}{scope}/{kind.plural}"] = _collection(kind, name)
        paths[f"/{root}{scope}/{kind.plural}/{{name}}"] = _item(kind, name)
    if not paths:
        raise ApiError(404, "NotFound", "the server could not find the requested resource")
    return {
        "openapi": "3.0.0",
        "info": {"title": "Kubernetes", "version": "v1.32.0"},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _gvk(kind: Kind) -> Object:
    return {"group": kind.group, "version": kind.version, "kind": kind.name}


def _schema_name(kind: Kind) -> str:
    group = kind.group or "core"
    return ".".join([*reversed(group.split(".")), kind.version, kind.name])


def _operation(kind: Kind, action: str, schema: str, *, body: str = "") -> Object:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    operation: Object = {
        "x-kubernetes-action": action,
        "x-kubernetes-group-version-kind": _gvk(kind),
        "parameters": [_DRY_RUN, _FIELD_VALIDATION],
        "responses": {"200": {"description": "OK", "content": content}},
    }
    if body:
        operation["requestBody"] = {"content": {body: {"schema": {"type": "object"}}}}
    return operation


def _collection(kind: Kind, schema: str) -> Object:
    return {
        "get": _operation(kind, "list", schema),
        "post": _operation(kind, "post", schema, body="application/json"),
    }


def _item(kind: Kind, schema: str) -> Object:
    return {
        "get": _operation(kind, "get", schema),
        "put": _operation(kind, "put", schema, body="application/json"),
        "patch": _operation(kind, "patch", schema, body="application/apply-patch+yaml"),
        "delete": _operation(kind, "delete", schema),
    }
