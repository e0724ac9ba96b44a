"""What happens to an object on its way into the store: defaults, pruning, validation, generation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from llmservice_local.api import schema, structure
from llmservice_local.api.builtin_schema import builtin_schema
from llmservice_local.api.cel import Rules
from llmservice_local.api.crd import validate_definition
from llmservice_local.api.defaults import default_builtin, validate_builtin
from llmservice_local.api.errors import FieldError
from llmservice_local.api.kinds import Kind

Object = dict[str, Any]

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
        self.schema: structure.Schema = builtin_schema(kind.model) if kind.model else _with_metadata(kind.schema or {})
        self._rules = Rules(kind.schema) if kind.schema else None

    @property
    def has_generation(self) -> bool:
        return self.kind.custom or self.kind.group in _WITH_GENERATION

    def decode(self, obj: Object) -> tuple[Object, list[str]]:
        """The object pruned and with its defaults, and the paths of the fields that the schema doesn't know."""
        kept, unknown = schema.pruned(obj, self.schema)
        if self.kind.custom:
            return schema.with_defaults(kept, self.schema), unknown
        return default_builtin(self.kind.name, kept), unknown

    def read(self, obj: Object) -> Object:
        """A stored object by the schema of now, as the real server reads from etcd: pruned and with new defaults."""
        return self.decode(obj)[0]

    def validate(self, obj: Object, old: Object | None) -> list[FieldError]:
        """Every reason to refuse the object. CEL rules run only on what the schema accepts, as on a real server."""
        errors = [*self._metadata_errors(obj), *schema.validate(obj, self.schema)]
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


def _with_metadata(custom: structure.Schema) -> structure.Schema:
    """A custom schema with the API machinery's own fields: a CRD never spells out `metadata`."""
    properties = {
        "apiVersion": {"type": "string"},
        "kind": {"type": "string"},
        **(custom.get("properties") or {}),
        "metadata": builtin_schema("V1ObjectMeta"),
    }
    return {**custom, "properties": properties}
