"""The base of the pydantic models that the CRD is generated from."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class SchemaModel(BaseModel):
    """camelCase in YAML, snake_case in Python; unknown fields were pruned by the API server already."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore", frozen=True)


def rules(*pairs: tuple[str, str]) -> dict[str, Any]:
    """CEL rules (rule, message) as the schema extension that the API server evaluates on every write.

    A rule about `oldSelf`, an optional, is evaluated at creation too, where it has no value.
    """
    return {"x-kubernetes-validations": [_rule(rule, message) for rule, message in pairs]}


def _rule(rule: str, message: str) -> dict[str, Any]:
    optional = {"optionalOldSelf": True} if "oldSelf" in rule else {}
    return {"rule": rule, "message": message, **optional}


OPEN_OBJECT: dict[str, Any] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
"""Schema of what is passed to the pod unchanged: Kubernetes validates it there."""
