from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from llmservice_operator.api.resource import LLMService
from llmservice_operator.memory import Memory
from llmservice_operator.observation import Observation
from llmservice_operator.pods.pod import Pod, Trouble
from llmservice_operator.replicas import decide_replicas, scale_policy
from llmservice_operator.scaling.startup import StartupTimes
from llmservice_operator.signals.load import Load, PodLoad
from llmservice_operator.sizing.sizer import Sizer
from llmservice_operator.sizing.sizing import Sized, SizingProblem
from llmservice_operator.status.note_times import NoteTimes

NOW = 1_700_000_000.0
AUTOSCALING = {"minReplicas": 1, "maxReplicas": 4, "queueDepth": 2, "scaleUp": {"stabilization": "0s"}}
UNSIZED = SizingProblem("DoesNotFit", "lower maxModelLen")

ServiceOf = Callable[..., LLMService]


@pytest.fixture
def memory() -> Memory:
    async def nobody(*_: Any) -> Any:
        raise AssertionError("no model is read to decide")

    return Memory(Sizer(nobody), StartupTimes(learned_s=30.0), NoteTimes(NOW, resumed=False))


def seen(service: LLMService, *pods: Pod, replicas: int = 1) -> Observation:
    return Observation(service, {}, {"spec": {"replicas": replicas}}, list(pods), NOW)


def test_without_a_size_the_replicas_stay_and_say_why(service_of: ServiceOf, memory: Memory) -> None:
    decision = decide_replicas(seen(service_of(autoscaling=AUTOSCALING), replicas=3), memory, None, UNSIZED)

    assert (decision.replicas, decision.active) == (3, False)
    assert decision.reasons == ("sizing: DoesNotFit, replicas stay",)


def test_a_fixed_number_is_taken_as_it_is(service_of: ServiceOf, memory: Memory, sized: Sized) -> None:
    assert decide_replicas(seen(service_of(replicas=2)), memory, None, sized).replicas == 2


@pytest.mark.parametrize(
    ("trouble", "restarts", "overdue"),
    [
        (None, 0, 1),
        (Trouble("Unschedulable", "no card is free"), 0, 0),
        (Trouble("CrashLoopBackOff", "exit status 1"), 1, 0),
        (Trouble("ImagePullBackOff", "no such image"), 0, 0),
        (Trouble("OOMKilled", "under load"), 1, 1),
        (Trouble("OOMKilled", "at each start"), 2, 0),
        (Trouble("Killed", "by signal 9"), 1, 1),
    ],
)
def test_a_pod_that_takes_too_long_is_replaced_unless_another_would_not_come_either(
    trouble: Trouble | None,
    restarts: int,
    overdue: int,
    service_of: ServiceOf,
    memory: Memory,
    sized: Sized,
    pod_named: Callable[..., Pod],
) -> None:
    """One ready pod has work for two. The second has been coming for ever: a third is asked for only if it is lost."""
    ready = pod_named("tiny-1")
    coming = pod_named("tiny-2", ready=False, ip=None, created_s=NOW - 3600, trouble=trouble, restarts=restarts)
    memory.startup.observe([ready, coming], NOW, 0)
    load = Load(pods=(PodLoad("tiny-1", 8, 4, 0.5),), source="pods")

    observation = seen(service_of(autoscaling=AUTOSCALING), ready, coming, replicas=2)
    decision = decide_replicas(observation, memory, load, sized)

    assert decision.replicas == 2 + overdue


def test_a_quota_that_is_used_up_replaces_no_pod(
    service_of: ServiceOf, memory: Memory, sized: Sized, pod_named: Callable[..., Pod]
) -> None:
    ready = pod_named("tiny-1")
    hanging = pod_named("tiny-2", ready=False, ip=None, created_s=NOW - 3600)
    memory.startup.observe([ready, hanging], NOW, 0)
    load = Load(pods=(PodLoad("tiny-1", 8, 40, 0.5),), source="pods")
    failure = {"type": "ReplicaFailure", "status": "True", "message": "pods are forbidden: exceeded quota: gpus"}
    deployment = {"spec": {"replicas": 3}, "status": {"conditions": [failure]}}
    observation = Observation(service_of(autoscaling=AUTOSCALING), {}, deployment, [ready, hanging], NOW)

    decision = decide_replicas(observation, memory, load, sized)

    assert decision.replicas == 3
    assert any("QuotaExceeded" in reason for reason in decision.reasons)


def test_what_nothing_scales_has_no_policy(service_of: ServiceOf, sized: Sized) -> None:
    assert scale_policy(service_of(replicas=2), sized) is None
    assert scale_policy(service_of(autoscaling=AUTOSCALING), UNSIZED) is None
    policy = scale_policy(service_of(autoscaling=AUTOSCALING), sized)
    assert policy is not None
    assert policy.max_replicas == 4
