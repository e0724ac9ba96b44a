from __future__ import annotations

from typing import Any

import pytest

from llmservice_operator.children import expected_children, service_url
from llmservice_operator.sizing import Sized


@pytest.mark.parametrize(
    ("monitoring", "kinds"),
    [
        ({}, ["ServiceAccount", "Service", "Deployment"]),
        ({"podMonitor": True}, ["ServiceAccount", "Service", "Deployment", "PodMonitor"]),
    ],
)
def test_a_pod_monitor_comes_only_where_it_is_asked_for(
    monitoring: dict[str, Any], kinds: list[str], service_of: Any, sized: Sized
) -> None:
    children = expected_children(service_of(monitoring=monitoring), sized, 2, "img:1")

    assert [child["kind"] for child in children] == kinds


def test_every_child_is_named_labelled_and_owned(service_of: Any, sized: Sized) -> None:
    for child in expected_children(service_of(monitoring={"podMonitor": True}), sized, 2, "img:1"):
        metadata = child["metadata"]
        assert (metadata["namespace"], metadata["name"]) == ("team-a", "tiny")
        assert metadata["labels"]["app.kubernetes.io/managed-by"] == "llmservice-operator"
        (owner,) = metadata["ownerReferences"]
        assert (owner["kind"], owner["uid"], owner["controller"]) == ("LLMService", "uid-of-tiny", True)


def test_the_url_is_the_service_inside_the_cluster(service_of: Any) -> None:
    assert service_url(service_of()) == "http://tiny.team-a.svc:8000/v1"
