"""The alerts of one service as a child of it, for teams whose Prometheus reads the rules of their own namespaces."""

from __future__ import annotations

from llmservice_operator.api import duration
from llmservice_operator.api.resource import LLMService
from llmservice_operator.api.spec import Manifest
from llmservice_operator.children.child import child_manifest
from llmservice_operator.monitoring.alerts import service_groups


def expected_prometheus_rule(service: LLMService) -> Manifest:
    """The promise stands in the rules as a number, so that they need no metric of the operator's for it."""
    promise = service.spec.slo.ttft_p99
    target_s = duration.seconds(promise) if promise else None
    manifest = child_manifest(service, "PrometheusRule")
    manifest["metadata"]["labels"] = service.spec.monitoring.labels | manifest["metadata"]["labels"]
    return manifest | {"spec": {"groups": service_groups(service.namespace, service.name, target_s)}}
