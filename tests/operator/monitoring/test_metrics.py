from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from llmservice_operator.monitoring.metrics import OperatorMetrics, ProcessMetrics, call_of


@pytest.mark.parametrize(
    ("method", "path", "call"),
    [
        ("GET", "/api/v1/namespaces/team-a/pods", ("list", "pods")),
        ("GET", "/api/v1/pods", ("list", "pods")),
        ("WATCH", "/api/v1/pods", ("watch", "pods")),
        ("GET", "/apis/apps/v1/namespaces/team-a/deployments/tiny", ("get", "deployments")),
        ("PATCH", "/apis/apps/v1/namespaces/team-a/deployments/tiny", ("patch", "deployments")),
        (
            "PATCH",
            "/apis/serving.llmservice.io/v1alpha1/namespaces/team-a/llmservices/tiny/status",
            ("patch", "llmservices/status"),
        ),
        ("POST", "/api/v1/namespaces/team-a/events", ("create", "events")),
        ("PUT", "/apis/coordination.k8s.io/v1/namespaces/system/leases/x", ("update", "leases")),
        ("DELETE", "/api/v1/namespaces/team-a/services/pods", ("delete", "services")),
        ("GET", "/apis/monitoring.coreos.com/v1", ("get", "discovery")),
    ],
)
def test_a_request_is_named_as_in_a_role(method: str, path: str, call: tuple[str, str]) -> None:
    assert call_of(method, path) == call


def test_the_age_of_the_last_event_grows_until_the_next() -> None:
    now = [100.0]
    registry = CollectorRegistry()
    metrics = ProcessMetrics(registry, lambda: now[0])
    age = "llmservice_operator_watch_event_age_seconds"

    now[0] = 130.0
    assert registry.get_sample_value(age, {"kind": "Pod"}) == 30.0
    metrics.watched("Pod")
    now[0] = 131.0
    assert registry.get_sample_value(age, {"kind": "Pod"}) == 1.0


def test_watches_that_begin_with_a_list_are_counted_by_kind() -> None:
    registry = CollectorRegistry()
    metrics = ProcessMetrics(registry)
    for kind in ("Pod", "Service", "Pod"):
        metrics.relisted(kind)

    assert registry.get_sample_value("llmservice_operator_watch_relists_total", {"kind": "Pod"}) == 2.0
    assert registry.get_sample_value("llmservice_operator_watch_events_total", {"kind": "Pod"}) is None


def test_the_leader_gauge_falls_with_the_fence() -> None:
    registry = CollectorRegistry()
    left = [3.0]
    ProcessMetrics(registry).lead(lambda: left[0])

    assert registry.get_sample_value("llmservice_operator_leader") == 1.0
    left[0] = 0.0
    assert registry.get_sample_value("llmservice_operator_leader") == 0.0


def test_figures_that_are_not_known_any_more_have_no_series() -> None:
    metrics = OperatorMetrics()

    def value(name: str, service: str, **labels: str) -> float | None:
        labels |= {"namespace": "team-a", "name": service}
        return metrics.registry.get_sample_value(f"llmservice_operator_{name}", labels)

    for service in ("one", "two"):
        metrics.predicted("team-a", service, {"blocks": 0.1, "itl": 0.2})
        metrics.reported("team-a", service, {}, {"load_replicas": 2.0})
    metrics.predicted("team-a", "one", {"itl": 0.3})
    metrics.reported("team-a", "one", {}, {"load_replicas": None})

    ratio = "prediction_error_ratio"
    assert (value(ratio, "one", quantity="blocks"), value(ratio, "one", quantity="itl")) == (None, 0.3)
    assert (value(ratio, "two", quantity="blocks"), value(ratio, "two", quantity="itl")) == (0.1, 0.2)
    assert (value("load_replicas", "one"), value("load_replicas", "two")) == (None, 2.0)
