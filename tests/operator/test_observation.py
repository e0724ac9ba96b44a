from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from llmservice_operator.observation import Observation, parsed
from llmservice_operator.pods.pod import Pod
from llmservice_operator.status.invalid_spec import InvalidSpecError

ManifestOf = Callable[..., dict[str, Any]]


def test_a_status_that_somebody_broke_stops_nobody(manifest_of: ManifestOf) -> None:
    service = parsed({**manifest_of(replicas=2), "status": {"conditions": "all is well"}})

    assert service.spec.replicas == 2
    assert service.status.conditions == []


def test_a_spec_that_cannot_be_read_is_told(manifest_of: ManifestOf) -> None:
    with pytest.raises(InvalidSpecError, match="replicas"):
        parsed(manifest_of(replicas="many"))


def test_a_service_without_a_deployment_has_no_replicas_and_looks_back_a_minute(manifest_of: ManifestOf) -> None:
    observation = Observation(parsed(manifest_of()), {}, None, [], 0.0)

    assert (observation.current, observation.window_s, observation.serving) == (0, 60.0, [])


def test_only_pods_that_serve_are_counted_on(manifest_of: ManifestOf, pod_named: Callable[..., Pod]) -> None:
    pods = [pod_named("one"), pod_named("two", ready=False), pod_named("three", terminating=True)]
    observation = Observation(parsed(manifest_of()), {}, None, pods, 0.0)

    assert [pod.name for pod in observation.serving] == ["one"]
