from __future__ import annotations

from dataclasses import replace

import pytest

from llmservice_operator.api.autoscaling_spec import Autoscaling
from llmservice_operator.api.spec import Slo
from llmservice_operator.api.status import AutoscalingStatus, CapacityStatus, DecisionStatus, SignalStatus
from llmservice_operator.scaling.decision import Decision
from llmservice_operator.scaling.demand import Demand
from llmservice_operator.scaling.forecast import Capacity, Forecast
from llmservice_operator.scaling.history import CAPACITY_KEEP_S, History
from llmservice_operator.scaling.load import Load, PodLoad
from llmservice_operator.scaling.policy import ScalePolicy
from llmservice_operator.scaling.schedule import GpuHours
from llmservice_operator.status.autoscaling_status import (
    UNLIMITED,
    StatusWriteThrottle,
    WriteAllowance,
    capacity_status,
    demand_status,
    gpu_hours_status,
    log_decision,
    signals_status,
    throttled,
)

NOW = 1_700_000_000.0
STAMP = "2023-11-14T22:13:20Z"
POLICY = ScalePolicy.of(Autoscaling(max_replicas=4, queue_depth=2), Slo(ttft_p99="2s"), max_num_seqs=8)
LOAD = Load("pods", (PodLoad("a", 8, 3, 0.5), PodLoad("b", 4, 0, 0.25)), arrivals_per_s=5.0, ttft_p99_s=0.123456)
NOT_DUE, INCOMPLETE = WriteAllowance(due=False), WriteAllowance(complete=False)
RESUMING = WriteAllowance(due=False, complete=False, resuming=True)


DEMAND = Forecast(
    demand=Demand(10, 9000, 2000, cached_tokens=1000),
    capacity=Capacity("predicted", Demand(2.5, 2250, 500), correction=1.25),
    level=4.0,
    predicted=4.6,
    horizon_s=69.2,
    trend=None,
    recent=4.1,
    is_burst=False,
    request=0.4,
)


def test_the_demand_is_shown_with_what_one_replica_serves_of_it() -> None:
    shown = demand_status(None, DEMAND, UNLIMITED)

    assert shown is not None
    assert (shown.requests_per_second, shown.prompt_tokens_per_second, shown.output_tokens_per_second) == (10, 9e3, 2e3)
    assert (shown.replica_requests_per_second, shown.replica_tokens_per_second) == (2.5, 2750)
    assert (shown.load, shown.predicted_load, shown.horizon_seconds, shown.source) == (4.0, 4.6, 70, "predicted")


def test_small_changes_of_the_demand_are_not_written_and_a_burst_is() -> None:
    shown = demand_status(None, DEMAND, UNLIMITED)

    assert demand_status(shown, replace(DEMAND, level=4.3), UNLIMITED) == shown
    assert demand_status(shown, replace(DEMAND, level=6.0), NOT_DUE) == shown
    burst = demand_status(shown, replace(DEMAND, is_burst=True), NOT_DUE)
    assert burst is not None
    assert burst.burst
    assert demand_status(shown, None, INCOMPLETE) == shown
    assert demand_status(shown, None, UNLIMITED) is None


def test_the_days_gpu_hours_are_written_at_every_hundredth_of_what_it_allows() -> None:
    before = gpu_hours_status(None, GpuHours("2023-11-14", 10.0, NOW), 100)

    assert before is not None
    assert (before.day, before.hours, before.counted_at) == ("2023-11-14", 10.0, STAMP)
    assert gpu_hours_status(before, GpuHours("2023-11-14", 10.9, NOW + 60), 100) == before
    assert gpu_hours_status(before, GpuHours("2023-11-14", 11.1, NOW + 60), 100) != before
    assert gpu_hours_status(before, GpuHours("2023-11-15", 0.1, NOW + 9000), 100) != before
    assert gpu_hours_status(before, GpuHours("2023-11-14", 11.1, NOW + 60), None) is None


def test_the_correction_is_kept_with_the_capacity_for_a_restarted_operator() -> None:
    status = capacity_status(None, (NOW, 2.0), 0.8)

    assert status is not None
    assert capacity_status(status, (NOW + 60, 2.0), 0.82) == status
    assert capacity_status(status, (NOW + 60, 2.0), 0.6) != status
    resumed = History.resume(AutoscalingStatus(desired_replicas=1, capacity=status), 1, NOW + 10)
    assert resumed.correction_at(NOW + 10) == 0.8


def signals(
    load: Load | None,
    policy: ScalePolicy = POLICY,
    capacity_per_s: float | None = None,
    before: tuple[SignalStatus, ...] = (),
    allowance: WriteAllowance = UNLIMITED,
) -> list[SignalStatus]:
    return signals_status(("team-a", "tiny"), load, policy, capacity_per_s, before, allowance)


def test_every_signal_has_its_threshold_unit_and_query() -> None:
    shown = signals(LOAD, capacity_per_s=4.0)

    assert [(one.name, one.value, one.target) for one in shown] == [
        ("queue", 1.5, 2),
        ("utilization", 0.75, 0.8),
        ("kvCache", 0.375, 0.8),
        ("arrivals", 2.5, 3.2),
        ("ttftP99", 0.123, 2),
    ]
    assert all(one.query and one.unit for one in shown)


def test_thresholds_are_shown_before_there_is_a_load() -> None:
    shown = signals(None)

    assert [one.target for one in shown] == [2, 0.8, 0.8, None, 2]
    assert {one.value for one in shown} == {None}


def test_a_changed_threshold_is_shown_at_once() -> None:
    before = tuple(signals(LOAD))

    ttft = signals(replace(LOAD, ttft_p99_s=9.0), replace(POLICY, ttft_p99_s=3.0), None, before, NOT_DUE)[-1]

    assert (ttft.value, ttft.target) == (0.123, 3)


@pytest.mark.parametrize(
    ("before", "now", "allowance", "expected"),
    [
        pytest.param(None, 1.0, UNLIMITED, 1.0, id="the first figure"),
        pytest.param(1.0, 1.09, UNLIMITED, 1.0, id="a small change is not written"),
        pytest.param(1.0, 1.2, UNLIMITED, 1.2, id="a large one is"),
        pytest.param(1.0, 1.2, NOT_DUE, 1.0, id="but not yet"),
        pytest.param(1.0, 0.0, UNLIMITED, 0.0, id="idle"),
        pytest.param(0.0, 0.0, UNLIMITED, 0.0, id="still idle"),
        pytest.param(1.0, None, UNLIMITED, None, id="no figure any more"),
        pytest.param(1.0, None, NOT_DUE, 1.0, id="for a moment"),
        pytest.param(1.0, None, INCOMPLETE, 1.0, id="not known yet"),
        pytest.param(1.0, 2.0, INCOMPLETE, 2.0, id="known before the window is complete"),
    ],
)
def test_a_figure_is_written_seldom(
    before: float | None, now: float | None, allowance: WriteAllowance, expected: float | None
) -> None:
    assert throttled(before, now, allowance) == expected


def test_the_figures_of_a_new_service_are_written_at_once_and_then_every_15_seconds() -> None:
    throttle, due = StatusWriteThrottle(NOW, resumed=False), []
    for passed_s in (0, 5, 10, 15, 20, 30):
        allowance, throttle = throttle.allow(NOW + passed_s, window_s=60)
        due.append(allowance.due)

    assert due == [True, False, False, True, False, True]
    assert allowance.complete


@pytest.mark.parametrize(
    ("passed_s", "expected"),
    [
        pytest.param(0, RESUMING, id="the first pass"),
        pytest.param(14, RESUMING, id="the second and third"),
        pytest.param(15, INCOMPLETE, id="new figures are written"),
        pytest.param(60, UNLIMITED, id="missing figures as well"),
        pytest.param(-3600, UNLIMITED, id="setting the clock does not throttle for ever"),
    ],
)
def test_after_a_restart_the_status_is_kept_at_first(passed_s: float, expected: WriteAllowance) -> None:
    allowance, _ = StatusWriteThrottle(NOW, resumed=True).allow(NOW + passed_s, window_s=60)

    assert allowance == expected


@pytest.mark.parametrize(
    ("capacity", "expected"),
    [
        pytest.param(None, None, id="unknown"),
        pytest.param((NOW + 60, 2.1), (2.0, STAMP), id="much the same"),
        pytest.param((NOW + 60, 3.0), (3.0, "2023-11-14T22:14:20Z"), id="another"),
        pytest.param(
            (NOW + CAPACITY_KEEP_S / 2, 2.1), (2.1, "2023-11-14T22:43:20Z"), id="the same, before the figure is too old"
        ),
    ],
)
def test_the_capacity_is_written_seldom(
    capacity: tuple[float, float] | None, expected: tuple[float, str] | None
) -> None:
    after = capacity_status(CapacityStatus(requests_per_second=2.0, measured_at=STAMP), capacity)

    assert (after and (after.requests_per_second, after.measured_at)) == expected


def decision(replicas: int, wanted: int | None = None) -> Decision:
    return Decision(replicas, replicas if wanted is None else wanted, ("because",))


def logged(*decisions: tuple[float, Decision]) -> list[DecisionStatus]:
    log: list[DecisionStatus] = []
    for time_s, one in decisions:
        log = log_decision(log, one, time_s)
    return log


def kept(log: list[DecisionStatus], capacity: CapacityStatus | None = None) -> AutoscalingStatus:
    return AutoscalingStatus(desired_replicas=3, decisions=log, capacity=capacity)


def test_the_newest_decision_comes_first_and_twelve_are_kept() -> None:
    log = logged(*((NOW + n, decision(n)) for n in range(1, 15)))

    assert [entry.replicas for entry in log] == list(range(14, 2, -1))


def test_a_decision_that_changes_nothing_is_not_logged() -> None:
    log = logged((NOW, decision(2)), (NOW + 5, decision(2)), (NOW + 10, decision(2)))

    assert [entry.time for entry in log] == [STAMP]


def test_the_beginning_of_a_wait_for_fewer_replicas_is_logged() -> None:
    log = logged((NOW, decision(3)), (NOW + 60, decision(3, wanted=1)), (NOW + 65, decision(3, wanted=2)))

    assert [(entry.replicas, entry.wanted) for entry in log] == [(3, 1), (3, 3)]


def test_a_restarted_autoscaler_keeps_the_changes_and_starts_the_wait_for_fewer_replicas_anew() -> None:
    log = logged((NOW, decision(1)), (NOW + 30, decision(3)), (NOW + 60, decision(3, wanted=1)))

    history = History.resume(kept(log), replicas=3, now=NOW + 200)

    assert history.recommendations == ((NOW + 200, 3),)
    assert history.last_up_s == NOW + 30
    assert history.changes == ((NOW + 30, 2),)


def test_a_restarted_autoscaler_resumes_the_capacity() -> None:
    capacity = CapacityStatus(requests_per_second=1.5, measured_at=STAMP)

    assert History.resume(kept([], capacity), replicas=3, now=NOW + 60).capacity == (NOW, 1.5)


def test_a_time_after_now_in_the_status_counts_as_now() -> None:
    """The clock was set back while no operator ran."""
    log = logged((NOW, decision(1)), (NOW + 30, decision(3)), (NOW + 60, decision(3, wanted=1)))

    history = History.resume(kept(log), replicas=3, now=NOW + 10)

    assert history.recommendations == ((NOW + 10, 3),)
    assert history.changes == ((NOW + 10, 2),)
