"""The CustomResourceDefinition, generated from the pydantic models.

Structural schemas are a subset of JSON Schema: no references, no `anyOf` with null, no `const`, no titles
(https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/).
"""

from __future__ import annotations

from typing import Any

import yaml
from pydantic import BaseModel

from llmservice_operator.api.resource import GROUP, KIND, PLURAL, VERSION
from llmservice_operator.api.schema_model import rules
from llmservice_operator.api.spec import LLMServiceSpec
from llmservice_operator.api.status import LLMServiceStatus

Schema = dict[str, Any]

FILE_NAME = f"{PLURAL}.{GROUP}.yaml"
HEADER = "# Generated from operator/llmservice_operator/api/{spec,status}.py by `make crds`; edit those instead.\n"

_NAME_RULES = rules(
    ("size(self.metadata.name) <= 52", "name must have at most 52 characters: pods and services are called after it"),
    (
        "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
        "name must be a DNS label that starts with a letter (a-z, 0-9, -): the Service is called after it",
    ),
)
_COLUMNS = [
    {"name": "Model", "type": "string", "jsonPath": ".spec.model.uri"},
    {"name": "Ready", "type": "string", "jsonPath": '.status.conditions[?(@.type=="Ready")].status'},
    {"name": "Replicas", "type": "integer", "jsonPath": ".status.replicas"},
    {"name": "Desired", "type": "integer", "jsonPath": ".status.autoscaling.desiredReplicas"},
    {"name": "MaxSeqs", "type": "integer", "jsonPath": ".status.sizing.maxNumSeqs"},
    {"name": "TTFT-p99", "type": "number", "jsonPath": ".status.autoscaling.ttftP99Seconds"},
    {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
    {"name": "Reason", "type": "string", "jsonPath": '.status.conditions[?(@.type=="Ready")].reason', "priority": 1},
]


def crd() -> dict[str, Any]:
    """The CRD as plain data, ready for `kubectl apply`."""
    root: Schema = {
        "type": "object",
        "description": "A model served by pods that the operator sizes and scales.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": f"{GROUP}/{VERSION}."},
            "kind": {"type": "string", "description": f"{KIND}."},
            "metadata": {"type": "object"},
            "spec": structural_schema(LLMServiceSpec)
            | {"description": "What is served, how, and with which latency target."},
            "status": structural_schema(LLMServiceStatus),
        },
    } | _NAME_RULES
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["llm", "llms"],
                "categories": ["all"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": root},
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.replicas",
                            "statusReplicasPath": ".status.replicas",
                            "labelSelectorPath": ".status.selector",
                        },
                    },
                    "additionalPrinterColumns": _COLUMNS,
                }
            ],
        },
    }


def crd_yaml() -> str:
    """The committed file's text."""
    return HEADER + yaml.safe_dump(crd(), sort_keys=False, width=110, allow_unicode=True)


def structural_schema(model: type[BaseModel]) -> Schema:
    """The model's schema as the API server takes it, references inlined."""
    schema = model.model_json_schema(by_alias=True, mode="validation")
    return _structural(schema, schema.get("$defs", {}))


def _structural(schema: Schema, definitions: dict[str, Schema]) -> Schema:
    if "$ref" in schema:
        target = definitions[schema["$ref"].rsplit("/", 1)[-1]]
        overrides = {key: value for key, value in schema.items() if key != "$ref"}
        return _structural({**target, **overrides}, definitions)
    if "anyOf" in schema:
        (alternative,) = (one for one in schema["anyOf"] if one.get("type") != "null")
        rest = {key: value for key, value in schema.items() if key != "anyOf"}
        return _structural({**alternative, **rest}, definitions)
    kept = {key: value for key, value in schema.items() if key not in {"$defs", "title", "default"}}
    if "default" in schema and schema["default"] is not None:
        kept["default"] = schema["default"]
    if "properties" in kept:
        kept["properties"] = {name: _field(value, definitions) for name, value in kept["properties"].items()}
    if "items" in kept:
        kept["items"] = _structural(kept["items"], definitions)
    if "patternProperties" in kept:
        raise TypeError(f"a structural schema has no patternProperties: {schema}")
    if isinstance(kept.get("additionalProperties"), dict):
        kept["additionalProperties"] = _structural(kept["additionalProperties"], definitions)
    for bound, limit in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if bound in kept:
            kept[limit] = kept.pop(bound)
            kept[bound] = True
    kept.pop("propertyNames", None)
    return kept


def _field(schema: Schema, definitions: dict[str, Schema]) -> Schema:
    """A property: an object without required fields defaults to the defaults of its fields.

    They are spelled out: the API server evaluates the CEL rules on the default as it is written, before it fills in
    others. An object that is passed to the pod unchanged has no default.
    """
    field = _structural(schema, definitions)
    optional_object = "anyOf" not in schema and field.get("type") == "object" and field.get("properties")
    is_open = field.get("x-kubernetes-preserve-unknown-fields")
    if optional_object and not is_open and not field.get("required"):
        parts = field["properties"].items()
        field["default"] = {name: part["default"] for name, part in parts if "default" in part}
    return field
