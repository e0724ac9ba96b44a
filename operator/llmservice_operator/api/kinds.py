"""The kinds of objects that a service may own, and those that the operator watches, lists and caches."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

from llmservice_operator.api import labels
from llmservice_operator.api.resource import API_VERSION, KIND, MANAGER, PLURAL, LLMService
from llmservice_operator.api.spec import Manifest

MONITORING_API = "monitoring.coreos.com/v1"
INFERENCE_API = "inference.networking.k8s.io/v1"
"""Of the Gateway API Inference Extension."""

ChildKey = tuple[str, str, str]
"""Kind, namespace, name."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of object, and its place in the API."""

    api_version: str
    name: str
    plural: str
    built_in: bool = True
    """False: it needs a CRD, and may be missing."""

    @property
    def group(self) -> str:
        return self.api_version.rpartition("/")[0]

    @property
    def version(self) -> str:
        return self.api_version.rpartition("/")[2]

    def path(self, namespace: str | None = None, name: str | None = None) -> str:
        """The URL of the collection, in one namespace or the whole cluster, or of one object."""
        root = f"/apis/{self.api_version}" if self.group else f"/api/{self.api_version}"
        scope = f"{root}/namespaces/{quote(namespace)}" if namespace else root
        return f"{scope}/{self.plural}/{quote(name)}" if name else f"{scope}/{self.plural}"


CHILD_KINDS = {
    kind.name: kind
    for kind in (
        Kind("v1", "ServiceAccount", "serviceaccounts"),
        Kind("v1", "Service", "services"),
        Kind("v1", "ConfigMap", "configmaps"),
        Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies"),
        Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets"),
        Kind("apps/v1", "Deployment", "deployments"),
        Kind(MONITORING_API, "PodMonitor", "podmonitors", built_in=False),
        Kind(MONITORING_API, "PrometheusRule", "prometheusrules", built_in=False),
        Kind(INFERENCE_API, "InferencePool", "inferencepools", built_in=False),
    )
}
"""Every kind that a service may own; the operator's role grants exactly these."""


@dataclass(frozen=True, slots=True)
class Followed:
    """A kind that the operator watches, and the label selector of the objects that concern it."""

    kind: Kind
    selector: str = f"{labels.MANAGED_BY}={MANAGER}"

    def path(self, namespace: str | None) -> str:
        return self.kind.path(namespace)


LLMSERVICES = Kind(API_VERSION, KIND, PLURAL, built_in=False)
PODS = Kind("v1", "Pod", "pods")
EVENTS = Kind("v1", "Event", "events")

FOLLOWED = (
    Followed(LLMSERVICES, selector=""),
    Followed(PODS),
    *(Followed(kind) for kind in CHILD_KINDS.values()),
)


@dataclass(frozen=True, slots=True)
class Child:
    """An object that a service owns, as it should be."""

    manifest: Manifest
    wanted: bool = True
    """False: the spec has turned it off, and it is removed if it exists and is ours."""

    @property
    def key(self) -> ChildKey:
        metadata = self.manifest["metadata"]
        return (self.manifest["kind"], metadata["namespace"], metadata["name"])

    @property
    def kind(self) -> Kind:
        return CHILD_KINDS[self.manifest["kind"]]


def child_manifest(service: LLMService, kind: str, name: str | None = None) -> Manifest:
    """Name (the service's own by default), labels and owner of a child."""
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
