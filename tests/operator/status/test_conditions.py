from __future__ import annotations

from typing import Any

import pytest

from llmservice_operator.api import labels
from llmservice_operator.api.pod_spec import PodTemplate
from llmservice_operator.api.resource import LLMService
from llmservice_operator.api.spec import Adapter
from llmservice_operator.pods.pod import Pod, Trouble
from llmservice_operator.pods.pod_model import Fetching, PodAdapter
from llmservice_operator.scaling.decision import Decision
from llmservice_operator.scaling.feasibility import Feasibility
from llmservice_operator.scaling.load import Load, PodLoad
from llmservice_operator.sizing import Sized, SizingProblem
from llmservice_operator.status.conditions import (
    READY,
    Verdict,
    adapters_verdict,
    conditions,
    degraded_verdict,
    name_verdict,
    progressing_verdict,
    ready_verdict,
    remembered_slo,
    scaling_verdict,
    stalled_verdict,
    while_fetching,
)

NOW = 1_700_000_000.0
TOO_BIG = SizingProblem("DoesNotFit", "the model does not fit")
STUCK = Trouble("Unschedulable", "0/1 nodes have a GPU")
DENIED = Trouble("ApplyFailed", 'admission webhook "images.example" denied the request: not signed')
CONFLICT = Trouble("NameConflict", "a Deployment called tiny is there already")


def test_the_transition_time_moves_only_when_the_status_flips() -> None:
    first = conditions([], [Verdict("Ready", "False", "Starting", "a")], 1, NOW)
    same = conditions(first, [Verdict("Ready", "False", "Unschedulable", "b")], 2, NOW + 60)
    flipped = conditions(same, [Verdict("Ready", "True", "Serving", "c")], 2, NOW + 120)

    assert first[0].last_transition_time == same[0].last_transition_time == "2023-11-14T22:13:20Z"
    assert (same[0].reason, same[0].observed_generation) == ("Unschedulable", 2)
    assert flipped[0].last_transition_time == "2023-11-14T22:15:20Z"


@pytest.mark.parametrize(
    ("desired", "ready", "trouble", "sizing", "blocked", "expected"),
    [
        pytest.param(1, 0, None, None, None, ("False", "Starting"), id="starting"),
        pytest.param(2, 2, None, None, None, ("True", "Serving"), id="all ready"),
        pytest.param(3, 1, None, None, None, ("False", "PartlyReady"), id="fewer than wanted"),
        pytest.param(3, 1, STUCK, None, None, ("False", "Unschedulable"), id="one serves, one is stuck"),
        pytest.param(1, 1, STUCK, None, None, ("True", "Serving"), id="enough serve, one too many is stuck"),
        pytest.param(1, 0, STUCK, None, None, ("False", "Unschedulable"), id="the pod's trouble is lifted"),
        pytest.param(0, 0, None, None, None, ("True", "NoReplicas"), id="no replica is wanted"),
        pytest.param(1, 0, None, TOO_BIG, None, ("False", "DoesNotFit"), id="the spec can't be served"),
        pytest.param(1, 1, None, TOO_BIG, None, ("False", "ServingEarlierSpec"), id="earlier pods still serve"),
        pytest.param(1, 1, None, None, DENIED, ("False", "ServingEarlierSpec"), id="the change was denied"),
        pytest.param(1, 0, None, None, CONFLICT, ("False", "NameConflict"), id="a name is taken"),
        pytest.param(1, 0, None, None, DENIED, ("False", "AdmissionDenied"), id="a webhook said no"),
    ],
)
def test_ready_follows_the_serving_pods(
    desired: int,
    ready: int,
    trouble: Trouble | None,
    sizing: SizingProblem | None,
    blocked: Trouble | None,
    expected: tuple[str, str],
    sized: Sized,
    pod_named: Any,
) -> None:
    pods: list[Pod] = [pod_named(f"ready-{n}") for n in range(ready)]
    pods += [pod_named("stuck", ready=False, trouble=trouble)] if trouble else []

    verdict = ready_verdict(deployment(), desired, pods, sizing or sized, blocked)

    assert (verdict.status, verdict.reason) == expected
    assert trouble is None or trouble.message in verdict.message


def test_the_autoscalers_zero_is_not_ready_for_a_request_that_waits_is_answered(sized: Sized) -> None:
    verdict = ready_verdict(deployment(), 0, [], sized, None, autoscaled=True)

    assert (verdict.status, verdict.reason) == ("False", "ScaledToZero")


def test_the_zero_of_a_day_whose_gpu_hours_are_used_says_until_when(sized: Sized) -> None:
    decision = Decision(0, 0, ("cost: 8.0 of 8 GPU-hours of the day (UTC) are used -> 0",))

    verdict = ready_verdict(deployment(), 0, [], sized, None, autoscaled=True, decision=decision)

    assert (verdict.status, verdict.reason) == ("False", "LimitedByCost")
    assert "8.0 of 8 GPU-hours" in verdict.message
    assert "requests are refused until midnight (UTC)" in verdict.message


@pytest.mark.parametrize(
    ("unseen", "reason"),
    [
        (None, "Starting"),
        ({"metadata": {"generation": 2}}, "Starting"),
        ({"metadata": {"generation": 2}, "status": {"observedGeneration": 1, "readyReplicas": 1}}, "Updating"),
    ],
)
def test_a_spec_that_kubernetes_has_not_observed_is_not_ready(
    unseen: Any, reason: str, sized: Sized, pod_named: Any
) -> None:
    verdict = ready_verdict(unseen, 1, [pod_named()], sized, None)

    assert (verdict.status, verdict.reason) == ("False", reason)


@pytest.mark.parametrize(
    ("condition", "reason"),
    [
        (
            {
                "type": "ReplicaFailure",
                "status": "True",
                "message": 'pods "x" is forbidden: exceeded quota: q, requested: pods=1, used: pods=1, limited: pods=1',
            },
            "QuotaExceeded",
        ),
        (
            {"type": "Progressing", "reason": "ProgressDeadlineExceeded", "message": "timed out"},
            "ProgressDeadlineExceeded",
        ),
    ],
)
def test_the_reason_why_pods_cannot_be_created_becomes_that_of_ready(
    condition: dict[str, Any], reason: str, sized: Sized
) -> None:
    verdict = ready_verdict(deployment(conditions=[condition]), 1, [], sized, None)

    assert (verdict.status, verdict.reason) == ("False", reason)
    assert condition["message"] in verdict.message


def test_a_message_is_one_bounded_line_without_control_characters() -> None:
    (condition,) = conditions([], [Verdict("Ready", "False", "CrashLoopBackOff", "\x1b[31mred\n" + "x" * 5000)], 1, NOW)

    assert condition.message.startswith(" [31mred x")
    assert len(condition.message) == 2048


def deployment(**status: Any) -> dict[str, Any]:
    return {"metadata": {"generation": 2}, "status": {"observedGeneration": 2, "readyReplicas": 3, **status}}


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ({"replicas": 2, "updatedReplicas": 2, "readyReplicas": 2}, ("False", "Settled")),
        ({"replicas": 3, "updatedReplicas": 2, "readyReplicas": 2}, ("True", "RollingOut")),
        ({"replicas": 2, "updatedReplicas": 2, "readyReplicas": 2, "observedGeneration": 1}, ("True", "RollingOut")),
        (
            {"replicas": 2, "conditions": [{"type": "Progressing", "reason": "ProgressDeadlineExceeded"}]},
            ("False", "ProgressDeadlineExceeded"),
        ),
    ],
)
def test_progressing_ends_when_all_replicas_run_the_present_spec(
    status: dict[str, Any], expected: tuple[str, str], sized: Sized
) -> None:
    verdict = progressing_verdict(deployment(**status), 2, [], sized, None)

    assert (verdict.status, verdict.reason) == expected


def test_replicas_beyond_those_wanted_are_named_as_such(sized: Sized, pod_named: Any) -> None:
    manifest, pods = deployment(replicas=3, updatedReplicas=3, readyReplicas=3), [pod_named(name) for name in "abc"]

    progressing = progressing_verdict(manifest, 1, pods, sized, None)

    assert progressing.message == "1 of 1 replicas serve the present spec, 2 more to be removed"
    assert ready_verdict(manifest, 1, pods, sized, None).message == "1 of 1 replicas are ready"


@pytest.mark.parametrize(
    ("active", "ready", "autoscaled", "expected"),
    [
        (True, True, True, ("True", "FollowingLoad")),
        (False, True, True, ("False", "NoMetrics")),
        (False, False, True, ("Unknown", "NoReadyPods")),
        (True, True, False, ("False", "FixedReplicas")),
    ],
)
def test_scaling_is_active_with_metrics(
    active: bool, ready: bool, autoscaled: bool, expected: tuple[str, str], sized: Sized, pod_named: Any
) -> None:
    decision = Decision(2, 2, ("why",), active=active)

    verdict = scaling_verdict(decision, [pod_named(ready=ready)], sized, autoscaled=autoscaled)

    assert (verdict.status, verdict.reason) == expected


@pytest.mark.parametrize(
    ("present", "earlier", "trouble", "expected"),
    [
        pytest.param(2, 0, None, ("True", "Serving", "2 of 2 replicas are ready"), id="all of the present template"),
        pytest.param(1, 1, None, ("False", "RollingOut", "1 of 2 replicas serve the present spec, 1 an"), id="half"),
        pytest.param(0, 2, STUCK, ("False", "ServingEarlierSpec", "0/1 nodes have a GPU"), id="the new pod is stuck"),
        pytest.param(
            2, 1, None, ("True", "Serving", "2 of 2 replicas are ready"), id="an earlier pod has not gone yet"
        ),
    ],
)
def test_ready_and_progressing_count_pods_of_the_present_template(
    present: int, earlier: int, trouble: Trouble | None, expected: tuple[str, str, str], sized: Sized, pod_named: Any
) -> None:
    """A Deployment counts a pod as updated before it serves, if it ever does."""
    manifest = deployment(replicas=3, updatedReplicas=2, readyReplicas=2)
    manifest["spec"] = {"template": {"metadata": {"annotations": {"serving.llmservice.io/template": "new"}}}}
    pods = [pod_named(f"new-{n}", template="new") for n in range(present)]
    pods += [pod_named(f"old-{n}", template="old") for n in range(earlier)]
    pods += [pod_named("stuck", template="new", ready=False, trouble=trouble)] if trouble else []

    ready = ready_verdict(manifest, 2, pods, sized, None)

    assert (ready.status, ready.reason) == expected[:2]
    assert expected[2] in ready.message
    if trouble is None:
        progressing = progressing_verdict(manifest, 2, pods, sized, None)
        assert progressing.message == f"{present} of 2 replicas serve the present spec"


@pytest.mark.parametrize("counts", [{"replicas": 2}, {"replicas": 3, "updatedReplicas": 2}])
def test_a_rollout_that_is_paused_says_how_it_is_resumed(counts: dict[str, int], sized: Sized, pod_named: Any) -> None:
    manifest = deployment(readyReplicas=2, **counts)
    manifest["metadata"] |= {"name": "tiny", "namespace": "team-a"}
    manifest["spec"] = {"paused": True, "template": {"metadata": {"annotations": {labels.TEMPLATE: "new"}}}}
    pods = [pod_named(name, template="old") for name in "ab"]

    ready = ready_verdict(manifest, 2, pods, sized, None)
    progressing = progressing_verdict(manifest, 2, pods, sized, None)

    assert (ready.status, ready.reason) == ("False", "ServingEarlierSpec")
    assert (progressing.status, progressing.reason) == ("True", "DeploymentPaused")
    assert "kubectl rollout resume deployment/tiny -n team-a" in progressing.message
    manifest["status"] |= {"replicas": 2, "updatedReplicas": 2}
    assert progressing_verdict(manifest, 1, pods, sized, None).reason == "RollingOut"  # it is scaled even so


def test_pods_of_a_deleted_service_of_the_name_are_not_counted(sized: Sized, pod_named: Any) -> None:
    verdict = ready_verdict(deployment(readyReplicas=0), 1, [pod_named("of-the-deleted-one")], sized, None)

    assert (verdict.status, verdict.reason, verdict.message) == ("False", "Starting", "0 of 1 replicas are ready")


def test_replicas_that_were_killed_for_memory_are_reported_while_they_serve_again(sized: Sized, pod_named: Any) -> None:
    verdict = ready_verdict(deployment(), 2, [pod_named("a", out_of_memory=True), pod_named("b")], sized, None)

    assert verdict.status == "True"
    assert "OOMKilled: 1 of them restarted after being killed for memory: raise resources" in verdict.message


@pytest.mark.parametrize(
    ("sizing", "blocked", "late", "expected"),
    [
        (None, None, False, ("False", "NotStalled")),
        (TOO_BIG, None, False, ("True", "DoesNotFit")),
        (SizingProblem("ModelUnreachable", "the hub answers 503"), None, False, ("False", "NotStalled")),
        (None, DENIED, False, ("True", "AdmissionDenied")),
        (None, None, True, ("True", "ProgressDeadlineExceeded")),
        (None, Trouble("Replacing", "the old objects go first"), False, ("False", "NotStalled")),
    ],
)
def test_stalled_means_that_a_user_has_to_act(
    sizing: SizingProblem | None, blocked: Trouble | None, late: bool, expected: tuple[str, str], sized: Sized
) -> None:
    deadline = {"type": "Progressing", "reason": "ProgressDeadlineExceeded", "message": "timed out"}
    manifest = deployment(conditions=[deadline] if late else [])
    reported = (manifest, 1, [], sizing or sized, blocked)

    verdict = stalled_verdict(ready_verdict(*reported), progressing_verdict(*reported))

    assert (verdict.status, verdict.reason) == expected


def test_a_name_of_an_older_service_is_reported_with_the_alternative() -> None:
    assert name_verdict("llama", "team-b", None) is None
    assert name_verdict("llama", "team-b", "team-b") is None

    verdict = name_verdict("llama", "team-b", "team-a")

    assert verdict is not None
    assert (verdict.type, verdict.status) == ("NameTaken", "True")
    assert "belongs to an older service there: clients reach this service as team-b/llama" in verdict.message
    qualified = name_verdict("team-a/llama", "team-b", "team-a")
    assert qualified is not None
    assert "means that namespace: clients reach this service as team-b/team-a/llama" in qualified.message


def test_pods_that_compute_without_a_kernel_are_named() -> None:
    pods = tuple(PodLoad(name, 0, 0, 0) for name in "abcde")
    assert degraded_verdict(Load("pods", pods)) is None

    verdict = degraded_verdict(Load("pods", pods, fallbacks={name: ["attention"] for name in "bacd"}))

    assert verdict is not None
    assert (verdict.type, verdict.status, verdict.reason) == ("Degraded", "True", "KernelFallback")
    assert "4 of 5 pods" in verdict.message
    assert "a (attention), b (attention), c (attention), …. The pod's log" in verdict.message
    assert "podTemplate.extraArgs" in verdict.message
    PodTemplate.model_validate({"extraArgs": ["--attention", "triton"]})  # what the message advises


def test_replicas_that_the_cost_limits_are_named_in_the_condition(sized: Sized) -> None:
    reasons = ("demand: 9/s -> 7", "cost: 90.0 of 100 GPU-hours of the day (UTC) are used -> 2")

    verdict = scaling_verdict(Decision(2, 2, reasons), [], sized, autoscaled=True)

    assert (verdict.status, verdict.reason) == ("True", "LimitedByCost")
    assert "raise autoscaling.maxGPUHoursPerDay" in verdict.message


STARTING = Verdict(READY, "False", "Starting", "0 of 2 replicas are ready")
GIB = 2**30


@pytest.mark.parametrize(
    ("ready", "fetching", "reason", "message"),
    [
        (STARTING, None, "Starting", STARTING.message),
        (STARTING, Fetching(1), "FetchingModel", "1 pod fetches hf://a/b"),
        (STARTING, Fetching(2, 45, 15 * GIB), "FetchingModel", "2 pods fetch hf://a/b: 45 % of 15.00 GiB"),
        (Verdict(READY, "False", "ModelFetchFailed", "no"), Fetching(1), "ModelFetchFailed", "no"),
        (Verdict(READY, "True", "Serving", "1 of 1"), Fetching(1, 5, GIB), "Serving", "1 of 1"),
    ],
)
def test_a_download_explains_only_a_start(ready: Verdict, fetching: Fetching | None, reason: str, message: str) -> None:
    verdict = while_fetching(ready, fetching, "hf://a/b")
    assert (verdict.status, verdict.reason, verdict.message) == (ready.status, reason, message)


@pytest.mark.parametrize(("generation", "known"), [(1, True), (2, False)])
def test_a_verdict_about_an_earlier_spec_is_not_remembered(generation: int, known: bool, manifest_of: Any) -> None:
    manifest = manifest_of()
    manifest["metadata"]["generation"] = generation
    condition = {"type": "SLOFeasible", "status": "False", "reason": "TooSlow", "message": "m"}
    condition |= {"lastTransitionTime": "2026-01-01T00:00:00Z", "observedGeneration": 1}
    service = LLMService.model_validate({**manifest, "status": {"conditions": [condition]}})

    assert remembered_slo(service) == (Feasibility("False", "TooSlow", "m") if known else None)


POET = PodAdapter("poet", "hf://o/p", "v2")
EARLIER = PodAdapter("poet", "hf://o/earlier", "v1")
BROKEN = PodAdapter("poet", "hf://o/p", "", "the adapter's rank is 64, expected at most --max-lora-rank 16: raise it")


@pytest.mark.parametrize(
    ("reports", "status", "reason", "words"),
    [
        ({}, "Unknown", "NoReadyPods", "no pod is ready"),
        ({"a": [POET], "b": [POET]}, "True", "Loaded", "each of 2 pods has poet"),
        ({"a": [POET], "b": []}, "False", "AdaptersLoading", "poet by 1 of 2"),
        ({"a": [EARLIER]}, "False", "AdaptersLoading", "poet by 0 of 1"),
        (
            {"a": [EARLIER, BROKEN], "b": [BROKEN]},
            "False",
            "AdapterLoadFailed",
            "poet (a and 1 more): the adapter's rank",
        ),
    ],
)
def test_adapters_are_ready_once_each_pod_has_them_as_listed(
    reports: dict[str, list[PodAdapter]], status: str, reason: str, words: str
) -> None:
    verdict = adapters_verdict([Adapter(name="poet", uri="hf://o/p")], reports)
    assert verdict is not None
    assert (verdict.status, verdict.reason) == (status, reason)
    assert words in verdict.message


def test_without_adapters_there_is_no_such_condition() -> None:
    assert adapters_verdict([], {"a": [POET]}) is None
