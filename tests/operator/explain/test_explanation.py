from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import llmservice_operator
from llmservice_operator.explain.explanation import Explanation, World, explain, remedy
from llmservice_operator.explain.text import WIDTH, age, render

NOW = 1_700_000_000.0
STAMP = "2023-11-14T22:10:00Z"
"""200 seconds before NOW."""


def condition(kind: str, status: str = "True", reason: str = "Serving", message: str = "fine") -> dict[str, Any]:
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message,
        "lastTransitionTime": STAMP,
        "observedGeneration": 2,
    }


STUCK = "1 of 3 replicas are ready; Unschedulable: 0/4 nodes are available: 4 Insufficient nvidia.com/gpu."
SIZING = {
    "maxNumSeqs": 256,
    "guaranteedSequences": 54,
    "expectedSequences": 289,
    "maxModelLen": 8192,
    "kvBytesPerToken": 131072,
    "weightsGiB": 14.96,
    "overheadGiB": 2.1,
    "kvPoolGiB": 54.2,
    "blocks": 27750,
    "limitedBy": "ridge",
    "measured": {"blocks": 27410, "errorPercent": 1.2},
    "explanation": "kv per token    2 * 32 layers * 8 heads * 128 * 2 bytes = 128 KiB\nblocks          27750",
}
AUTOSCALING = {
    "desiredReplicas": 3,
    "signals": [
        {"name": "queue", "value": 9, "target": 4, "unit": "waiting requests per replica", "query": "sum(x)"},
        {"name": "ttftP99", "value": 0.41, "target": 2, "unit": "seconds", "query": "histogram_quantile(0.99, x)"},
        {"name": "arrivals", "unit": "requests per second per replica", "query": "rate(x)"},
    ],
    "decisions": [
        {"time": STAMP, "wanted": 3, "replicas": 3, "reasons": ["queue: 18 waiting -> 3"]},
        {"time": "2023-11-14T20:10:00Z", "wanted": 1, "replicas": 1, "reasons": ["slots: 0 running -> 1"]},
    ],
}


def service(*conditions: dict[str, Any], generation: int = 2, **status: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "chat", "namespace": "team-a", "uid": "u", "generation": generation},
        "spec": {"model": {"uri": "hf://org/chat"}, "autoscaling": {"minReplicas": 1, "maxReplicas": 8}},
        "status": {"observedGeneration": 2, "conditions": list(conditions), **status},
    }


def pod(name: str, **status: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "uid": name, "creationTimestamp": STAMP},
        "status": {"podIP": "10.0.0.1", **status},
    }


READY_POD = pod("chat-1", conditions=[{"type": "Ready", "status": "True", "lastTransitionTime": STAMP}])
STUCK_POD = pod(
    "chat-2", conditions=[{"type": "PodScheduled", "status": "False", "message": "4 Insufficient nvidia.com/gpu"}]
)
EVENT = {
    "metadata": {"name": "e"},
    "lastTimestamp": STAMP,
    "type": "Normal",
    "reason": "ScaledUp",
    "message": "1 -> 3 replicas: queue: 18 waiting -> 3",
    "count": 2,
}


def troubled() -> Explanation:
    status = {"readyReplicas": 1, "sizing": SIZING, "autoscaling": AUTOSCALING}
    conditions = [
        condition("Ready", "False", "Unschedulable", STUCK),
        condition("Progressing", "True", "Unschedulable", STUCK),
        condition("SizingValid", reason="Fits"),
        condition("ScalingActive", reason="FollowingLoad"),
        condition("SLOFeasible", reason="TargetReachable"),
    ]
    line = '{"level": "info", "event": "listening"}'
    return explain(World(service(*conditions, **status), None, [READY_POD, STUCK_POD], [EVENT], {"chat-1": line}))


@pytest.mark.parametrize(
    ("conditions", "problems"),
    [
        pytest.param([], ["NotReconciled"], id="no operator"),
        pytest.param([condition("Ready")], [], id="all is well"),
        pytest.param([condition("Ready", "False", "OOMKilled", "x")], ["OOMKilled"], id="not ready"),
        pytest.param(
            [condition("Ready"), condition("Progressing", "True", "RollingOut")], [], id="a rollout is no problem"
        ),
        pytest.param([condition("Ready", "False", "ScaledToZero")], [], id="nor is the autoscaler's zero"),
        pytest.param(
            [
                condition("Ready", "False", "ScaledToZero"),
                condition("ScalingActive", "False", "NoGateway"),
            ],
            ["NoGateway"],
            id="but one that nothing could end is",
        ),
        pytest.param(
            [condition("Ready"), condition("Progressing", "False", "ProgressDeadlineExceeded", "late")],
            ["ProgressDeadlineExceeded"],
            id="one that hangs is",
        ),
        pytest.param(
            [condition("Ready"), condition("ScalingActive", "False", "FixedReplicas")], [], id="fixed replicas"
        ),
        pytest.param(
            [condition("Ready"), condition("ScalingActive", "False", "NoMetrics", "holding")], ["NoMetrics"], id="blind"
        ),
        pytest.param(
            [condition("Ready"), condition("SLOFeasible", "Unknown", "NoTraffic", "none")], [], id="no traffic"
        ),
        pytest.param(
            [condition("Ready"), condition("SLOFeasible", "False", "ITLUnreachable", "too slow")],
            ["ITLUnreachable"],
            id="a target that cannot be met",
        ),
        pytest.param(
            [condition("Ready", "False", "DoesNotFit", "big"), condition("SizingValid", "False", "DoesNotFit", "big")],
            ["DoesNotFit"],
            id="what two conditions state is reported once",
        ),
        pytest.param(
            [
                condition(
                    "Ready", "False", "AdmissionDenied", "0 of 1 replicas are ready; AdmissionDenied: no hostPath"
                ),
                condition("Progressing", "True", "AdmissionDenied", "no hostPath"),
            ],
            ["AdmissionDenied"],
            id="also with the number of replicas before it",
        ),
        pytest.param(
            [
                condition("Ready", "False", "ServingEarlierSpec", "1 replicas serve; AdmissionDenied: no hostPath"),
                condition("Progressing", "True", "AdmissionDenied", "no hostPath"),
            ],
            ["ServingEarlierSpec", "AdmissionDenied"],
            id="with another reason there is another remedy",
        ),
    ],
)
def test_the_problems_of_a_service(conditions: list[dict[str, Any]], problems: list[str]) -> None:
    explanation = explain(World(service(*conditions), None, [], []))

    assert [problem.reason for problem in explanation.problems] == problems
    assert explanation.healthy == (not problems)


def test_a_status_of_an_earlier_spec_is_a_problem() -> None:
    explanation = explain(World(service(condition("Ready"), generation=3), None, [], []))

    assert [problem.reason for problem in explanation.problems] == ["BehindSpec"]


GOLDEN = """\
chat in team-a: hf://org/chat, served as chat
!!  Unschedulable: 1 of 3 replicas are ready; Unschedulable: 0/4 nodes are available: 4 Insufficient
    nvidia.com/gpu.

    Ready: Unschedulable for 3m
      -> Free or add a node with such a GPU, or ask for less in spec.resources and spec.scheduling.
         Details: kubectl describe pods -n team-a -l app.kubernetes.io/instance=chat

Sizing: at most 256 sequences in a step, limited by ridge
  the KV cache holds 54 sequences of 8192 tokens, 289 of the expected length
  weights 14.96 GiB + overhead 2.1 GiB, KV pool 54.2 GiB at 131,072 B per token
  blocks: 27,750 predicted, 27,410 measured by the pods (1.2 % too many predicted)
  | kv per token    2 * 32 layers * 8 heads * 128 * 2 bytes = 128 KiB
  | blocks          27750

Scaling: 1 of 3 replicas ready, 1 to 8 allowed
  signal            now  threshold
  queue               9          4  waiting requests per replica  <- over
  ttftP99          0.41          2  seconds
  arrivals            -          -  requests per second per replica
  3m ago: 1 -> 3 replicas
      queue: 18 waiting -> 3
  2h ago: 1 replicas
      slots: 0 running -> 1

Pods:
  chat-1  Ready, 3m old
      log: {"level": "info", "event": "listening"}
  chat-2  Unschedulable, 3m old
      4 Insufficient nvidia.com/gpu

Events:
    3m ago  ScaledUp (x2): 1 -> 3 replicas: queue: 18 waiting -> 3
"""


def test_the_text_says_what_is_wrong_first() -> None:
    assert render(troubled(), NOW, colour=False) == GOLDEN


def test_the_last_start_from_zero_is_shown_by_its_parts() -> None:
    parts = {"scheduling": 5, "fetching": 20.5, "loading": 10, "compiling": 7}
    start = {"readyAt": STAMP, "seconds": 42.5, **parts}
    asleep = service(
        condition("Ready", "False", "ScaledToZero", "there is no request"),
        autoscaling={"desiredReplicas": 0, "lastColdStart": start},
    )

    text = render(explain(World(asleep, None, [], [])), NOW, colour=False)

    assert "OK  there is no request\n" in text
    assert "took 42.5 s: scheduling 5, fetching 20.5, loading" in text


def test_a_service_with_fixed_replicas_has_no_decisions() -> None:
    fixed = service(condition("Ready"), autoscaling={"desiredReplicas": 1}, readyReplicas=1)
    del fixed["spec"]["autoscaling"]

    text = render(explain(World(fixed, None, [], [])), NOW, colour=False)

    assert "Scaling: 1 of 1 replicas ready, fixed\n\nPods: none" in text


def test_colour_only_adds_to_the_text() -> None:
    coloured = render(troubled(), NOW, colour=True)

    assert "\x1b[31m!!" in coloured
    for code in ("\x1b[31m", "\x1b[1m", "\x1b[0m"):
        coloured = coloured.replace(code, "")
    assert coloured == GOLDEN


def test_lines_fit_a_terminal_and_have_no_control_characters() -> None:
    crash = {"name": "server", "state": {"terminated": {"exitCode": 1, "message": "\x1b[2J" + "x" * 500}}}
    said = World(
        service(condition("Ready", "False", "CrashLoopBackOff", "y " * 300)),
        None,
        [pod("p", containerStatuses=[crash])],
        [],
    )

    text = render(explain(said), NOW, colour=False)

    assert "CrashLoopBackOff" in text
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= WIDTH


def test_the_document_has_the_content_of_the_text() -> None:
    found = json.loads(json.dumps(troubled().document()))

    assert (found["healthy"], found["problems"][0]["reason"]) == (False, "Unschedulable")
    assert found["replicas"] == {"desired": 3, "ready": 1, "min": 1, "max": 8}
    assert found["sizing"]["measured"]["errorPercent"] == 1.2
    assert found["autoscaling"]["signals"][0]["query"] == "sum(x)"
    assert [line["state"] for line in found["pods"]] == ["Ready", "Unschedulable"]
    assert found["events"][0]["count"] == 2


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59, "59s"), (60, "1m"), (7199, "1h"), (200_000, "2d"), (-5, "0s")]
)
def test_ages_are_short(seconds: int, text: str) -> None:
    assert age("2023-11-14T22:13:20Z", NOW + seconds) == text


SOURCE = Path(llmservice_operator.__file__).parent
REPORTERS = {"Trouble", "SizingProblem", "ModelSourceError"}
"""What carries a reason, as its first argument, from where something is wrong into a condition."""


def reasons() -> Iterator[str]:
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) in REPORTERS and node.args:
                first = node.args[0]
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    yield first.value


@pytest.mark.parametrize("reason", sorted(set(reasons())))
def test_every_reason_of_a_trouble_has_a_remedy(reason: str) -> None:
    """A new reason wants a sentence in operator/llmservice_operator/explain/explanation.py."""
    assert remedy(reason, "team-a", "tiny")


def test_commands_name_the_service() -> None:
    assert "-n team-a" in str(remedy("CrashLoopBackOff", "team-a", "tiny"))
    assert "instance=tiny" in str(remedy("Unschedulable", "team-a", "tiny"))


def test_healthy_reasons_have_no_remedy() -> None:
    assert remedy("Serving", "team-a", "tiny") is None
