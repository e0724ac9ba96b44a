"""The kinds of objects that a service may own, and those that the operator follows: watches, lists and caches."""

from __future__ import annotations

from dataclasses import dataclass

from llmservice_operator.api import labels
from llmservice_operator.api.resource import API_VERSION, KIND, MANAGER, PLURAL

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
class Followed:
    """A kind, and the labels by which the API server selects what concerns the operator."""

    kind: ChildKind
    selector: str = f"{labels.MANAGED_BY}={MANAGER}"

    def path(self, namespace: str | None) -> str:
        """The collection's URL: of one namespace, or of the whole cluster."""
        api_version, plural = self.kind.api_version, self.kind.plural
        root = f"/apis/{api_version}" if self.kind.group else f"/api/{api_version}"
        return f"{root}/namespaces/{namespace}/{plural}" if namespace else f"{root}/{plural}"


FOLLOWED = (
    Followed(ChildKind(API_VERSION, KIND, PLURAL, built_in=False), selector=""),
    Followed(ChildKind("v1", "Pod", "pods")),
    *(Followed(kind) for kind in CHILD_KINDS.values()),
)
