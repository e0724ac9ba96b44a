"""The operator's role grants what the operator's code asks for, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helm_python as helm
import pytest
import yaml

from llmservice_operator.api.kinds import CHILD_KINDS

CHART = Path(__file__).parents[2] / "charts" / "llmservice"
KEPT = {"get", "list", "watch", "create", "patch"}
OPTIONAL = {"NetworkPolicy", "PodMonitor", "PrometheusRule"}


@pytest.fixture(scope="module")
def granted() -> dict[tuple[str, str], set[str]]:
    with helm.Chart.load(CHART) as chart:
        text = chart.render({}, name="release", namespace="system")["llmservice/templates/operator-rbac.yaml"]
    roles: list[dict[str, Any]] = [one for one in yaml.safe_load_all(text) if one and one["kind"] == "ClusterRole"]
    (role,) = roles
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
