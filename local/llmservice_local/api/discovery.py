"""Discovery: which groups, versions and resources the API serves."""

from __future__ import annotations

from typing import Any

from llmservice_local.api.errors import ApiError
from llmservice_local.api.kinds import Kind, Kinds

Object = dict[str, Any]

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
