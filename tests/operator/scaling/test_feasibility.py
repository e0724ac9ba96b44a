from __future__ import annotations

import pytest

from llmservice_operator.scaling.feasibility import Feasibility, assess
from llmservice_operator.signals.load import Load, PodLoad

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
            id="not knowing is no verdict to keep",
        ),
        pytest.param(load(0.1, 0.2), None, ("True", "TargetReachable"), id="fast"),
        pytest.param(None, INFEASIBLE, ("False", "UnloadedRequestMissesTarget"), id="silence changes no verdict"),
        pytest.param(load(3.0, 9.0, peak=9), INFEASIBLE, ("False", "UnloadedRequestMissesTarget"), id="nor does load"),
        pytest.param(load(0.1, 0.2), INFEASIBLE, ("True", "TargetReachable"), id="but a kept promise does"),
    ],
)
def test_the_promise_is_judged_by_unloaded_requests(
    now: Load | None, before: Feasibility | None, expected: tuple[str, str]
) -> None:
    verdict = assess(now, 2.0, itl_feasible=None, before=before)

    assert (verdict.status, verdict.reason) == expected


def test_a_promise_on_token_gaps_that_the_card_cannot_keep_is_told_without_traffic() -> None:
    verdict = assess(None, None, itl_feasible=False, before=None)

    assert (verdict.status, verdict.reason) == ("False", "ITLUnreachable")
    assert "slo.itlP99" in verdict.message


def test_no_promise_is_always_kept() -> None:
    assert assess(load(9.0, 9.0), None, itl_feasible=None, before=None).status == "True"
