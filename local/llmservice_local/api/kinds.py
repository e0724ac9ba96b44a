"""The kinds of resource that the emulated API serves, the built-in ones and those that CRDs add."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from llmservice_local.api.errors import ApiError

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ScalePaths:
    """Where a kind keeps what its `/scale` shows; paths are dotted, without the leading dot."""

    spec_replicas: str = "spec.replicas"
    status_replicas: str = "status.replicas"
    selector: str | None = "spec.selector"


@dataclass(frozen=True, slots=True)
class Column:
    """One printer column: a name, a type (`string`, `integer`, `date` …) and the JSONPath of its value."""

    name: str
    type: str
    path: str
    description: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Kind:
    """One served group-version-kind and how it behaves."""

    group: str
    version: str
    name: str
    plural: str
    namespaced: bool = True
    short_names: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    has_status: bool = False
    scale: ScalePaths | None = None
    schema: Object | None = None
    columns: tuple[Column, ...] = ()
    model: str = ""
    """For built-in kinds the class of the Kubernetes client whose fields are the schema."""

    @property
    def singular(self) -> str:
        return self.name.lower()

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def custom(self) -> bool:
        return not self.model

    @property
    def collection(self) -> tuple[str, str]:
        """What names the collection in the store: versions of one kind, and both Event APIs, share their objects."""
        if self.plural == "events":
            return "", "events"
        return self.group, self.plural


def _core(name: str, plural: str, *short_names: str, namespaced: bool = True, has_status: bool = False) -> Kind:
    return Kind("", "v1", name, plural, namespaced, short_names, has_status=has_status, model=f"V1{name}")


_RBAC = "rbac.authorization.k8s.io"
_ADMISSION = "admissionregistration.k8s.io"

BUILT_IN: tuple[Kind, ...] = (
    _core("Namespace", "namespaces", "ns", namespaced=False, has_status=True),
    _core("Node", "nodes", "no", namespaced=False, has_status=True),
    Kind("", "v1", "Pod", "pods", True, ("po",), ("all",), has_status=True, model="V1Pod"),
    Kind("", "v1", "Service", "services", True, ("svc",), ("all",), has_status=True, model="V1Service"),
    _core("ServiceAccount", "serviceaccounts", "sa"),
    _core("ConfigMap", "configmaps", "cm"),
    _core("Secret", "secrets"),
    _core("Endpoints", "endpoints", "ep"),
    _core("ResourceQuota", "resourcequotas", "quota", has_status=True),
    _core("PersistentVolumeClaim", "persistentvolumeclaims", "pvc", has_status=True),
    Kind("", "v1", "Event", "events", True, ("ev",), model="CoreV1Event"),
    Kind("events.k8s.io", "v1", "Event", "events", True, ("ev",), model="EventsV1Event"),
    Kind(
        "apps", "v1", "Deployment", "deployments", True, ("deploy",), ("all",),
        has_status=True, scale=ScalePaths(), model="V1Deployment",
    ),
    Kind(
        "apps", "v1", "ReplicaSet", "replicasets", True, ("rs",), ("all",),
        has_status=True, scale=ScalePaths(), model="V1ReplicaSet",
    ),
    Kind("coordination.k8s.io", "v1", "Lease", "leases", model="V1Lease"),
    Kind("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets", True, ("pdb",), has_status=True,
         model="V1PodDisruptionBudget"),
    Kind("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies", True, ("netpol",), model="V1NetworkPolicy"),
    Kind("autoscaling", "v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers", True, ("hpa",), ("all",),
         has_status=True, model="V2HorizontalPodAutoscaler"),
    Kind("discovery.k8s.io", "v1", "EndpointSlice", "endpointslices", model="V1EndpointSlice"),
    Kind(_RBAC, "v1", "ClusterRole", "clusterroles", namespaced=False, model="V1ClusterRole"),
    Kind(_RBAC, "v1", "ClusterRoleBinding", "clusterrolebindings", namespaced=False, model="V1ClusterRoleBinding"),
    Kind(_RBAC, "v1", "Role", "roles", model="V1Role"),
    Kind(_RBAC, "v1", "RoleBinding", "rolebindings", model="V1RoleBinding"),
    Kind("scheduling.k8s.io", "v1", "PriorityClass", "priorityclasses", False, ("pc",), model="V1PriorityClass"),
    Kind(_ADMISSION, "v1", "ValidatingWebhookConfiguration", "validatingwebhookconfigurations", False,
         model="V1ValidatingWebhookConfiguration"),
    Kind(_ADMISSION, "v1", "ValidatingAdmissionPolicy", "validatingadmissionpolicies", False,
         model="V1ValidatingAdmissionPolicy"),
    Kind(_ADMISSION, "v1", "ValidatingAdmissionPolicyBinding", "validatingadmissionpolicybindings", False,
         model="V1ValidatingAdmissionPolicyBinding"),
    Kind("apiextensions.k8s.io", "v1", "CustomResourceDefinition", "customresourcedefinitions", False,
         ("crd", "crds"), has_status=True, model="V1CustomResourceDefinition"),
)  # fmt: skip


class Kinds:
    """The catalogue: finds a kind by its place in the URL; CRDs add to it and take from it while it runs."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, str, str], Kind] = {}
        for kind in BUILT_IN:
            self.add(kind)

    def __iter__(self) -> Iterator[Kind]:
        return iter(tuple(self._kinds.values()))

    def add(self, kind: Kind) -> None:
        self._kinds[kind.group, kind.version, kind.plural] = kind

    def remove(self, group: str, plural: str) -> None:
        for key in [key for key in self._kinds if (key[0], key[2]) == (group, plural)]:
            del self._kinds[key]

    def find(self, group: str, version: str, plural: str) -> Kind:
        kind = self._kinds.get((group, version, plural))
        if kind is None:
            raise ApiError(404, "NotFound", "the server could not find the requested resource")
        return kind

    def by_kind(self, api_version: str, name: str) -> Kind | None:
        """The kind that an owner reference or a manifest means, or None where it is not served."""
        return next((kind for kind in self if kind.api_version == api_version and kind.name == name), None)

    def group_versions(self) -> dict[str, list[str]]:
        """Every group with its versions; the core group is the empty string."""
        groups: dict[str, list[str]] = {}
        for kind in self:
            versions = groups.setdefault(kind.group, [])
            if kind.version not in versions:
                versions.append(kind.version)
        return groups
