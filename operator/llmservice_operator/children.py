"""Everything that a service should own, as plain data. Applying it is somebody else's job."""

from __future__ import annotations

from llmservice_operator import labels
from llmservice_operator.deployment import PORT, expected_deployment
from llmservice_operator.resource import LLMService
from llmservice_operator.sizing import Sized
from llmservice_operator.spec import Manifest

POD_MONITOR_API = "monitoring.coreos.com/v1"


def expected_children(service: LLMService, sized: Sized, replicas: int, image: str) -> list[Manifest]:
    """Children in the order in which they are applied; the PodMonitor only where it is asked for."""
    children = [
        expected_service_account(service),
        expected_service(service),
        expected_deployment(service, sized, replicas, image),
    ]
    if service.spec.monitoring.pod_monitor:
        children.append(expected_pod_monitor(service))
    return children


def expected_service_account(service: LLMService) -> Manifest:
    """An identity without a token: the server never talks to Kubernetes."""
    return _child(service, "v1", "ServiceAccount") | {"automountServiceAccountToken": False}


def expected_service(service: LLMService) -> Manifest:
    port = {"name": "http", "port": PORT, "targetPort": "http", "protocol": "TCP", "appProtocol": "http"}
    spec = {"type": "ClusterIP", "selector": labels.selector_labels(service.name), "ports": [port]}
    return _child(service, "v1", "Service") | {"spec": spec}


def expected_pod_monitor(service: LLMService) -> Manifest:
    # The alerts and dashboards tell services apart by this label, as a ServiceMonitor would set it.
    instance = "__meta_kubernetes_pod_label_app_kubernetes_io_instance"
    endpoint = {
        "port": "http",
        "path": "/metrics",
        "interval": service.spec.monitoring.interval,
        "relabelings": [{"sourceLabels": [instance], "targetLabel": "service"}],
    }
    selector = {"matchLabels": labels.selector_labels(service.name)}
    spec = {"selector": selector, "podMetricsEndpoints": [endpoint]}
    return _child(service, POD_MONITOR_API, "PodMonitor") | {"spec": spec}


def service_url(service: LLMService) -> str:
    """What clients inside the cluster use as OpenAI base URL."""
    return f"http://{service.name}.{service.namespace}.svc:{PORT}/v1"


def _child(service: LLMService, api_version: str, kind: str) -> Manifest:
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": service.name,
            "namespace": service.namespace,
            "labels": labels.child_labels(service.name),
            "ownerReferences": [service.owner_reference()],
        },
    }
