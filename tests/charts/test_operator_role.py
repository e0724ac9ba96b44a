"""The operator's role grants what the operator's code asks for, and nothing else; no role reads tenants' Secrets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helm_python as helm
import pytest
import yaml

from llmservice_operator.api.kinds import CHILD_KINDS

CHART = Path(__file__).parents[2] / "charts" / "llmservice"
KEPT = {"get", "list", "watch", "create", "patch"}
OPTIONAL = {"ConfigMap", "NetworkPolicy", "PodMonitor", "PrometheusRule", "InferencePool"}


def rendered(values: dict[str, Any], *kinds: str) -> list[dict[str, Any]]:
    with helm.Chart.load(CHART) as chart:
        files = chart.render(values, name="release", namespace="system")
    objects = [one for name, text in files.items() if name.endswith(".yaml") for one in yaml.safe_load_all(text)]
    return [one for one in objects if one and one["kind"] in kinds]


@pytest.fixture(scope="module")
def granted() -> dict[tuple[str, str], set[str]]:
    (role,) = (one for one in rendered({}, "ClusterRole") if one["metadata"]["name"] == "release-llmservice-operator")
    return {
        (group, resource): set(rule["verbs"])
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }


@pytest.mark.parametrize("kind", CHILD_KINDS.values(), ids=CHILD_KINDS)
def test_children_may_be_kept_and_only_optional_ones_deleted(
    kind: Any, granted: dict[tuple[str, str], set[str]]
) -> None:
    assert granted[kind.group, kind.plural] == KEPT | ({"delete"} if kind.name in OPTIONAL else set())


def test_services_are_read_and_their_status_written(granted: dict[tuple[str, str], set[str]]) -> None:
    assert granted["serving.llmservice.io", "llmservices"] == {"list", "watch"}
    assert granted["serving.llmservice.io", "llmservices/status"] == {"patch"}


@pytest.mark.parametrize("values", [{}, {"namespaces": ["team-a"], "admission": {"certManager": {"enabled": True}}}])
def test_no_role_reads_secrets_but_that_of_the_webhook_s_own_certificate(values: dict[str, Any]) -> None:
    bound = {one["roleRef"]["name"] for one in rendered(values, "ClusterRoleBinding", "RoleBinding")}
    touching = [
        (role, rule)
        for role in rendered(values, "ClusterRole", "Role")
        for rule in role["rules"]
        if {"secrets", "*"} & {*rule["resources"]}
    ]

    assert touching
    for role, rule in touching:
        assert (role["kind"], role["metadata"]["namespace"]) == ("Role", "system")
        assert rule.get("resourceNames") == ["release-llmservice-webhook"] or rule["verbs"] == ["create"]
    assert bound >= {role["metadata"]["name"] for role, _ in touching}


def test_namespaces_are_read_for_their_annotation_and_only_by_a_cluster_wide_operator(
    granted: dict[tuple[str, str], set[str]],
) -> None:
    assert granted["", "namespaces"] == {"get"}
    scoped = rendered({"namespaces": ["team-a"]}, "ClusterRole", "Role")
    assert not [rule for role in scoped for rule in role["rules"] if "namespaces" in rule["resources"]]
