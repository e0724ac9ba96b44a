"""A child of a service: one object that it owns, wanted or not."""

from __future__ import annotations

from dataclasses import dataclass

from llmservice_operator.api import labels
from llmservice_operator.api.kinds import CHILD_KINDS, ChildKey, ChildKind
from llmservice_operator.api.resource import LLMService
from llmservice_operator.api.spec import Manifest


@dataclass(frozen=True, slots=True)
class Child:
    """An object as it should be."""

    manifest: Manifest
    wanted: bool = True
    """False: the spec has turned it off, and it is removed where it is there and ours."""

    @property
    def key(self) -> ChildKey:
        metadata = self.manifest["metadata"]
        return (self.manifest["kind"], metadata["namespace"], metadata["name"])

    @property
    def kind(self) -> ChildKind:
        return CHILD_KINDS[self.manifest["kind"]]


def child_manifest(service: LLMService, kind: str, name: str | None = None) -> Manifest:
    """The frame of a child, called as the service is unless it says otherwise: name, labels, owner."""
    return {
        "apiVersion": CHILD_KINDS[kind].api_version,
        "kind": kind,
        "metadata": {
            "name": name or service.name,
            "namespace": service.namespace,
            "labels": labels.child_labels(service.name),
            "ownerReferences": [service.owner_reference()],
        },
    }
