"""The processing of an object before it is stored: identity, pruning, defaults, validation, generation, deletion."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from llmservice_local.errors import FieldError, bad_request, conflict, invalid
from llmservice_local.kinds.builtin_rules import default_builtin, validate_builtin
from llmservice_local.kinds.builtin_schema import builtin_schema
from llmservice_local.kinds.catalogue import Kind
from llmservice_local.kinds.cel import Rules
from llmservice_local.kinds.crd import validate_definition
from llmservice_local.kinds.schema import Schema, pruned, validate, with_defaults
from llmservice_local.objects import Object, has_ended

_SUBDOMAIN = re.compile(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$")
_RBAC_NAME = re.compile(r"^[^/%]+$")
_LABEL_KEY = re.compile(r"^([a-z0-9A-Z.-]{1,253}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$")
_LABEL_VALUE = re.compile(r"^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$")
_WITH_GENERATION = {"apps", "policy", "networking.k8s.io", "apiextensions.k8s.io", "admissionregistration.k8s.io"}
_SUBDOMAIN_RULE = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', "
    "and must start and end with an alphanumeric character"
)


class Strategy:
    """The rules of one kind, compiled once."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.schema: Schema = builtin_schema(kind.model) if kind.model else _with_metadata(kind.schema or {})
        self._rules = Rules(kind.schema) if kind.schema else None

    @property
    def has_generation(self) -> bool:
        return self.kind.custom or self.kind.group in _WITH_GENERATION

    def decode(self, obj: Object) -> tuple[Object, list[str]]:
        """The object, pruned and with its defaults, and the paths of unknown fields."""
        kept, unknown = pruned(obj, self.schema)
        if self.kind.custom:
            return with_defaults(kept, self.schema), unknown
        return default_builtin(self.kind.name, kept), unknown

    def read(self, obj: Object) -> Object:
        """A stored object, pruned and defaulted by the current schema, as when a real server reads from etcd."""
        return self.decode(obj)[0]

    def validate(self, obj: Object, old: Object | None) -> list[FieldError]:
        """Every error of the object. CEL rules run only on objects that the schema accepts, as on a real server."""
        errors = [*self._metadata_errors(obj), *validate(obj, self.schema)]
        if errors:
            return errors
        if self.kind.name == "CustomResourceDefinition":
            errors += validate_definition(obj)
        if self.kind.model:
            errors += validate_builtin(self.kind.name, obj, old)
        if self._rules is not None:
            errors += self._rules.check(obj, old)
        return errors

    def _metadata_errors(self, obj: Object) -> Iterator[FieldError]:
        metadata = obj["metadata"]
        name = metadata["name"]
        allowed = _RBAC_NAME if self.kind.group == "rbac.authorization.k8s.io" else _SUBDOMAIN
        if not allowed.match(name) or len(name) > 253:
            yield FieldError("metadata.name", "FieldValueInvalid", f'Invalid value: "{name}": {_SUBDOMAIN_RULE}')
        for key, value in (metadata.get("labels") or {}).items():
            if not _LABEL_KEY.match(key):
                why = f"Invalid value: \"{key}\": name part must consist of alphanumeric characters, '-', '_' or '.'"
                yield FieldError("metadata.labels", "FieldValueInvalid", why)
            if not isinstance(value, str) or not _LABEL_VALUE.match(value):
                why = (
                    f'Invalid value: "{value}": a valid label must be an empty string or consist of at most 63 '
                    "alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character"
                )
                yield FieldError("metadata.labels", "FieldValueInvalid", why)


def _with_metadata(custom: Schema) -> Schema:
    """A custom schema with apiVersion, kind and metadata, which a CRD does not contain."""
    properties = {
        "apiVersion": {"type": "string"},
        "kind": {"type": "string"},
        **(custom.get("properties") or {}),
        "metadata": builtin_schema("V1ObjectMeta"),
    }
    return {**custom, "properties": properties}


SERVER_FIELDS = ("uid", "creationTimestamp", "generation", "deletionTimestamp", "deletionGracePeriodSeconds")


def identified(kind: Kind, namespace: str, name: str, obj: Any) -> Object:
    """The object with the name and namespace of the URL; raises `ApiError` 400 if it has others."""
    if not isinstance(obj, dict):
        raise bad_request(f"a {kind.name} is an object, not {type(obj).__name__}")
    for what, expected in (("apiVersion", kind.api_version), ("kind", kind.name)):
        if obj.get(what, expected) != expected:
            raise bad_request(f"the {what} in the data ({obj[what]}) does not match the expected one ({expected})")
    if not isinstance(obj.get("metadata") or {}, dict):
        raise bad_request("metadata must be an object")
    metadata = dict(obj.get("metadata") or {})
    if name and metadata.setdefault("name", name) != name:
        raise bad_request(f"the name of the object ({metadata['name']}) does not match the name on the URL ({name})")
    if kind.namespaced:
        if (metadata.get("namespace") or namespace) != namespace:
            raise bad_request("the namespace of the provided object does not match the namespace sent on the request")
        metadata["namespace"] = namespace
    else:
        metadata.pop("namespace", None)
    return {**obj, "apiVersion": kind.api_version, "kind": kind.name, "metadata": metadata}


def refuse_unknown(kind: Kind, unknown: list[str], field_validation: str) -> list[str]:
    """Warnings about unknown fields; raises `ApiError` 400 with `fieldValidation: Strict`."""
    listed = [f'unknown field "{path}"' for path in unknown]
    if listed and field_validation == "Strict":
        message = (
            f'{kind.name} in version "{kind.version}" cannot be handled as a {kind.name}: '
            f"strict decoding error: {', '.join(listed)}"
        )
        raise bad_request(message)
    return listed if field_validation == "Warn" else []


def check_preconditions(kind: Kind, old: Object, uid: str | None, resource_version: str | None) -> None:
    """Raise a conflict if the precondition names another uid or an older resourceVersion."""
    metadata = old["metadata"]
    if resource_version and resource_version != metadata["resourceVersion"]:
        why = "the object has been modified; please apply your changes to the latest version and try again"
        raise conflict(kind.plural, kind.group, metadata["name"], why)
    if uid and uid != metadata["uid"]:
        why = f"Precondition failed: UID in precondition: {uid}, UID in object meta: {metadata['uid']}"
        raise conflict(kind.plural, kind.group, metadata["name"], why)


def carried_over(kind: Kind, old: Object, obj: Object, subresource: str, *, has_generation: bool) -> Object:
    """The new object with the server's fields of the old one, and without changes that this endpoint ignores."""
    if subresource == "status":
        obj = {**old, "status": obj.get("status")} if obj.get("status") is not None else without(old, "status")
    elif kind.has_status:
        obj = {**obj, "status": old["status"]} if "status" in old else without(obj, "status")
    metadata = {name: value for name, value in obj["metadata"].items() if name not in SERVER_FIELDS}
    metadata |= {name: old["metadata"][name] for name in SERVER_FIELDS if name in old["metadata"]}
    metadata["resourceVersion"] = old["metadata"]["resourceVersion"]
    metadata["managedFields"] = old["metadata"].get("managedFields") or []
    obj = {**obj, "metadata": metadata}
    if "deletionTimestamp" in metadata:
        added = set(metadata.get("finalizers") or []) - set(old["metadata"].get("finalizers") or [])
        if added:
            why = f"Forbidden: no new finalizers can be added if the object is being deleted, found {sorted(added)}"
            raise invalid(
                kind.name,
                kind.group,
                metadata["name"],
                [FieldError("metadata.finalizers", "FieldValueForbidden", why)],
            )
    if has_generation and _generation_fields(kind, obj) != _generation_fields(kind, old):
        metadata["generation"] = metadata.get("generation", 0) + 1
    return obj


def grace_s(kind: Kind, obj: Object, asked_s: int | None) -> int:
    """The grace period of a deletion: zero except for pods that run on a node."""
    if kind.name != "Pod":
        return 0
    if has_ended(obj) or not obj["spec"].get("nodeName"):
        return 0
    own_s: int = obj["spec"].get("terminationGracePeriodSeconds", 30)
    return own_s if asked_s is None else asked_s


def is_removable(kind: Kind, obj: Object) -> bool:
    """Whether an object that is marked as deleted can be removed: it has no finalizer and no grace period."""
    metadata = obj["metadata"]
    if metadata.get("finalizers") or metadata.get("deletionGracePeriodSeconds"):
        return False
    return not (kind.name == "Namespace" and obj["spec"].get("finalizers"))


def without(obj: Object, name: str) -> Object:
    return {key: value for key, value in obj.items() if key != name}


def _generation_fields(kind: Kind, obj: Object) -> Object:
    """The fields whose change increments the generation: all but metadata and a separate status."""
    outside = {"metadata", "status"} if kind.has_status else {"metadata"}
    return {name: value for name, value in obj.items() if name not in outside}


# Events exist in two APIs, core/v1 and events.k8s.io/v1, over the same objects.

_RENAMED = {
    "note": "message",
    "regarding": "involvedObject",
    "reportingController": "reportingComponent",
    "deprecatedSource": "source",
    "deprecatedFirstTimestamp": "firstTimestamp",
    "deprecatedLastTimestamp": "lastTimestamp",
    "deprecatedCount": "count",
}


def event_to_core(event: Mapping[str, Any]) -> Object:
    """An events.k8s.io/v1 Event as a core/v1 Event."""
    return {**{_RENAMED.get(name, name): value for name, value in event.items()}, "apiVersion": "v1"}


def event_from_core(event: Mapping[str, Any]) -> Object:
    """A core/v1 Event as an events.k8s.io/v1 Event."""
    back = {core: name for name, core in _RENAMED.items()}
    return {**{back.get(name, name): value for name, value in event.items()}, "apiVersion": "events.k8s.io/v1"}
