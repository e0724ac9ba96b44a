from __future__ import annotations

from dataclasses import replace

import pytest

from llmservice_operator.scaling.feasibility import Feasibility, judge
from llmservice_operator.scaling.load import Load, PodLoad
from llmservice_planner.sizing.latency import LatencyModel

NO_TRAFFIC = Feasibility("Unknown", "NoTraffic", "…")
INFEASIBLE = Feasibility("False", "UnloadedRequestMissesTarget", "…")


def load(p50_s: float, p99_s: float, *, peak: float = 1, count: float = 10) -> Load:
    return Load(
        "pods", (PodLoad("a", 0, 0, 0),), ttft_p50_s=p50_s, ttft_p99_s=p99_s, ttft_count=count, peak_in_flight=peak
    )


@pytest.mark.parametrize(
    ("now", "before", "expected"),
    [
        pytest.param(None, None, ("Unknown", "NoTraffic"), id="nothing measured"),
        pytest.param(load(3.0, 4.0), None, ("False", "UnloadedRequestMissesTarget"), id="alone and too slow"),
        pytest.param(load(3.0, 4.0, peak=9), None, ("Unknown", "NotMeasuredUnloaded"), id="slow under load"),
        pytest.param(load(3.0, 4.0, count=2), None, ("Unknown", "NotMeasuredUnloaded"), id="too few to judge"),
        pytest.param(
            load(3.0, 4.0, peak=9),
            NO_TRAFFIC,
            ("Unknown", "NotMeasuredUnloaded"),
            id="not knowing is no answer to keep",
        ),
        pytest.param(load(0.1, 0.2), None, ("True", "TargetReachable"), id="fast"),
        pytest.param(None, INFEASIBLE, ("False", "UnloadedRequestMissesTarget"), id="silence changes no answer"),
        pytest.param(load(3.0, 9.0, peak=9), INFEASIBLE, ("False", "UnloadedRequestMissesTarget"), id="nor does load"),
        pytest.param(load(0.1, 0.2), INFEASIBLE, ("True", "TargetReachable"), id="but a met target does"),
    ],
)
def test_the_target_is_judged_by_unloaded_requests(
    now: Load | None, before: Feasibility | None, expected: tuple[str, str]
) -> None:
    found = judge(now, 2.0, itl_feasible=None, before=before)

    assert (found.status, found.reason) == expected


def test_an_unreachable_itl_target_is_reported_without_traffic() -> None:
    found = judge(None, None, itl_feasible=False, before=None)

    assert (found.status, found.reason) == ("False", "ITLUnreachable")
    assert "slo.itlP99" in found.message


def test_prompts_that_take_longer_than_the_target_alone_are_named_with_the_longest_that_does_not() -> None:
    latency = LatencyModel(0.001, 0.0, 0.01, token_s=0.001, kv_token_s=0.0, pair_s=0.0)
    slow = replace(load(1.0, 6.0, peak=9), prompt_p99_tokens=4000.0)

    found = judge(slow, 2.0, itl_feasible=None, before=None, latency=latency)

    assert (found.status, found.reason) == ("False", "PromptsTooLong")
    assert "at least 4000 tokens to compute, which takes 4.00s" in found.message
    assert "keep prompts below 1999 tokens" in found.message
    half_cached = judge(replace(slow, to_compute=0.4), 2.0, itl_feasible=None, before=None, latency=latency)
    assert half_cached.reason != "PromptsTooLong"
    met = judge(replace(slow, ttft_p99_s=1.9), 2.0, itl_feasible=None, before=None, latency=latency)
    assert met.status == "True"


def test_an_unreachable_itl_target_has_its_numbers() -> None:
    latency = LatencyModel(0.001, 0.0, 0.062, token_s=0.001, kv_token_s=0.0, pair_s=0.0)

    found = judge(None, 2.0, itl_feasible=False, before=None, latency=latency, itl_target_s=0.05)

    assert "on this GPU (63 ms, the target is 50 ms)" in found.message


def test_without_a_target_the_slo_is_feasible() -> None:
    assert judge(load(9.0, 9.0), None, itl_feasible=None, before=None).status == "True"
