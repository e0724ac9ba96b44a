from __future__ import annotations

from typing import Any

import pytest

from llmservice_operator.api.kinds import CHILD_KINDS
from llmservice_operator.children.expected import (
    expected_children,
    expected_inference_pool,
    expected_pod_monitor,
    expected_prometheus_rule,
    service_url,
)
from llmservice_operator.monitoring.alerts import service_groups
from llmservice_operator.sizing import Sized

ALWAYS = {"ServiceAccount", "Service", "PodDisruptionBudget", "Deployment"}


@pytest.mark.parametrize(
    ("spec", "optional"),
    [
        ({}, {"NetworkPolicy", "PodMonitor", "PrometheusRule"}),
        ({"networkPolicy": {"enabled": False}}, {"PodMonitor", "PrometheusRule"}),
        ({"monitoring": {"podMonitor": False}}, {"NetworkPolicy", "PrometheusRule"}),
        ({"monitoring": {"prometheusRule": False}}, {"NetworkPolicy", "PodMonitor"}),
        (
            {"gateway": {"inferencePool": True}},
            {"NetworkPolicy", "PodMonitor", "PrometheusRule", "InferencePool"},
        ),
    ],
)
def test_optional_children_come_and_go_with_the_spec(
    spec: dict[str, Any], optional: set[str], service_of: Any, sized: Sized
) -> None:
    children = expected_children(service_of(**spec), sized, 2, "img:1")

    assert {child.kind.name for child in children if child.wanted} == ALWAYS | optional


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"name": "tiny-epp", "port": {"number": 9002}, "failureMode": "FailOpen"}),
        (
            {"endpointPicker": {"name": "mine", "port": 9, "failureMode": "FailClose"}},
            {"name": "mine", "port": {"number": 9}, "failureMode": "FailClose"},
        ),
    ],
)
def test_the_inference_pool_has_the_pods_their_port_and_the_picker(
    given: dict[str, Any], expected: dict[str, Any], service_of: Any
) -> None:
    spec = expected_inference_pool(service_of(gateway={"inferencePool": True, **given}))["spec"]

    assert spec == {
        "selector": {"matchLabels": {"app.kubernetes.io/name": "llmservice", "app.kubernetes.io/instance": "tiny"}},
        "targetPorts": [{"number": 8000}],
        "endpointPickerRef": {"group": "", "kind": "Service", **expected},
    }


def test_every_child_is_labelled_owned_and_called_after_the_service(service_of: Any, sized: Sized) -> None:
    children = expected_children(service_of(), sized, 2, "img:1")

    assert len({child.key for child in children}) == len(children)
    for child in children:
        metadata = child.manifest["metadata"]
        assert metadata["namespace"] == "team-a"
        assert metadata["name"] in {"tiny", "tiny-pods", "tiny-adapters", "tiny-keys"}
        assert metadata["labels"]["app.kubernetes.io/managed-by"] == "llmservice-operator"
        (owner,) = metadata["ownerReferences"]
        assert (owner["kind"], owner["uid"], owner["controller"]) == ("LLMService", "uid-of-tiny", True)
        assert child.manifest["apiVersion"] == CHILD_KINDS[child.kind.name].api_version


def test_children_that_pods_need_are_applied_before_the_deployment(service_of: Any, sized: Sized) -> None:
    kinds = [child.kind.name for child in expected_children(service_of(), sized, 2, "img:1")]

    for earlier in ("ServiceAccount", "NetworkPolicy", "PodDisruptionBudget"):
        assert kinds.index(earlier) < kinds.index("Deployment")


def test_both_services_select_the_pods_and_one_has_no_address_of_its_own(service_of: Any, sized: Sized) -> None:
    children = expected_children(service_of(), sized, 1, "img:1")
    services = {child.key[2]: child.manifest["spec"] for child in children if child.kind.name == "Service"}

    assert services["tiny-pods"]["clusterIP"] == "None"
    assert "clusterIP" not in services["tiny"]
    for spec in services.values():
        assert spec["selector"] == {"app.kubernetes.io/name": "llmservice", "app.kubernetes.io/instance": "tiny"}


def test_a_drain_may_take_one_pod_at_a_time_and_any_that_does_not_serve(service_of: Any, sized: Sized) -> None:
    children = expected_children(service_of(), sized, 1, "img:1")
    (budget,) = [child.manifest["spec"] for child in children if child.kind.name == "PodDisruptionBudget"]

    assert budget["maxUnavailable"] == 1
    assert "minAvailable" not in budget, "with one replica it would block every drain"
    assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_the_longest_name_is_short_enough_for_derived_names(manifest_of: Any, sized: Sized) -> None:
    from llmservice_operator.api.resource import LLMService

    service = LLMService.model_validate(manifest_of("a" * 52))

    assert all(len(child.key[2]) <= 63 for child in expected_children(service, sized, 1, "img:1"))


def test_the_url_is_the_service_inside_the_cluster(service_of: Any) -> None:
    assert service_url(service_of()) == "http://tiny.team-a.svc:8000/v1"


def test_a_pod_monitor_names_the_service_in_the_label_that_alerts_and_dashboards_read(service_of: Any) -> None:
    monitor = expected_pod_monitor(service_of(monitoring={"podMonitor": True, "interval": "5s"}))

    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["path"], endpoint["interval"]) == ("metrics", "/metrics", "5s")
    (relabeling,) = endpoint["relabelings"]
    assert relabeling["targetLabel"] == "service"
    assert relabeling["sourceLabels"] == ["__meta_kubernetes_pod_label_app_kubernetes_io_instance"]


def test_the_pod_template_rules_identity_and_disruption_budget(service_of: Any, sized: Sized) -> None:
    role = {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/models"}
    template = {"serviceAccountAnnotations": role, "disruptionBudget": {"minAvailable": "50%"}}

    children = expected_children(service_of(podTemplate=template), sized, 2, "img:1")

    account, budget = (
        next(one.manifest for one in children if one.manifest["kind"] == kind)
        for kind in ("ServiceAccount", "PodDisruptionBudget")
    )
    assert account["metadata"]["annotations"] == role
    assert (budget["spec"]["minAvailable"], budget["spec"].get("maxUnavailable")) == ("50%", None)


def test_rule_holds_the_services_alerts_with_its_target(service_of: Any) -> None:
    rule = expected_prometheus_rule(service_of(slo={"ttftP99": "250ms"}))
    assert rule["apiVersion"] == "monitoring.coreos.com/v1"
    assert rule["spec"]["groups"] == service_groups("team-a", "tiny", 0.25)


def test_without_a_target_there_is_no_alert_on_one(service_of: Any) -> None:
    assert expected_prometheus_rule(service_of())["spec"]["groups"] == service_groups("team-a", "tiny", None)


def test_labels_that_prometheus_selects_by_are_added_and_ours_stay(service_of: Any) -> None:
    service = service_of(monitoring={"labels": {"release": "stack", "app.kubernetes.io/instance": "other"}})
    for child in (expected_prometheus_rule(service), expected_pod_monitor(service)):
        assert child["metadata"]["labels"]["release"] == "stack"
        assert child["metadata"]["labels"]["app.kubernetes.io/instance"] == "tiny"
