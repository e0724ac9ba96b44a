"""Defaults, validation, QoS class and quotas of the built-in kinds that this project uses.

Defaults: https://kubernetes.io/docs/reference/kubernetes-api/ and k8s.io/kubernetes/pkg/apis/*/v1/defaults.go.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from llmservice_local.errors import FieldError
from llmservice_local.kinds.policy_rules import (
    check_bound,
    check_disruption_budget,
    check_network_policy,
    check_webhooks,
    default_network_policy,
    default_webhooks,
)
from llmservice_local.objects import Object, has_ended, requests_of
from llmservice_local.selector import matches_labels
from llmservice_operator.api.units import amount


def default_builtin(kind: str, obj: Object) -> Object:
    """The object with the defaults of its kind, if that has any."""
    fill = _DEFAULTS.get(kind)
    return fill(obj) if fill else obj


def validate_builtin(kind: str, obj: Object, old: Object | None) -> Iterator[FieldError]:
    """The violations of the rules of a built-in kind that its schema does not contain."""
    check = _CHECKS.get(kind)
    if check:
        yield from check(obj, old)


def _with_defaults(obj: Object | None, **defaults: Any) -> Object:
    """The object with these values for absent and empty fields; a nested dict has the defaults of a nested object."""
    result = dict(obj or {})
    for name, value in defaults.items():
        if isinstance(value, dict) and value:
            result[name] = _with_defaults(result.get(name), **value)
        elif result.get(name) in (None, ""):
            result[name] = value
    return result


def _deployment(obj: Object) -> Object:
    spec = _with_defaults(obj.get("spec"), replicas=1, revisionHistoryLimit=10, progressDeadlineSeconds=600)
    strategy = _with_defaults(spec.get("strategy"), type="RollingUpdate")
    if strategy["type"] == "RollingUpdate":
        strategy = _with_defaults(strategy, rollingUpdate={"maxSurge": "25%", "maxUnavailable": "25%"})
    return {**obj, "spec": {**spec, "strategy": strategy, "template": _template(spec.get("template") or {})}}


def _replica_set(obj: Object) -> Object:
    spec = _with_defaults(obj.get("spec"), replicas=1)
    return {**obj, "spec": {**spec, "template": _template(spec.get("template") or {})}}


def _template(template: Object) -> Object:
    return {**template, "spec": _pod_spec(template.get("spec") or {})}


def _pod(obj: Object) -> Object:
    spec = _pod_spec(obj.get("spec") or {})
    for field in ("containers", "initContainers"):
        if field in spec:
            spec[field] = [_with_requests(container) for container in spec[field]]
    obj = {**obj, "spec": spec}
    return obj if obj.get("status") else {**obj, "status": {"phase": "Pending", "qosClass": qos_class(spec)}}


def _pod_spec(spec: Object) -> Object:
    spec = _with_defaults(
        spec,
        restartPolicy="Always",
        dnsPolicy="ClusterFirst",
        terminationGracePeriodSeconds=30,
        schedulerName="default-scheduler",
        securityContext={},
        enableServiceLinks=True,
    )
    if name := spec.get("serviceAccountName"):
        spec["serviceAccount"] = name
    for field in ("containers", "initContainers"):
        if field in spec:
            spec[field] = [_container(container) for container in spec[field]]
    return spec


def _container(container: Object) -> Object:
    tag = (container.get("image") or "").rpartition("/")[2].partition(":")[2]
    container = _with_defaults(
        container,
        terminationMessagePath="/dev/termination-log",
        terminationMessagePolicy="File",
        imagePullPolicy="Always" if tag in {"", "latest"} else "IfNotPresent",
        resources={},
    )
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        if probe in container:
            container[probe] = _probe(container[probe])
    if "ports" in container:
        container["ports"] = [_with_defaults(port, protocol="TCP") for port in container["ports"]]
    return container


def _with_requests(container: Object) -> Object:
    """A container of a pod (not of a template) whose limits are the default of its requests."""
    resources = container["resources"]
    if limits := resources.get("limits"):
        return {**container, "resources": {**resources, "requests": {**limits, **(resources.get("requests") or {})}}}
    return container


def _probe(probe: Object) -> Object:
    probe = {name: value for name, value in probe.items() if value != 0}  # a zero has the default
    probe = _with_defaults(probe, timeoutSeconds=1, periodSeconds=10, successThreshold=1, failureThreshold=3)
    if "httpGet" in probe:
        probe["httpGet"] = _with_defaults(probe["httpGet"], path="/", scheme="HTTP")
    return probe


def _service(obj: Object) -> Object:
    spec = _with_defaults(obj.get("spec"), type="ClusterIP", sessionAffinity="None", internalTrafficPolicy="Cluster")
    if "ports" in spec:
        ports = [_with_defaults(port, protocol="TCP") for port in spec["ports"]]
        spec["ports"] = [_with_defaults(port, targetPort=port.get("port", 0)) for port in ports]
    return {**obj, "spec": spec}


def _secret(obj: Object) -> Object:
    obj = _with_defaults(obj, type="Opaque")
    plain = obj.get("stringData") or {}
    if all(isinstance(value, str) for value in plain.values()):  # the schema refuses others
        obj.pop("stringData", None)
        encoded = {key: base64.b64encode(value.encode()).decode() for key, value in plain.items()}
        if encoded:
            obj["data"] = {**(obj.get("data") or {}), **encoded}
    return obj


def _namespace(obj: Object) -> Object:
    obj = {**obj, "spec": _with_defaults(obj.get("spec"), finalizers=["kubernetes"])}
    name, labels = obj["metadata"].get("name"), obj["metadata"].get("labels") or {}
    if name and isinstance(labels, dict):
        obj["metadata"] = {**obj["metadata"], "labels": {**labels, "kubernetes.io/metadata.name": name}}
    return obj if obj.get("status") else {**obj, "status": {"phase": "Active"}}


def _check_workload(obj: Object, old: Object | None) -> Iterator[FieldError]:
    spec = obj["spec"]
    labels = (spec["template"].get("metadata") or {}).get("labels") or {}
    selector = spec.get("selector")
    if selector is None:
        yield FieldError("spec.selector", "FieldValueRequired", "Required value")
    elif not any(selector.values()):
        why = "Invalid value: {}: empty selector is invalid for deployment"
        yield FieldError("spec.selector", "FieldValueInvalid", why)
    elif not matches_labels(selector, labels):
        yield FieldError(
            "spec.template.metadata.labels",
            "FieldValueInvalid",
            "Invalid value: `selector` does not match template `labels`",
        )
    if old is not None and old["spec"].get("selector") != selector:
        yield FieldError("spec.selector", "FieldValueInvalid", "Invalid value: field is immutable")
    if spec["replicas"] < 0:
        why = f"Invalid value: {spec['replicas']}: must be greater than or equal to 0"
        yield FieldError("spec.replicas", "FieldValueInvalid", why)
    yield from _check_pod_spec(spec["template"]["spec"], "spec.template.spec")


def _check_deployment(obj: Object, old: Object | None) -> Iterator[FieldError]:
    yield from _check_workload(obj, old)
    strategy = obj["spec"]["strategy"]
    rolling, path = strategy.get("rollingUpdate") or {}, "spec.strategy.rollingUpdate"
    if strategy["type"] not in {"Recreate", "RollingUpdate"}:
        why = f'Unsupported value: "{strategy["type"]}": supported values: "Recreate", "RollingUpdate"'
        yield FieldError("spec.strategy", "FieldValueNotSupported", why)
    elif strategy["type"] == "Recreate" and rolling:
        why = "Forbidden: may not be specified when strategy `type` is 'Recreate'"
        yield FieldError(path, "FieldValueForbidden", why)
    yield from check_bound(rolling.get("maxSurge"), f"{path}.maxSurge", most=None)
    yield from check_bound(rolling.get("maxUnavailable"), f"{path}.maxUnavailable")
    if rolling.get("maxSurge") in _NONE and rolling.get("maxUnavailable") in _NONE:
        why = "Invalid value: 0: may not be 0 when `maxSurge` is 0"
        yield FieldError(f"{path}.maxUnavailable", "FieldValueInvalid", why)


def _check_pod(obj: Object, old: Object | None) -> Iterator[FieldError]:
    if old is None:
        yield from _check_pod_spec(obj["spec"], "spec")
    elif not old["spec"].get("schedulingGates") and _fixed(obj["spec"]) != _fixed(old["spec"]):
        why = "Forbidden: pod updates may not change fields other than"
        yield FieldError("spec", "FieldValueForbidden", f"{why} {', '.join(f'`spec.{name}`' for name in _CHANGEABLE)}")


def _fixed(spec: Object) -> Any:
    """The part of a pod's spec that never changes."""
    kept = {name: value for name, value in spec.items() if name not in _CHANGEABLE}
    for field in ("containers", "initContainers"):
        kept[field] = [{**container, "image": ""} for container in spec.get(field) or []]
    return _canonical(kept)


def _canonical(value: Any, name: str = "") -> Any:
    """The value without empty fields and with quantities as numbers: clients in Go write both in their own form."""
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    if not isinstance(value, dict):
        return value
    if name in {"limits", "requests"}:
        return {resource: amount(quantity) for resource, quantity in value.items()}
    found = {field: _canonical(item, field) for field, item in value.items()}
    return {field: item for field, item in found.items() if item not in (None, "", False, [], {})}


def _check_pod_spec(spec: Object, path: str) -> Iterator[FieldError]:
    if not spec.get("containers"):
        yield FieldError(f"{path}.containers", "FieldValueRequired", "Required value")
    if spec["restartPolicy"] not in {"Always", "OnFailure", "Never"}:
        why = f'Unsupported value: "{spec["restartPolicy"]}": supported values: "Always", "OnFailure", "Never"'
        yield FieldError(f"{path}.restartPolicy", "FieldValueNotSupported", why)
    volumes = {volume["name"] for volume in spec.get("volumes") or []}
    names: set[str] = set()
    for field in ("initContainers", "containers"):
        for index, container in enumerate(spec.get(field) or []):
            at, name = f"{path}.{field}[{index}]", container.get("name", "")
            if not container.get("image"):
                yield FieldError(f"{at}.image", "FieldValueRequired", "Required value")
            if name in names:
                yield FieldError(f"{at}.name", "FieldValueDuplicate", f'Duplicate value: "{name}"')
            elif not _LABEL.fullmatch(name):
                yield FieldError(f"{at}.name", "FieldValueInvalid", f'Invalid value: "{name}": {_LABEL_RULE}')
            names.add(name)
            yield from _check_container(container, volumes, at)


def _check_container(container: Object, volumes: set[str], path: str) -> Iterator[FieldError]:
    for index, mount in enumerate(container.get("volumeMounts") or []):
        if mount["name"] not in volumes:
            why = f'Not found: "{mount["name"]}"'
            yield FieldError(f"{path}.volumeMounts[{index}].name", "FieldValueNotFound", why)
    for index, variable in enumerate(container.get("env") or []):
        if not _ENV_NAME.fullmatch(variable["name"]):
            why = (
                f'Invalid value: "{variable["name"]}": a valid environment variable name must consist only of '
                "printable ASCII characters other than '='"
            )
            yield FieldError(f"{path}.env[{index}].name", "FieldValueInvalid", why)
    resources = container.get("resources") or {}
    limits = resources.get("limits") or {}
    for name, value in (resources.get("requests") or {}).items():
        if name in limits and amount(value) > amount(limits[name]):
            why = f'Invalid value: "{value}": must be less than or equal to {name} limit of {limits[name]}'
            yield FieldError(f"{path}.resources.requests", "FieldValueInvalid", why)
    for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
        probe = container.get(kind)
        if probe is not None and not _HANDLERS & probe.keys():
            yield FieldError(f"{path}.{kind}", "FieldValueRequired", "Required value: must specify a handler type")
        elif probe is not None and "exec" in probe and not probe["exec"].get("command"):
            yield FieldError(f"{path}.{kind}.exec.command", "FieldValueRequired", "Required value")


def _check_service(obj: Object, old: Object | None) -> Iterator[FieldError]:
    del old
    name = obj["metadata"]["name"]
    if not _LABEL.fullmatch(name):
        yield FieldError("metadata.name", "FieldValueInvalid", f'Invalid value: "{name}": {_LABEL_RULE}')
    if (
        not obj["spec"].get("ports")
        and obj["spec"].get("type") != "ExternalName"
        and obj["spec"].get("clusterIP") != "None"
    ):
        yield FieldError("spec.ports", "FieldValueRequired", "Required value")


def _check_data(obj: Object, old: Object | None) -> Iterator[FieldError]:
    """Check the keys of a ConfigMap or Secret, which become names of files."""
    del old
    for key in obj.get("data") or {}:
        if not _KEY.fullmatch(key):
            why = "a valid config key must consist of alphanumeric characters, '-', '_' or '.'"
            yield FieldError(f"data[{key}]", "FieldValueInvalid", f'Invalid value: "{key}": {why}')


def _check_claim(obj: Object, old: Object | None) -> Iterator[FieldError]:
    del old
    spec = obj.get("spec") or {}
    if not spec.get("accessModes"):
        why = "Required value: at least 1 access mode is required"
        yield FieldError("spec.accessModes", "FieldValueRequired", why)
    if "storage" not in ((spec.get("resources") or {}).get("requests") or {}):
        yield FieldError("spec.resources[storage]", "FieldValueRequired", "Required value")


_NONE = (0, "0%")
_CHANGEABLE = (
    "containers[*].image", "initContainers[*].image", "activeDeadlineSeconds", "tolerations",
    "terminationGracePeriodSeconds",
)  # fmt: skip
_HANDLERS = {"exec", "httpGet", "tcpSocket", "grpc"}
_ENV_NAME = re.compile(r"[ -<>-~]+")
_KEY = re.compile(r"(?!\.\.|\.\Z)[-._a-zA-Z0-9]{1,253}")
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_LABEL_RULE = (
    "a lowercase RFC 1123 label must consist of at most 63 lower case alphanumeric characters or '-', and must start "
    "and end with an alphanumeric character"
)
_DEFAULTS: dict[str, Callable[[Object], Object]] = {
    "Deployment": _deployment,
    "ReplicaSet": _replica_set,
    "Pod": _pod,
    "Service": _service,
    "Namespace": _namespace,
    "NetworkPolicy": default_network_policy,
    "PodDisruptionBudget": lambda obj: {**obj, "spec": obj.get("spec") or {}},
    "Secret": _secret,
    "ValidatingWebhookConfiguration": default_webhooks,
}
_CHECKS: dict[str, Callable[[Object, Object | None], Iterator[FieldError]]] = {
    "ConfigMap": _check_data,
    "Deployment": _check_deployment,
    "NetworkPolicy": check_network_policy,
    "PersistentVolumeClaim": _check_claim,
    "PodDisruptionBudget": check_disruption_budget,
    "ReplicaSet": _check_workload,
    "Pod": _check_pod,
    "Secret": _check_data,
    "Service": _check_service,
    "ValidatingWebhookConfiguration": check_webhooks,
}


_COUNTED = ("cpu", "memory")


def qos_class(spec: Object) -> str:
    """A pod's QoS class (Guaranteed, Burstable or BestEffort), by the CPU and memory of all containers."""
    requested: list[Object] = []
    limited: list[Object] = []
    for container in [*spec.get("containers", ()), *(spec.get("initContainers") or ())]:
        resources = container.get("resources") or {}
        requested.append(
            {name: amount for name, amount in (resources.get("requests") or {}).items() if name in _COUNTED}
        )
        limited.append({name: amount for name, amount in (resources.get("limits") or {}).items() if name in _COUNTED})
    if not any(requested) and not any(limited):
        return "BestEffort"
    for requests, limits in zip(requested, limited, strict=True):
        if any(name not in limits or requests.get(name, limits[name]) != limits[name] for name in _COUNTED):
            return "Burstable"
    return "Guaranteed"


def exceeded_quota(pod: Object, pods: Iterable[Object], quotas: Iterable[Object]) -> str | None:
    """The message of the first ResourceQuota that `pod` would exceed, or None.

    A quota counts the pods that have not ended and their requests (`pods`, `requests.cpu` …):
    https://kubernetes.io/docs/concepts/policy/resource-quotas/
    """
    counted = [other for other in pods if not has_ended(other)]
    for quota in quotas:
        for resource, hard in ((quota.get("spec") or {}).get("hard") or {}).items():
            what = resource.removeprefix("requests.").removeprefix("count/")
            requested = float(requests_of(pod).get(what, 0))
            used = float(sum(requests_of(other).get(what, 0) for other in counted))
            if requested and used + requested > amount(str(hard)):
                name = quota["metadata"]["name"]
                figures = f"requested: {resource}={requested:g}, used: {resource}={used:g}, limited: {resource}={hard}"
                return f"exceeded quota: {name}, {figures}"
    return None
