from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from llmservice_operator.pods.pod import Pod
from llmservice_operator.reconcile import Observation, is_settling, startup_of, unobserved_since
from llmservice_operator.status.report import InvalidSpecError, parse_service

ManifestOf = Callable[..., dict[str, Any]]

CHANGED = {"metadata": {"generation": 2}, "status": {"observedGeneration": 1}}
OBSERVED = {"metadata": {"generation": 2}, "status": {"observedGeneration": 2}}


@pytest.mark.parametrize(
    ("spec", "learned"),
    [
        ({}, 130.0),
        ({"model": {"uri": "file:///other"}}, None),
        ({"resources": {"gpu": {"product": "l4"}}}, None),
    ],
)
def test_a_start_is_learned_from_a_service_with_the_same_model_and_gpu(
    spec: dict[str, Any], learned: float | None, manifest_of: ManifestOf
) -> None:
    other = {**manifest_of("other"), "status": {"autoscaling": {"startupSeconds": 130}}}

    assert startup_of(other, parse_service(manifest_of(**spec))) == learned
    assert startup_of(manifest_of("other"), parse_service(manifest_of(**spec))) is None


def test_an_invalid_status_is_ignored(manifest_of: ManifestOf) -> None:
    service = parse_service({**manifest_of(replicas=2), "status": {"conditions": "all is well"}})

    assert service.spec.replicas == 2
    assert service.status.conditions == []


def test_an_invalid_spec_raises(manifest_of: ManifestOf) -> None:
    with pytest.raises(InvalidSpecError, match="replicas"):
        parse_service(manifest_of(replicas="many"))


def test_a_service_without_a_deployment_has_no_replicas_and_looks_back_a_minute(manifest_of: ManifestOf) -> None:
    observation = Observation(parse_service(manifest_of()), {}, None, [], 0.0)

    assert (observation.current, observation.window_s, observation.serving) == (0, 60.0, [])


def test_pods_that_are_not_ready_or_terminating_do_not_serve(
    manifest_of: ManifestOf, pod_named: Callable[..., Pod]
) -> None:
    pods = [pod_named("one"), pod_named("two", ready=False), pod_named("three", terminating=True)]
    observation = Observation(parse_service(manifest_of()), {}, None, pods, 0.0)

    assert [pod.name for pod in observation.serving] == ["one"]


@pytest.mark.parametrize(
    ("deployments", "settling"),
    [
        pytest.param([(CHANGED, 100), (CHANGED, 109), (CHANGED, 111)], [True, True, False], id="ten seconds"),
        pytest.param([(CHANGED, 100), (OBSERVED, 105), (CHANGED, 112)], [True, False, True], id="for each change"),
    ],
)
def test_kubernetes_has_ten_seconds_to_observe_a_change(
    deployments: list[tuple[dict[str, Any], float]], settling: list[bool]
) -> None:
    since_s, seen = None, []
    for deployment, now in deployments:
        since_s = unobserved_since(deployment, since_s, now)
        seen.append(is_settling(since_s, now))

    assert seen == settling
