"""CustomResourceDefinitions: validation, status, and the kinds that they define."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from llmservice_local.errors import FieldError
from llmservice_local.kinds.catalogue import Column, Kind, ScalePaths
from llmservice_local.kinds.cel import Rules
from llmservice_local.objects import Object

CLEANUP_FINALIZER = "customresourcecleanup.apiextensions.k8s.io"
APPROVAL = "api-approved.kubernetes.io"
"""The annotation that definitions of Kubernetes' own API groups need."""
_PROTECTED_GROUP = re.compile(r"(.*\.)?(k8s|kubernetes)\.io")
_APPROVED = re.compile(r"unapproved|[a-z][a-z0-9+.-]*://[^/]")
_AGE = Column("Age", "date", ".metadata.creationTimestamp")


def kinds_of(definition: Mapping[str, Any]) -> list[Kind]:
    """One kind per served version."""
    spec = definition["spec"]
    names = spec["names"]
    return [
        Kind(
            group=spec["group"],
            version=version["name"],
            name=names["kind"],
            plural=names["plural"],
            namespaced=spec["scope"] == "Namespaced",
            short_names=tuple(names.get("shortNames") or ()),
            categories=tuple(names.get("categories") or ()),
            has_status="status" in (version.get("subresources") or {}),
            scale=_scale((version.get("subresources") or {}).get("scale")),
            schema=(version.get("schema") or {}).get("openAPIV3Schema"),
            columns=tuple(_columns(version)),
        )
        for version in spec["versions"]
        if version.get("served", True)
    ]


def validate_definition(definition: Mapping[str, Any]) -> Iterator[FieldError]:
    """The errors of a definition: its name, its group's approval, its schema, rules that do not compile."""
    spec = definition.get("spec") or {}
    names = spec.get("names") or {}
    expected = f"{names.get('plural')}.{spec.get('group')}"
    if definition["metadata"]["name"] != expected:
        shown = f'Invalid value: "{definition["metadata"]["name"]}": must be spec.names.plural+"."+spec.group'
        yield FieldError("metadata.name", "FieldValueInvalid", shown)
    if _PROTECTED_GROUP.fullmatch(str(spec.get("group"))):
        yield from _approval(definition["metadata"].get("annotations") or {})
    if sum(bool(version.get("storage")) for version in spec.get("versions") or []) != 1:
        why = "Invalid value: must have exactly one version marked as storage version"
        yield FieldError("spec.versions", "FieldValueInvalid", why)
    for index, version in enumerate(spec.get("versions") or []):
        path = f"spec.versions[{index}].schema.openAPIV3Schema"
        schema = (version.get("schema") or {}).get("openAPIV3Schema")
        if schema is None:
            yield FieldError(path, "FieldValueRequired", "Required value: schemas are required")
            continue
        yield from _structural(schema, path, root=True)
        try:
            Rules(schema)
        except ValueError as error:
            yield FieldError(path, "FieldValueInvalid", f"Invalid value: compilation failed: {error}")


def _approval(annotations: Mapping[str, str]) -> Iterator[FieldError]:
    """What a definition in a group of the Kubernetes community lacks: a link to its review, or "unapproved"."""
    value = annotations.get(APPROVAL)
    path = f"metadata.annotations[{APPROVAL}]"
    rule = f'protected groups must have approval annotation "{APPROVAL}"'
    if not value:
        yield FieldError(path, "FieldValueRequired", f"Required value: {rule}")
    elif not _APPROVED.match(value):
        why = f'Invalid value: "{value}": {rule} with either a URL or a reason starting with "unapproved"'
        yield FieldError(path, "FieldValueInvalid", why)


def established(definition: Object, now: str) -> Object:
    """The definition with the status Established."""
    spec = definition["spec"]
    names = spec["names"]
    accepted = {"singular": names["kind"].lower(), "listKind": names["kind"] + "List", **names}
    reasons = {
        "NamesAccepted": ("NoConflicts", "no conflicts found"),
        "Established": ("InitialNamesAccepted", "the initial names have been accepted"),
    }
    known = {condition["type"]: condition for condition in (definition.get("status") or {}).get("conditions") or []}
    conditions = [
        known.get(name)
        or {"type": name, "status": "True", "reason": reason, "message": message, "lastTransitionTime": now}
        for name, (reason, message) in reasons.items()
    ]
    stored = [version["name"] for version in spec["versions"] if version.get("storage")]
    finalizers = definition["metadata"].get("finalizers") or []
    if CLEANUP_FINALIZER not in finalizers and "deletionTimestamp" not in definition["metadata"]:
        finalizers = [*finalizers, CLEANUP_FINALIZER]
    return {
        **definition,
        "metadata": {**definition["metadata"], "finalizers": finalizers},
        "spec": {**spec, "names": accepted, "conversion": spec.get("conversion") or {"strategy": "None"}},
        "status": {"acceptedNames": accepted, "conditions": conditions, "storedVersions": stored},
    }


def _scale(scale: Mapping[str, str] | None) -> ScalePaths | None:
    if scale is None:
        return None
    selector = scale.get("labelSelectorPath")
    return ScalePaths(
        spec_replicas=scale["specReplicasPath"].lstrip("."),
        status_replicas=scale["statusReplicasPath"].lstrip("."),
        selector=selector.lstrip(".") if selector else None,
    )


def _columns(version: Mapping[str, Any]) -> Iterator[Column]:
    yield Column("Name", "string", ".metadata.name")
    declared = version.get("additionalPrinterColumns")
    if not declared:
        yield _AGE
    for column in declared or []:
        yield Column(
            column["name"], column["type"], column["jsonPath"], column.get("description", ""), column.get("priority", 0)
        )


def _structural(schema: Mapping[str, Any], path: str, *, root: bool = False) -> Iterator[FieldError]:
    """The violations of the rules of structural schemas that generated CRDs are most likely to break."""
    if root and schema.get("type") != "object":
        yield FieldError(f"{path}.type", "FieldValueInvalid", 'Invalid value: must be "object" at the root')
    if "$ref" in schema:
        yield FieldError(f"{path}.$ref", "FieldValueForbidden", "Forbidden: $ref is not supported")
    open_ended = schema.get("x-kubernetes-preserve-unknown-fields") or schema.get("x-kubernetes-int-or-string")
    if not root and not schema.get("type") and not open_ended:
        yield FieldError(
            f"{path}.type", "FieldValueRequired", "Required value: must not be empty for specified object fields"
        )
    if schema.get("properties") and "additionalProperties" in schema:
        why = "Forbidden: additionalProperties and properties are mutually exclusive"
        yield FieldError(f"{path}.additionalProperties", "FieldValueForbidden", why)
    if schema.get("type") == "array" and "items" not in schema:
        yield FieldError(f"{path}.items", "FieldValueRequired", "Required value: must be specified")
    for bound in ("exclusiveMinimum", "exclusiveMaximum"):
        if bound in schema and not isinstance(schema[bound], bool):
            yield FieldError(f"{path}.{bound}", "FieldValueTypeInvalid", "Invalid value: must be a boolean")
    for name, child in (schema.get("properties") or {}).items():
        if not (root and name in {"apiVersion", "kind", "metadata"}):
            yield from _structural(child, f"{path}.properties[{name}]")
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), Mapping):
            yield from _structural(schema[name], f"{path}.{name}")
