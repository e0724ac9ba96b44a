"""From what is observed of a service to its replicas: sizing, fixed replicas, the autoscaler's supply and state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from llmservice_operator.api.resource import LLMService
from llmservice_operator.pods.pod import Pod, Trouble
from llmservice_operator.scaling.decision import Decision, decide_replicas, scale_policy
from llmservice_operator.scaling.load import Held, Load, PodLoad
from llmservice_operator.scaling.supply import StartupTimes, supply_of
from llmservice_operator.sizing import Sized, SizingProblem

NOW = 1_700_000_000.0
AUTOSCALING = {"minReplicas": 1, "maxReplicas": 4, "queueDepth": 2, "scaleUp": {"stabilization": "0s"}}
UNSIZED = SizingProblem("DoesNotFit", "lower maxModelLen")

ServiceOf = Callable[..., LLMService]


def decide(
    service: LLMService,
    sizing: Sized | SizingProblem,
    *pods: Pod,
    replicas: int = 1,
    load: Load | Held | None = None,
    status: dict[str, Any] | None = None,
) -> Decision:
    """The first decision about a service with these pods, of which start-up takes 30 seconds."""
    startup = StartupTimes(learned_s=30.0, measured=len(pods))
    startup.observe(pods, NOW, 0)
    supply = supply_of({"spec": {"replicas": replicas}, "status": status or {}}, pods, startup)
    return decide_replicas(service, sizing, load, supply, None, NOW, 0.0)[0]


def test_without_a_size_the_replicas_stay_and_the_decision_says_why(service_of: ServiceOf) -> None:
    decision = decide(service_of(autoscaling=AUTOSCALING), UNSIZED, replicas=3)

    assert (decision.replicas, decision.active) == (3, False)
    assert decision.reasons == ("sizing: DoesNotFit, replicas stay",)


def test_fixed_replicas_are_used_as_they_are(service_of: ServiceOf, sized: Sized) -> None:
    assert decide(service_of(replicas=2), sized).replicas == 2


@pytest.mark.parametrize(
    ("trouble", "restarts", "overdue"),
    [
        (None, 0, 1),
        (Trouble("Unschedulable", "no GPU is free"), 0, 0),
        (Trouble("CrashLoopBackOff", "exit status 1"), 1, 0),
        (Trouble("ImagePullBackOff", "no such image"), 0, 0),
        (Trouble("OOMKilled", "under load"), 1, 1),
        (Trouble("OOMKilled", "at each start"), 2, 0),
        (Trouble("Killed", "by signal 9"), 1, 1),
    ],
)
def test_an_overdue_pod_is_replaced_unless_another_would_not_start_either(
    trouble: Trouble | None,
    restarts: int,
    overdue: int,
    service_of: ServiceOf,
    sized: Sized,
    pod_named: Callable[..., Pod],
) -> None:
    """One ready pod has work for two, the second has been starting for an hour: a third is asked for only if needed."""
    ready = pod_named("tiny-1")
    starting = pod_named("tiny-2", ready=False, ip=None, created_s=NOW - 3600, trouble=trouble, restarts=restarts)
    load = Load(pods=(PodLoad("tiny-1", 8, 4, 0.5),), source="pods")

    decision = decide(service_of(autoscaling=AUTOSCALING), sized, ready, starting, replicas=2, load=load)

    assert decision.replicas == 2 + overdue


@pytest.mark.parametrize(
    ("held", "slots", "replicas"),
    [
        pytest.param(Held(20, tokens=20 * 100), 8, 2, id="short ones fill the slots"),
        pytest.param(Held(20, tokens=20 * 3000), 3, 4, id="long ones fill the KV cache first"),
        pytest.param(Held(2, tokens=2 * 10**9), 1, 1, id="a replica runs one at least"),
        pytest.param(Held(20), 8, 2, id="of unknown length"),
    ],
)
def test_held_requests_count_by_their_tokens(
    held: Held, slots: int, replicas: int, service_of: ServiceOf, sized: Sized
) -> None:
    assert sized.plan is not None
    plan = replace(sized.plan, num_blocks=9040 // sized.plan.block_size + 1)
    service = service_of(autoscaling={**AUTOSCALING, "minReplicas": 0})

    decision = decide(service, replace(sized, plan=plan), replicas=0, load=held)

    assert decision.replicas == replicas
    assert f"a replica runs {slots} of them" in decision.reasons[0]


def test_a_service_of_unknown_size_is_woken_with_one_replica(service_of: ServiceOf, sized: Sized) -> None:
    service = service_of(autoscaling={**AUTOSCALING, "minReplicas": 0})

    assert decide(service, replace(sized, max_num_seqs=None), replicas=0, load=Held(500)).replicas == 1


def test_a_service_of_unknown_size_stays_at_zero_where_no_gpu_hour_is_left(service_of: ServiceOf, sized: Sized) -> None:
    budget = {**AUTOSCALING, "minReplicas": 0, "maxGPUHoursPerDay": 0.5}
    service = service_of(autoscaling=budget, resources={"gpu": {"product": "l4"}})

    assert decide(service, replace(sized, max_num_seqs=None), replicas=0, load=Held(500)).replicas == 0


def test_no_pod_is_replaced_while_the_quota_is_used_up(
    service_of: ServiceOf, sized: Sized, pod_named: Callable[..., Pod]
) -> None:
    ready = pod_named("tiny-1")
    hanging = pod_named("tiny-2", ready=False, ip=None, created_s=NOW - 3600)
    load = Load(pods=(PodLoad("tiny-1", 8, 40, 0.5),), source="pods")
    failure = {"type": "ReplicaFailure", "status": "True", "message": "pods are forbidden: exceeded quota: gpus"}

    decision = decide(
        service_of(autoscaling=AUTOSCALING),
        sized,
        ready,
        hanging,
        replicas=3,
        load=load,
        status={"conditions": [failure]},
    )

    assert decision.replicas == 3
    assert any("QuotaExceeded" in reason for reason in decision.reasons)


def test_without_autoscaling_or_a_size_there_is_no_policy(service_of: ServiceOf, sized: Sized) -> None:
    assert scale_policy(service_of(replicas=2), sized) is None
    assert scale_policy(service_of(autoscaling=AUTOSCALING), UNSIZED) is None
    policy = scale_policy(service_of(autoscaling=AUTOSCALING), sized)
    assert policy is not None
    assert policy.max_replicas == 4
