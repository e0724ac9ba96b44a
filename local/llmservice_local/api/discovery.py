"""Discovery (served groups, versions and resources) and the OpenAPI v3 documents that kubectl reads."""

from __future__ import annotations

import hashlib
import json

from llmservice_local.api.registry import Registry
from llmservice_local.errors import ApiError
from llmservice_local.kinds.catalogue import Kind, Kinds
from llmservice_local.objects import Object

VERSION = {
    "major": "1",
    "minor": "32",
    "gitVersion": "v1.32.0+llmservice-local",
    "gitCommit": "",
    "gitTreeState": "clean",
    "buildDate": "1970-01-01T00:00:00Z",
    "goVersion": "none",
    "compiler": "none",
    "platform": "linux/amd64",
}
_VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]


def core_versions(address: str) -> Object:
    return {
        "kind": "APIVersions",
        "versions": ["v1"],
        "serverAddressByClientCIDRs": [{"clientCIDR": "0.0.0.0/0", "serverAddress": address}],
    }


def groups(kinds: Kinds) -> Object:
    listed = [group(kinds, name) for name in kinds.group_versions() if name]
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed}


def group(kinds: Kinds, name: str) -> Object:
    versions = kinds.group_versions().get(name)
    if not name or versions is None:
        raise ApiError(404, "NotFound", "the server could not find the requested resource")
    listed = [{"groupVersion": f"{name}/{version}", "version": version} for version in versions]
    return {"kind": "APIGroup", "apiVersion": "v1", "name": name, "versions": listed, "preferredVersion": listed[0]}


def resources(kinds: Kinds, group_name: str, version: str) -> Object:
    listed: list[Object] = []
    for kind in kinds:
        if (kind.group, kind.version) == (group_name, version):
            listed += _resources_of(kind)
    if not listed:
        raise ApiError(404, "NotFound", "the server could not find the requested resource")
    group_version = f"{group_name}/{version}" if group_name else version
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version, "resources": listed}


def _resources_of(kind: Kind) -> list[Object]:
    resource: Object = {
        "name": kind.plural,
        "singularName": kind.singular,
        "namespaced": kind.namespaced,
        "kind": kind.name,
        "verbs": _VERBS,
    }
    if kind.short_names:
        resource["shortNames"] = list(kind.short_names)
    if kind.categories:
        resource["categories"] = list(kind.categories)
    found = [resource]
    common = {"singularName": "", "namespaced": kind.namespaced}
    if kind.has_status:
        verbs = ["get", "patch", "update"]
        found.append({**common, "name": f"{kind.plural}/status", "kind": kind.name, "verbs": verbs})
    if kind.scale is not None:
        found.append(
            {
                **common,
                "name": f"{kind.plural}/scale",
                "kind": "Scale",
                "group": "autoscaling",
                "version": "v1",
                "verbs": ["get", "patch", "update"],
            }
        )
    if kind.name == "Pod":
        found.append({**common, "name": "pods/log", "kind": "Pod", "verbs": ["get"]})
        found.append({**common, "name": "pods/binding", "kind": "Binding", "verbs": ["create"]})
        eviction = {"group": "policy", "version": "v1", "kind": "Eviction"}
        found.append({**common, **eviction, "name": "pods/eviction", "verbs": ["create"]})
    if kind.name == "Namespace":
        found.append({**common, "name": "namespaces/finalize", "kind": "Namespace", "verbs": ["update"]})
    return found


_FIELD_VALIDATION = {
    "name": "fieldValidation",
    "in": "query",
    "description": "What to do with unknown or duplicate fields: Ignore, Warn or Strict.",
    "schema": {"type": "string", "uniqueItems": True},
}
_DRY_RUN = {"name": "dryRun", "in": "query", "schema": {"type": "string", "uniqueItems": True}}


def openapi_index(kinds: Kinds) -> Object:
    """The URLs of the documents by group version; each contains a hash of the served kinds, for clients that cache."""
    paths: Object = {}
    for name, versions in kinds.group_versions().items():
        for version in versions:
            root = f"apis/{name}/{version}" if name else f"api/{version}"
            served = sorted(repr(kind) for kind in kinds if (kind.group, kind.version) == (name, version))
            digest = hashlib.sha256(json.dumps(served).encode()).hexdigest()[:32]
            paths[root] = {"serverRelativeURL": f"/openapi/v3/{root}?hash={digest.upper()}"}
    return {"paths": paths}


def openapi_document(registry: Registry, root: str) -> Object:
    """The document of a group version; `root` is `api/v1` or `apis/GROUP/VERSION`. Raises `ApiError` 404."""
    paths: Object = {}
    schemas: Object = {}
    for kind in registry.kinds:
        if (f"apis/{kind.group}/{kind.version}" if kind.group else f"api/{kind.version}") != root:
            continue
        name = _schema_name(kind)
        schemas[name] = {**registry.strategy(kind).schema, "x-kubernetes-group-version-kind": [_gvk(kind)]}
        scope = "/namespaces/{namespace}" if kind.namespaced else ""
        paths[f"/{root}{scope}/{kind.plural}"] = _collection_path(kind, name)
        paths[f"/{root}{scope}/{kind.plural}/{{name}}"] = _item_path(kind, name)
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


def _collection_path(kind: Kind, schema: str) -> Object:
    return {
        "get": _operation(kind, "list", schema),
        "post": _operation(kind, "post", schema, body="application/json"),
    }


def _item_path(kind: Kind, schema: str) -> Object:
    return {
        "get": _operation(kind, "get", schema),
        "put": _operation(kind, "put", schema, body="application/json"),
        "patch": _operation(kind, "patch", schema, body="application/apply-patch+yaml"),
        "delete": _operation(kind, "delete", schema),
    }
