"""Schemas of the built-in kinds, generated from the models of the Kubernetes client.

The merge keys, which these models lack, are those of https://kubernetes.io/docs/reference/kubernetes-api/.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

Schema = dict[str, Any]

_SCALARS: dict[str, Schema] = {
    "str": {"type": "string"},
    "int": {"type": "integer"},
    "float": {"type": "number"},
    "bool": {"type": "boolean"},
    "bytes": {"type": "string", "format": "byte"},
    "bytearray": {"type": "string", "format": "byte"},
    "datetime": {"type": "string", "format": "date-time"},
    "object": {"x-kubernetes-preserve-unknown-fields": True},
}

# (model, field) -> (keys of server-side apply, key of strategic merge patches)
_LIST_MAPS: dict[tuple[str, str], tuple[tuple[str, ...], str]] = {
    ("V1PodSpec", "containers"): (("name",), "name"),
    ("V1PodSpec", "initContainers"): (("name",), "name"),
    ("V1PodSpec", "ephemeralContainers"): (("name",), "name"),
    ("V1PodSpec", "volumes"): (("name",), "name"),
    ("V1PodSpec", "imagePullSecrets"): (("name",), "name"),
    ("V1PodSpec", "hostAliases"): (("ip",), "ip"),
    ("V1PodSpec", "schedulingGates"): (("name",), "name"),
    ("V1PodSpec", "resourceClaims"): (("name",), "name"),
    ("V1PodSpec", "topologySpreadConstraints"): (("topologyKey", "whenUnsatisfiable"), "topologyKey"),
    ("V1Container", "ports"): (("containerPort", "protocol"), "containerPort"),
    ("V1Container", "env"): (("name",), "name"),
    ("V1Container", "volumeMounts"): (("mountPath",), "mountPath"),
    ("V1Container", "volumeDevices"): (("devicePath",), "devicePath"),
    ("V1ServiceSpec", "ports"): (("port", "protocol"), "port"),
    ("V1NodeStatus", "addresses"): (("type",), "type"),
    ("V1ServiceAccount", "secrets"): (("name",), "name"),
    ("V1ObjectMeta", "ownerReferences"): (("uid",), "uid"),
    ("V1PodStatus", "podIPs"): (("ip",), "ip"),
    ("V1PodStatus", "hostIPs"): (("ip",), "ip"),
    ("V1ValidatingWebhookConfiguration", "webhooks"): (("name",), "name"),
    ("V1ValidatingWebhook", "matchConditions"): (("name",), "name"),
}
_REPEATED = {
    ("V1Container", "env"),
    ("V1Container", "ports"),
    ("V1PodSpec", "hostAliases"),
    ("V1PodSpec", "imagePullSecrets"),
}
"""The lists of `_LIST_MAPS` in which only a server-side apply has to name each key once."""
_SETS = {("V1ObjectMeta", "finalizers"), ("V1NodeSpec", "podCIDRs")}
_ATOMIC_MAPS = {
    "V1ConfigMapKeySelector",
    "V1LabelSelector",
    "V1LocalObjectReference",
    "V1NodeSelector",
    "V1ObjectFieldSelector",
    "V1ObjectReference",
    "V1OwnerReference",
    "V1ResourceFieldSelector",
    "V1SecretKeySelector",
    "V1TypedLocalObjectReference",
}
_ATOMIC_FIELDS = {("V1ServiceSpec", "selector"), ("V1PodSpec", "nodeSelector")}
_INT_OR_STRING = {"targetPort", "maxSurge", "maxUnavailable", "minAvailable", "port"}
_QUANTITY: Schema = {"x-kubernetes-int-or-string": True, "format": "quantity"}
_QUANTITIES = {"averageValue", "divisor", "sizeLimit"}
_QUANTITY_MAPS = {"limits", "requests", "capacity", "allocatable", "hard", "used"}
_OPAQUE = {"V1JSONSchemaProps", "V1ManagedFieldsEntry"}  # the first is recursive, the second is set by the server


@cache
def builtin_schema(model: str) -> Schema:
    """The structural schema of a model of the Kubernetes client, by class name (`V1Pod`), with its descriptions."""
    from kubernetes.client import models

    found = getattr(models, model, None)
    if found is None or model in _OPAQUE:
        return {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    by_name = {declared.serialization_alias or name: declared for name, declared in found.model_fields.items()}
    properties: dict[str, Schema] = {}
    required = []
    for attribute, name in found.attribute_map.items():
        declared = by_name[name]
        properties[name] = _field(model, name, found.openapi_types[attribute])
        if declared.description:
            properties[name] = {**properties[name], "description": declared.description}
        if declared.is_required():
            required.append(name)
    schema: Schema = {"type": "object", "properties": properties}
    if required:
        schema["required"] = required
    if model in _ATOMIC_MAPS:
        schema["x-kubernetes-map-type"] = "atomic"
    return schema


def _field(model: str, name: str, declared: str) -> Schema:
    if declared == "object" and name in _INT_OR_STRING:
        return {"x-kubernetes-int-or-string": True}
    if name in _QUANTITIES or (name == "value" and model.startswith("V2Metric")):
        return _QUANTITY
    schema = _typed(declared)
    if name in _QUANTITY_MAPS and declared == "Dict[str, str]":
        schema = {"type": "object", "additionalProperties": _QUANTITY}
    if (model, name) in _ATOMIC_FIELDS:
        schema = {**schema, "x-kubernetes-map-type": "atomic"}
    return {**schema, **_merge_rules(model, name, schema)}


def _merge_rules(model: str, name: str, schema: Schema) -> Schema:
    if schema.get("type") != "array":
        return {}
    keys = _LIST_MAPS.get((model, name))
    if keys is None and name == "conditions" and model.endswith("Status"):
        keys = (("type",), "type")
    if keys is not None:
        return {
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": list(keys[0]),
            "x-kubernetes-patch-merge-key": keys[1],
            "x-kubernetes-patch-strategy": "merge",
            **({"x-repeated": True} if (model, name) in _REPEATED else {}),
        }
    if (model, name) in _SETS:
        return {"x-kubernetes-list-type": "set", "x-kubernetes-patch-strategy": "merge"}
    return {"x-kubernetes-list-type": "atomic"}


def _typed(declared: str) -> Schema:
    if declared in _SCALARS:
        return _SCALARS[declared]
    if match := re.fullmatch(r"List\[(.+)\]", declared):
        return {"type": "array", "items": _typed(match[1])}
    if match := re.fullmatch(r"Dict\[str, (.+)\]", declared):
        return {"type": "object", "additionalProperties": _typed(match[1])}
    return builtin_schema(declared)
