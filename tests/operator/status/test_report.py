"""Invariants of the status over random histories of pods, Deployments and metrics; and merge patches."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from llmservice_operator.api.resource import LLMService
from llmservice_operator.api.spec import LLMServiceSpec
from llmservice_operator.api.status import LLMServiceStatus
from llmservice_operator.cluster.applier import Refusal
from llmservice_operator.locations import Model, ModelLocation
from llmservice_operator.pods.pod import Pod, Trouble
from llmservice_operator.scaling.decision import Decision, ScalingState
from llmservice_operator.scaling.history import History
from llmservice_operator.scaling.load import Load, PodLoad
from llmservice_operator.scaling.schedule import GpuHours
from llmservice_operator.sizing import Sized, SizingProblem, size
from llmservice_operator.status.conditions import READY, SLO_FEASIBLE, Verdict
from llmservice_operator.status.events import transition_events
from llmservice_operator.status.report import Outcome, PodReports, expected_status, merge_patch
from llmservice_planner.model.shape import ModelShape

SPEC: dict[str, Any] = {
    "model": {"uri": "file:///tiny"},
    "resources": {"requests": {"memory": "2Gi"}},
    "engine": {"maxNumSeqs": 8, "maxModelLen": 512},
    "slo": {"ttftP99": "2s"},
}
SHAPE = ModelShape(
    layers=2, hidden_size=64, intermediate_size=128, heads=4, kv_heads=2, head_dim=16, vocab_size=512,
    max_position_embeddings=2048, dtype="float32",
)  # fmt: skip
NOW = 1_700_000_000.0
TYPES = ["Ready", "Progressing", "Stalled", "SizingValid", "ScalingActive", "SLOFeasible"]

messages = st.text(max_size=20) | st.just("long " * 1000)
troubles = st.builds(
    Trouble, st.sampled_from(["Unschedulable", "ImagePullBackOff", "OOMKilled", "CrashLoopBackOff"]), messages
)
pods = st.builds(
    Pod,
    name=st.sampled_from(["tiny-a", "tiny-b", "tiny-c"]),
    uid=st.just("u"),
    ip=st.none() | st.just("10.0.0.1"),
    created_s=st.just(NOW - 60),
    ready=st.booleans(),
    terminating=st.booleans(),
    trouble=st.none() | troubles,
)
failures = st.builds(
    lambda message: {"type": "ReplicaFailure", "status": "True", "message": f"exceeded quota: {message}"}, messages
)
deployments = st.none() | st.builds(
    lambda seen, counts, failure: {
        "metadata": {"generation": 2},
        "status": {
            "observedGeneration": seen,
            **dict(zip(("replicas", "updatedReplicas", "readyReplicas"), counts, strict=True)),
            "conditions": [failure] if failure else [],
        },
    },
    st.integers(1, 2),
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)),
    st.none() | failures,
)
loads = st.none() | st.builds(
    lambda running, waiting, ttft: Load("pods", (PodLoad("a", running, waiting, 0.1),), ttft_p99_s=ttft, kv_blocks=990),
    st.integers(0, 8),
    st.integers(0, 40),
    st.none() | st.floats(0.001, 30),
)
verdicts = st.builds(
    Verdict, st.just(SLO_FEASIBLE), st.sampled_from(["True", "False", "Unknown"]), st.just("TargetReachable"), messages
)
refusals = st.lists(
    st.builds(
        Refusal,
        st.just("Deployment"),
        st.builds(Trouble, st.sampled_from(["NameConflict", "ApplyFailed"]), messages),
    ),
    max_size=2,
)


def sized() -> Sized:
    answer = size(LLMServiceSpec.model_validate(SPEC), Model(ModelLocation("file", "/srv/tiny"), SHAPE))
    assert isinstance(answer, Sized)
    return answer


SIZED = sized()
sizings = st.just(SIZED) | st.builds(SizingProblem, st.sampled_from(["DoesNotFit", "UnknownGPU"]), messages)


@st.composite
def worlds(draw: st.DrawFn) -> dict[str, Any]:
    """All that a pass observes and decides. Everything but the moment belongs to the world."""
    autoscaled, sizing = draw(st.booleans()), draw(sizings)
    wanted = draw(st.integers(0, 3))
    spec = {**SPEC, **({"autoscaling": {"maxReplicas": 3}} if autoscaled else {"replicas": wanted})}
    history = History(capacity=draw(st.none() | st.just((NOW, 1.5))))
    outcome = Outcome(
        sizing=sizing,
        reports=PodReports(load=draw(loads)),
        decision=Decision(wanted, draw(st.integers(0, 3)), ("queue: 3 waiting -> 2",), active=draw(st.booleans())),
        current=wanted,
        slo=draw(verdicts),
        startup_s=draw(st.none() | st.floats(1, 100)),
        refusals=draw(refusals),
        scaling=ScalingState(history, 1, GpuHours.start(NOW)) if autoscaled else None,
    )
    world = {"spec": spec, "generation": draw(st.integers(1, 3)), "deployment": draw(deployments)}
    return {**world, "pods": draw(st.lists(pods, max_size=4)), "outcome": outcome}


def service(world: dict[str, Any], status: dict[str, Any]) -> LLMService:
    metadata = {"name": "tiny", "namespace": "team-a", "uid": "u", "generation": world["generation"]}
    return LLMService.model_validate({"metadata": metadata, "spec": world["spec"], "status": status})


def after(world: dict[str, Any], before: dict[str, Any], now: float) -> LLMServiceStatus:
    return expected_status(service(world, before), world["deployment"], world["pods"], world["outcome"], now)


def stored(status: LLMServiceStatus) -> dict[str, Any]:
    return status.model_dump(by_alias=True, exclude_none=True)


histories = st.lists(worlds(), min_size=1, max_size=6)


@given(history=histories)
def test_the_same_observation_is_written_once(history: list[dict[str, Any]]) -> None:
    status: dict[str, Any] = {}
    for step, world in enumerate(history):
        status = stored(after(world, status, NOW + 60 * step))
        again = after(world, status, NOW + 60 * step + 30)

        assert merge_patch(status, stored(again)) == {}
        assert transition_events(service(world, status), again, NOW) == []


@given(history=histories)
def test_every_condition_is_always_there_and_bounded(history: list[dict[str, Any]]) -> None:
    status: dict[str, Any] = {}
    for step, world in enumerate(history):
        report = after(world, status, NOW + 60 * step)
        status = stored(report)

        assert [condition.type for condition in report.conditions] == TYPES
        for condition in report.conditions:
            assert condition.observed_generation == world["generation"]
            assert re.fullmatch(r"[A-Z][A-Za-z0-9]*", condition.reason)
            assert len(condition.message) <= 2048
            assert condition.message.isprintable()
        LLMServiceStatus.model_validate(status)


@given(history=histories)
def test_a_transition_time_moves_exactly_when_a_status_flips(history: list[dict[str, Any]]) -> None:
    status: dict[str, Any] = {}
    for step, world in enumerate(history):
        before = {one["type"]: one for one in status.get("conditions", [])}
        status = stored(after(world, status, NOW + 60 * step))
        for condition in status["conditions"]:
            past = before.get(condition["type"])
            if past is not None:
                moved = past["lastTransitionTime"] != condition["lastTransitionTime"]
                assert moved == (past["status"] != condition["status"])


@given(world=worlds())
def test_ready_means_routable_pods_enough_of_them_and_the_present_spec(world: dict[str, Any]) -> None:
    report = after(world, {}, NOW)
    ready = report.condition(READY)
    assert ready is not None
    serving = [pod for pod in world["pods"] if pod.ready and not pod.terminating and pod.ip]
    if ready.status == "True":
        assert ready.reason == "NoReplicas" or len(serving) >= max(1, world["outcome"].desired)
        assert ready.observed_generation == report.observed_generation == world["generation"]
        deployment = world["deployment"]
        if ready.reason != "NoReplicas":
            assert deployment["status"]["observedGeneration"] == deployment["metadata"]["generation"]
        assert isinstance(world["outcome"].sizing, Sized)
        assert world["outcome"].blocked is None


@given(history=histories)
def test_there_are_events_for_changes_alone(history: list[dict[str, Any]]) -> None:
    status: dict[str, Any] = {}
    for step, world in enumerate(history):
        before = {one["type"]: (one["status"], one["reason"]) for one in status.get("conditions", [])}
        report = after(world, status, NOW + 60 * step)
        reported = {
            event["message"].split(" is ")[0] for event in transition_events(service(world, status), report, NOW)
        }
        status = stored(report)
        changed = {one.type for one in report.conditions if before.get(one.type) != (one.status, one.reason)}

        assert reported <= changed
        assert not before or reported == changed


leaves = st.one_of(st.booleans(), st.integers(), st.text(max_size=3), st.lists(st.integers(), max_size=2))
objects = st.recursive(
    st.dictionaries(st.sampled_from("abc"), leaves, max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abc"), st.one_of(leaves, inner), max_size=3),
    max_leaves=6,
)


def apply(target: Any, patch: dict[str, Any]) -> dict[str, Any]:
    """RFC 7386, section 2, as it is written there."""
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = apply(result.get(key), value) if isinstance(value, dict) else value
    return result


@given(before=objects, after=objects)
def test_applying_the_patch_gives_the_object_that_was_wanted(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert apply(before, merge_patch(before, after)) == after


@given(same=objects)
def test_equal_objects_need_no_patch(same: dict[str, Any]) -> None:
    assert merge_patch(same, same) == {}
