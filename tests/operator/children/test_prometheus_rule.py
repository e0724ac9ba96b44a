from __future__ import annotations

from typing import Any

from llmservice_operator.children.children import expected_pod_monitor
from llmservice_operator.children.prometheus_rule import expected_prometheus_rule
from llmservice_operator.monitoring.alerts import service_groups


def test_rule_holds_the_services_alerts_with_its_promise(service_of: Any) -> None:
    rule = expected_prometheus_rule(service_of(slo={"ttftP99": "250ms"}))
    assert rule["apiVersion"] == "monitoring.coreos.com/v1"
    assert rule["spec"]["groups"] == service_groups("team-a", "tiny", 0.25)


def test_without_a_promise_there_is_no_alert_on_one(service_of: Any) -> None:
    assert expected_prometheus_rule(service_of())["spec"]["groups"] == service_groups("team-a", "tiny", None)


def test_labels_that_prometheus_selects_by_are_added_and_ours_stay(service_of: Any) -> None:
    service = service_of(monitoring={"labels": {"release": "stack", "app.kubernetes.io/instance": "other"}})
    for child in (expected_prometheus_rule(service), expected_pod_monitor(service)):
        assert child["metadata"]["labels"]["release"] == "stack"
        assert child["metadata"]["labels"]["app.kubernetes.io/instance"] == "tiny"
