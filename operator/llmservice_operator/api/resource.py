"""The LLMService resource: its names in the API, and its parsed form."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from llmservice_operator.api.schema_model import SchemaModel
from llmservice_operator.api.spec import LLMServiceSpec
from llmservice_operator.api.status import LLMServiceStatus

GROUP = "serving.llmservice.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "LLMService"
PLURAL = "llmservices"
MANAGER = "llmservice-operator"
"""Field manager of every write, value of the managed-by label and reporter of events."""


class Metadata(SchemaModel):
    name: str
    namespace: str
    uid: str
    generation: int = 1


class LLMService(SchemaModel):
    """One LLMService as read from the API."""

    metadata: Metadata
    spec: LLMServiceSpec
    status: LLMServiceStatus = Field(default_factory=LLMServiceStatus)

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def namespace(self) -> str:
        return self.metadata.namespace

    @property
    def key(self) -> tuple[str, str]:
        return (self.namespace, self.name)

    @property
    def served_name(self) -> str:
        return self.spec.model.served_name or self.name

    def owner_reference(self) -> dict[str, Any]:
        """Makes a child owned by this service, so that the garbage collector deletes it with the service."""
        return {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": self.name,
            "uid": self.metadata.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }

    def reference(self) -> dict[str, Any]:
        """The object that an Event is about."""
        return {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": self.name,
            "namespace": self.namespace,
            "uid": self.metadata.uid,
        }
