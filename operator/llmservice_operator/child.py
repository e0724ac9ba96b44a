"""A child of a service: one object that it owns, wanted or not, and the kinds that such objects have."""

from __future__ import annotations

from dataclasses import dataclass

from llmservice_operator import labels
from llmservice_operator.resource import LLMService
from llmservice_operator.spec import Manifest

MONITORING_API = "monitoring.coreos.com/v1"

ChildKey = tuple[str, str, str]
"""Kind, namespace, name."""


@dataclass(frozen=True, slots=True)
class ChildKind:
    """What the operator needs to know of a kind in order to reach and watch its objects."""

    api_version: str
    name: str
    plural: str
    built_in: bool = True
    """False: it comes with somebody's CRD, and may be missing."""

    @property
    def group(self) -> str:
        return self.api_version.rpartition("/")[0]

    @property
    def version(self) -> str:
        return self.api_version.rpartition("/")[2]


CHILD_KINDS = {
    kind.name: kind
    for kind in (
        ChildKind("v1", "ServiceAccount", "serviceaccounts"),
        ChildKind("v1", "Service", "services"),
        ChildKind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies"),
        ChildKind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets"),
        ChildKind("apps/v1", "Deployment", "deployments"),
        ChildKind(MONITORING_API, "PodMonitor", "podmonitors", built_in=False),
        ChildKind(MONITORING_API, "PrometheusRule", "prometheusrules", built_in=False),
    )
}
"""Every kind that a service may own; the operator's role grants exactly these."""


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
