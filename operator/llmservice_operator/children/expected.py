"""Everything that a service should own, as plain data."""

from __future__ import annotations

import json

from llmservice_operator.api import labels
from llmservice_operator.api.kinds import Child, child_manifest
from llmservice_operator.api.resource import LLMService
from llmservice_operator.api.spec import EndpointPicker, Manifest
from llmservice_operator.children.deployment import HTTP, METRICS, PORT, expected_deployment
from llmservice_operator.children.gateway_keys import expected_gateway_keys
from llmservice_operator.children.network_policy import DEFAULT_PEERS, PlatformPeers, expected_network_policy
from llmservice_operator.children.volumes import ADAPTER_LIST_KEY, adapter_list_name
from llmservice_operator.monitoring.alerts import service_groups
from llmservice_operator.sizing import Sized


def expected_children(
    service: LLMService,
    sized: Sized,
    replicas: int,
    image: str,
    peers: PlatformPeers = DEFAULT_PEERS,
    public_keys: str | None = None,
) -> list[Child]:
    """Children in the order in which they are applied: what pods need comes before the first pod.

    `public_keys` are the gateway's, where it signs requests.
    """
    spec = service.spec
    signed = public_keys is not None and spec.access == "gateway"
    return [
        Child(expected_service_account(service)),
        Child(expected_service(service)),
        Child(expected_headless_service(service)),
        Child(expected_network_policy(service, sized.model.location, peers), wanted=spec.network_policy.enabled),
        Child(expected_disruption_budget(service)),
        Child(expected_adapter_list(service), wanted=spec.max_loras > 0),
        Child(expected_gateway_keys(service, public_keys or ""), wanted=signed),
        Child(expected_deployment(service, sized, replicas, image, signed=signed)),
        Child(expected_pod_monitor(service), wanted=spec.monitoring.pod_monitor),
        Child(expected_prometheus_rule(service), wanted=spec.monitoring.prometheus_rule),
        Child(expected_inference_pool(service), wanted=spec.gateway.inference_pool),
    ]


def expected_service_account(service: LLMService) -> Manifest:
    """An identity without a token: the server never calls the Kubernetes API."""
    manifest = child_manifest(service, "ServiceAccount") | {"automountServiceAccountToken": False}
    if annotations := service.spec.pod_template.service_account_annotations:
        manifest["metadata"]["annotations"] = annotations
    return manifest


def expected_service(service: LLMService) -> Manifest:
    """One address for the service: connections are spread over the ready pods."""
    spec = {"type": "ClusterIP", "selector": labels.selector_labels(service.name), "ports": [_http_port()]}
    return child_manifest(service, "Service") | {"spec": spec}


def expected_headless_service(service: LLMService) -> Manifest:
    """The ready pods' own addresses by DNS, for clients that choose a pod themselves."""
    spec = {
        "type": "ClusterIP",
        "clusterIP": "None",
        "selector": labels.selector_labels(service.name),
        "ports": [_http_port()],
    }
    return child_manifest(service, "Service", headless_name(service)) | {"spec": spec}


def expected_disruption_budget(service: LLMService) -> Manifest:
    """A drain evicts one pod at a time, also a single one; pods that don't serve do not block it."""
    budget = service.spec.pod_template.disruption_budget
    spec = {
        **({"maxUnavailable": 1} if budget is None else budget.model_dump(by_alias=True, exclude_none=True)),
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": labels.selector_labels(service.name)},
    }
    return child_manifest(service, "PodDisruptionBudget") | {"spec": spec}


def expected_pod_monitor(service: LLMService) -> Manifest:
    # The alerts and dashboards distinguish services by this label, as a ServiceMonitor would set it.
    instance = "__meta_kubernetes_pod_label_app_kubernetes_io_instance"
    endpoint = {
        "port": METRICS,
        "path": "/metrics",
        "interval": service.spec.monitoring.interval,
        "relabelings": [{"sourceLabels": [instance], "targetLabel": "service"}],
    }
    selector = {"matchLabels": labels.selector_labels(service.name)}
    spec = {"selector": selector, "podMetricsEndpoints": [endpoint]}
    manifest = child_manifest(service, "PodMonitor")
    manifest["metadata"]["labels"] = service.spec.monitoring.labels | manifest["metadata"]["labels"]
    return manifest | {"spec": spec}


def expected_inference_pool(service: LLMService) -> Manifest:
    """The pods as a backend of HTTPRoutes: for each request the picker's Service names one of them."""
    picker = service.spec.gateway.endpoint_picker or EndpointPicker()
    spec = {
        "selector": {"matchLabels": labels.selector_labels(service.name)},
        "targetPorts": [{"number": PORT}],
        "endpointPickerRef": {
            "group": "",
            "kind": "Service",
            "name": picker.name or f"{service.name}-epp",
            "port": {"number": picker.port},
            "failureMode": picker.failure_mode,
        },
    }
    return child_manifest(service, "InferencePool") | {"spec": spec}


def expected_adapter_list(service: LLMService) -> Manifest:
    """What the servers load, as `llmservice serve --adapters-file` reads it. A change replaces no pod."""
    listed = [one.model_dump(by_alias=True) for one in service.spec.adapters]
    data = {ADAPTER_LIST_KEY: json.dumps(listed, indent=1)}
    return child_manifest(service, "ConfigMap", adapter_list_name(service)) | {"data": data}


def headless_name(service: LLMService) -> str:
    """At most 57 characters, for a service's name has at most 52."""
    return f"{service.name}-pods"


def service_url(service: LLMService) -> str:
    """What clients inside the cluster use as OpenAI base URL."""
    return f"http://{service.name}.{service.namespace}.svc:{PORT}/v1"


def _http_port() -> Manifest:
    return {"name": HTTP, "port": PORT, "targetPort": HTTP, "protocol": "TCP", "appProtocol": "http"}


def expected_prometheus_rule(service: LLMService) -> Manifest:
    """The service's alerts, with the target as a number, so that they need no metric of the operator for it.

    For teams whose Prometheus reads the rules of their own namespaces.
    """
    target_s = service.spec.slo.ttft_p99_s
    manifest = child_manifest(service, "PrometheusRule")
    manifest["metadata"]["labels"] = service.spec.monitoring.labels | manifest["metadata"]["labels"]
    return manifest | {"spec": {"groups": service_groups(service.namespace, service.name, target_s)}}
