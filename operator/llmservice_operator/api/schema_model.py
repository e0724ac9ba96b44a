"""The base of the pydantic models that the CRD is generated from."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class SchemaModel(BaseModel):
    """camelCase in YAML, snake_case in Python; unknown fields were pruned by the API server already."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore", frozen=True)


def rules(*pairs: tuple[str, str]) -> dict[str, Any]:
    """CEL rules (rule, message) as the schema extension that the API server evaluates on every write."""
    return {"x-kubernetes-validations": [{"rule": rule, "message": message} for rule, message in pairs]}


OPEN_OBJECT: dict[str, Any] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
"""Schema of what is passed to the pod unchanged: Kubernetes validates it there."""
