"""The kinds that the emulated API serves, built-in and of CRDs, and their `/scale` subresource."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from llmservice_local.errors import ApiError, bad_request
from llmservice_local.objects import Object
from llmservice_local.selector import selector_string


@dataclass(frozen=True, slots=True)
class ScalePaths:
    """The fields of a kind that its `/scale` subresource maps to; dotted paths without the leading dot."""

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
    """One served group-version-kind."""

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
    """The model of the Kubernetes client that is the schema of a built-in kind."""

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
        """The key of the collection in the store; the versions of a kind, and both Event APIs, share one."""
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
    Kind("networking.k8s.io", "v1", "Ingress", "ingresses", True, ("ing",), has_status=True, model="V1Ingress"),
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
    """The served kinds by group, version and plural; creating or deleting a CRD changes them."""

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

    def group_versions(self) -> dict[str, list[str]]:
        """Every group with its versions; the core group is the empty string."""
        groups: dict[str, list[str]] = {}
        for kind in self:
            versions = groups.setdefault(kind.group, [])
            if kind.version not in versions:
                versions.append(kind.version)
        return groups


def scale_of(kind: Kind, obj: Mapping[str, Any]) -> Object:
    """The autoscaling/v1 Scale of an object: desired and actual replicas, and the pod selector as a string."""
    paths = _paths(kind)
    metadata = obj["metadata"]
    status: Object = {"replicas": _at(obj, paths.status_replicas) or 0}
    selector = _at(obj, paths.selector) if paths.selector else None
    if selector:
        status["selector"] = selector if isinstance(selector, str) else selector_string(selector)
    replicas = _at(obj, paths.spec_replicas) or 0
    kept = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": {name: metadata[name] for name in kept if name in metadata},
        "spec": {"replicas": replicas} if replicas else {},  # a zero is omitted, as upstream
        "status": status,
    }


def read_scale(kind: Kind, obj: Mapping[str, Any]) -> Object:
    """The Scale of a GET. Raises `ApiError` 500 for a custom resource without replicas in its spec, as upstream."""
    path = _paths(kind).spec_replicas
    if kind.custom and _at(obj, path) is None:
        why = f'Internal error occurred: the spec replicas field ".{path}" does not exist'
        raise ApiError(500, "InternalError", why)
    return scale_of(kind, obj)


def scaled(kind: Kind, obj: Object, scale: Mapping[str, Any]) -> Object:
    """The object with the replicas of the Scale."""
    replicas = (scale.get("spec") or {}).get("replicas", 0)
    if not isinstance(replicas, int) or isinstance(replicas, bool) or replicas < 0:
        raise bad_request(f"spec.replicas: Invalid value: {replicas!r}: must be an integer greater than or equal to 0")
    wanted = (scale.get("metadata") or {}).get("resourceVersion")
    result = _with(obj, _paths(kind).spec_replicas.split("."), replicas)
    metadata = {**obj["metadata"], "resourceVersion": wanted or obj["metadata"]["resourceVersion"]}
    return {**result, "metadata": metadata}


def _paths(kind: Kind) -> ScalePaths:
    if kind.scale is None:
        raise ApiError(404, "NotFound", "the server could not find the requested resource")
    return kind.scale


def _at(obj: Any, path: str) -> Any:
    for step in path.split("."):
        obj = obj.get(step) if isinstance(obj, Mapping) else None
    return obj


def _with(obj: Any, path: list[str], value: Any) -> Any:
    if not path:
        return value
    below = obj.get(path[0]) if isinstance(obj, Mapping) else None
    return {**(obj or {}), path[0]: _with(below or {}, path[1:], value)}
