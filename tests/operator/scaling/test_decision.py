"""The autoscaler as tables: load and supply in, replicas and reasons out; invariants; cases in simulated time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.world.simulated_service import Moment, Sample, SimulatedService
from llmservice_operator.api.autoscaling_spec import ScaleDown
from llmservice_operator.api.resource import LLMService
from llmservice_operator.scaling.analysis import Analysis
from llmservice_operator.scaling.capacity import ReplicaModel
from llmservice_operator.scaling.decision import Decision, decide, decide_wake_up
from llmservice_operator.scaling.demand import NO_DEMAND, Demand
from llmservice_operator.scaling.forecast import Capacity, Forecast, forecast_of
from llmservice_operator.scaling.history import CAPACITY_KEEP_S, History
from llmservice_operator.scaling.load import Held, Load, PodLoad
from llmservice_operator.scaling.policy import ScalePolicy, ScalingRules
from llmservice_operator.scaling.recommendation import optimise
from llmservice_operator.scaling.supply import Supply
from llmservice_operator.sizing import Sized

NOW = 1_000_000.0
ANY_STEP = ScalingRules(replicas=1000, percent=100, period_s=15.0, cooldown_s=0.0)
POLICY = ScalePolicy(
    min_replicas=1,
    max_replicas=8,
    queue_depth=2,
    tolerance=0.1,
    up=ANY_STEP,
    down=replace(ANY_STEP, stabilization_s=300.0),
    window_s=60.0,
    ttft_p99_s=2.0,
    max_num_seqs=8,
)
SETTLED = History.start(NOW - 10_000, 1)


def load(*pods: tuple[float, float], kv_usage: float = 0.0, **signals: object) -> Load:
    """A load of pods given as (running, waiting); p99 TTFT is certain where nothing else is said."""
    signals.setdefault("ttft_certain_s", signals.get("ttft_p99_s"))
    each = tuple(PodLoad(f"pod-{n}", running, waiting, kv_usage) for n, (running, waiting) in enumerate(pods))
    return replace(Load("pods", each), **signals)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("now", "replicas", "expected", "why"),
    [
        pytest.param(load((0, 0)), 1, 1, "slots: 0 running", id="idle stays at the minimum"),
        pytest.param(load((8, 2)), 1, 2, "slots: 8 running", id="full slots ask for one more before a queue forms"),
        pytest.param(load((8, 18)), 1, 3, "queue: 18 waiting", id="26 in flight, 8 run and 2 may wait per replica"),
        pytest.param(load((8, 500)), 1, 8, "bounds: 1 to 8 -> 8", id="never above the maximum"),
        pytest.param(load((4, 0), (4, 0)), 2, 2, "slots: 8 running", id="half full is no reason to change"),
        pytest.param(load((8, 16), (0, 0), (0, 0)), 3, 3, "queue: 16 waiting", id="new pods count: no cascade"),
        pytest.param(
            load((4, 0), admissible=4.0), 1, 2, "slots: 4 running, 4 per", id="long requests leave fewer slots"
        ),
        pytest.param(
            load((8, 0), admissible=99.0), 1, 2, "slots: 8 running, 8 per", id="short ones no more than there are"
        ),
        pytest.param(load((3, 9), kv_usage=0.95), 1, 3, "queue: 9 waiting", id="a full KV cache is a full replica"),
        pytest.param(
            load((2, 3), kv_usage=0.1), 1, 1, "queue: 3 waiting", id="a burst not yet admitted is no overload"
        ),
        pytest.param(
            load((8, 1), arrivals_per_s=6.0, capacity_per_s=1.5),
            1,
            5,
            "arrivals: 6.00/s",
            id="arrivals against the capacity",
        ),
        pytest.param(
            load((5, 0), ttft_p99_s=3.0, ttft_count=20), 1, 2, "ttft: p99 3.00s", id="a missed target adds one"
        ),
        pytest.param(load((5, 0), ttft_p99_s=3.0, ttft_count=19), 1, 1, "too few to tell", id="unless of few requests"),
        pytest.param(
            load((5, 0), ttft_p99_s=3.0, ttft_certain_s=2.0, ttft_count=60), 1, 1, "by chance", id="or by chance"
        ),
        pytest.param(
            load((1, 0), ttft_p99_s=3.0, ttft_count=20), 1, 1, "neither queue nor slots", id="or of one at a time"
        ),
        pytest.param(
            load((1, 3), ttft_p99_s=3.0, ttft_count=20), 1, 2, "ttft: p99 3.00s", id="a queue explains it, too"
        ),
        pytest.param(load((0, 0), ttft_p99_s=3.0), 1, 1, "slots: 0", id="a missed target of the past adds none"),
    ],
)
def test_the_load_sets_the_replicas(now: Load, replicas: int, expected: int, why: str) -> None:
    decision, _ = decide(now, Supply(replicas, ready=replicas), POLICY, SETTLED, NOW)

    assert decision.replicas == expected
    assert any(why in reason for reason in decision.reasons), decision.reasons


def test_a_queue_of_what_is_not_counted_as_a_request_asks_for_replicas() -> None:
    """Inputs to embed: the servers' counts of requests stay at zero."""
    queued = load((0, 500), admissible=8.0, demand=NO_DEMAND)

    decision, _ = decide(queued, Supply(1, ready=1), POLICY, SETTLED, NOW)

    assert decision.replicas == POLICY.max_replicas
    assert any("queue: 500 waiting" in reason for reason in decision.reasons), decision.reasons


def test_what_a_full_replica_does_corrects_the_model_unless_batch_requests_are_there(replica: ReplicaModel) -> None:
    """These are not in the demand whose lengths the work is compared by."""
    slow = PodLoad("pod-0", 20, 9, 0.9, work=Demand(0.1, 100, 20), is_full=True)
    alone = Load("pods", (slow,), demand=Demand(1, 1000, 200))

    after = [
        decide(now, Supply(1, ready=1), POLICY, SETTLED, NOW, model=replica)[1]
        for now in (alone, replace(alone, batch=True))
    ]

    assert after[0].correction_at(NOW) < 1 == after[1].correction_at(NOW)


SLEEPY = replace(POLICY, min_replicas=0, idle_timeout_s=120.0)
EXHAUSTED = replace(SLEEPY, max_replicas=0, why_most="cost: 8.0 of 8 GPU-hours")


@pytest.mark.parametrize(
    ("held", "policy", "expected", "wanted", "why"),
    [
        pytest.param(Held(), SLEEPY, 0, 0, "held: no request -> 0", id="no request"),
        pytest.param(Held(1), EXHAUSTED, 0, 0, "cost: 8.0 of 8 GPU-hours -> 0", id="no GPU-hour is left"),
        pytest.param(None, EXHAUSTED, 0, 0, "cost: 8.0 of 8 GPU-hours -> 0", id="none is left, no gateway was read"),
        pytest.param(Held(1), SLEEPY, 1, 1, "1 requests of 0 tokens wait", id="one request is enough"),
        pytest.param(Held(50), SLEEPY, 5, 5, "a replica runs 8 of them, 2 may wait -> 5", id="as many as hold all"),
        pytest.param(Held(500), SLEEPY, 8, 8, "bounds: 0 to 8 -> 8", id="never above the maximum"),
        pytest.param(
            Held(50), replace(SLEEPY, up=replace(ANY_STEP, replicas=2)), 2, 5, "step: at most 2", id="in steps"
        ),
        pytest.param(
            Held(50),
            replace(SLEEPY, up=ScalingRules(0, 100, 15.0, cooldown_s=600.0, stabilization_s=600.0)),
            1,
            5,
            "-> 1",
            id="but the first one neither in steps nor later",
        ),
    ],
)
def test_requests_that_gateways_hold_scale_up_from_zero(
    held: Held | None, policy: ScalePolicy, expected: int, wanted: int, why: str
) -> None:
    history = replace(SETTLED, changes=((NOW - 1, -1),))

    decision, _ = decide_wake_up(held, policy, history, NOW)

    assert (decision.replicas, decision.wanted, decision.active) == (expected, wanted, True)
    assert any(why in reason for reason in decision.reasons), decision.reasons


def test_a_service_that_no_gateway_can_wake_says_so() -> None:
    decision, _ = decide_wake_up(None, SLEEPY, SETTLED, NOW)

    assert (decision.replicas, decision.active) == (0, False)
    assert "no gateway answers" in decision.reasons[0]


def test_there_is_one_scale_up_however_many_requests_arrive_until_a_pod_is_ready() -> None:
    decision, history = decide_wake_up(Held(1), SLEEPY, SETTLED, NOW)

    for seconds in range(1, 300):
        later, history = decide(None, Supply(decision.replicas, ready=0, starting=1), SLEEPY, history, NOW + seconds)
        assert later.replicas == decision.replicas == 1


def idle_until(ticks: list[tuple[float, Load | None]], policy: ScalePolicy = SLEEPY) -> list[int]:
    """The replicas after each tick, given as seconds and load, of one that serves until it is removed."""
    history, replicas, answer = History.start(NOW, 1), 1, []
    for seconds, now in ticks:
        decision, history = decide(now, Supply(replicas, ready=replicas), policy, history, NOW + seconds)
        replicas = decision.replicas
        answer.append(replicas)
    return answer


QUIET, BUSY = load((0, 0), quiet_s=60.0), load((1, 0))


@pytest.mark.parametrize(
    ("ticks", "zero_at"),
    [
        pytest.param([(t, load((0, 0), quiet_s=min(t, 60.0))) for t in range(0, 300, 5)], 120, id="after the time"),
        pytest.param(
            [(t, BUSY if t <= 100 else load((0, 0), quiet_s=min(t - 100, 60.0))) for t in range(0, 300, 5)],
            220,
            id="since the last request",
        ),
        pytest.param(
            [(t, load((0, 0), quiet_s=t, arrivals_per_s=0.1, capacity_per_s=1.0)) for t in range(0, 300, 5)],
            120,
            id="however long the window of the other signals is",
        ),
        pytest.param([(t, load((0, 0))) for t in range(0, 300, 5)], None, id="not while requests come in between"),
        pytest.param(
            [(t, replace(QUIET, missing=("pod-9",), quiet_s=0.0)) for t in range(0, 300, 5)],
            None,
            id="not with metrics of some pods",
        ),
        pytest.param([(t, None) for t in range(0, 300, 5)], None, id="not without metrics"),
        pytest.param([(0, load((0, 0))), (100, load((0, 0)))], None, id="time without scrapes is not idle"),
    ],
)
def test_the_last_replica_is_removed_after_idle_timeout(
    ticks: list[tuple[float, Load | None]], zero_at: float | None
) -> None:
    replicas = idle_until(ticks)

    assert [t for (t, _), number in zip(ticks, replicas, strict=True) if number == 0][:1] == (
        [] if zero_at is None else [zero_at]
    )


def test_after_a_restart_the_idle_time_begins_with_what_the_metrics_show() -> None:
    decision, history = decide(QUIET, Supply(1, ready=1), SLEEPY, History.start(NOW, 1), NOW)
    assert decision.replicas == 1
    assert history.idle_s == 60.0


def test_the_last_replica_stays_where_one_is_the_minimum() -> None:
    assert idle_until([(t, QUIET) for t in range(0, 2000, 5)], POLICY)[-1] == 1


def test_without_metrics_the_replicas_are_held() -> None:
    decision, _ = decide(None, Supply(3, ready=3), POLICY, SETTLED, NOW)

    assert (decision.replicas, decision.active) == (3, False)
    assert decision.reasons == ("no metrics from any ready pod: holding at 3",)


def test_returning_metrics_do_not_shrink_at_once() -> None:
    history = SETTLED
    for seconds in range(0, 600, 60):
        _, history = decide(None, Supply(3, ready=3), POLICY, history, NOW + seconds)

    decision, _ = decide(load((0, 0), (0, 0), (0, 0)), Supply(3, ready=3), POLICY, history, NOW + 600)

    assert decision.replicas == 3


def test_half_the_metrics_may_add_replicas_but_never_remove_one() -> None:
    quiet = load((0, 0), missing=("pod-9",))
    busy = load((8, 30), missing=("pod-9",))

    held, _ = decide(quiet, Supply(2, ready=2), POLICY, SETTLED, NOW)
    grown, _ = decide(busy, Supply(2, ready=2), POLICY, SETTLED, NOW)

    assert held.replicas == 2
    assert "metrics of 1 of 2 ready pods are missing" in held.reasons[-1]
    assert "queue: 30 waiting" in grown.reasons[0]
    assert grown.replicas == 8  # the silent one has as many


def test_replicas_are_removed_after_a_whole_window_of_low_load() -> None:
    history = History.start(NOW, 4)
    idle, supply = load((0, 0), (0, 0), (0, 0), (0, 0)), Supply(4, ready=4)

    early, history = decide(idle, supply, POLICY, history, NOW + 299)
    late, _ = decide(idle, supply, POLICY, history, NOW + 301)

    assert (early.replicas, early.wanted) == (4, 1)
    assert early.reasons[-1] == "stabilization: 1 must hold for 300s -> 4"
    assert late.replicas == 1


@pytest.mark.parametrize(
    ("changes", "known_s", "kept"),
    [
        pytest.param((), 300, [4, 3, 1], id="half of the surplus goes first"),
        pytest.param(((NOW, 1),), 300, [4, 4, 1], id="not where some were added, for the direction would turn twice"),
        pytest.param((), 0, [4, 4, 1], id="nor where some may have been, just before the operator started"),
    ],
)
def test_the_surplus_is_removed_in_two_steps(
    changes: tuple[tuple[float, int], ...], known_s: float, kept: list[int]
) -> None:
    policy = replace(POLICY, down=replace(ANY_STEP, stabilization_s=300.0, whole_s=150.0))
    history = replace(History.start(NOW, 4, changes=changes), started_s=NOW - known_s)
    idle, supply = load((0, 0), (0, 0), (0, 0), (0, 0)), Supply(4, ready=4)

    assert [decide(idle, supply, policy, history, NOW + after_s)[0].replicas for after_s in (149, 151, 301)] == kept


@pytest.mark.parametrize(("burst_ago_s", "kept"), [(None, [4, 3, 1, 1]), (299, [4, 4, 4, 1]), (450, [4, 3, 1, 1])])
def test_soon_after_a_burst_the_surplus_is_kept_for_one_start_more(burst_ago_s: float | None, kept: list[int]) -> None:
    """Of 30 s, of which half of the surplus is kept for four and all of it for half a start. The first decision is at
    once, and a burst that is 300 s ago counts no more."""
    policy = replace(POLICY, down=ScalingRules.of(ScaleDown()))
    burst_s = None if burst_ago_s is None else NOW - burst_ago_s + 151
    history = replace(History.start(NOW, 4), started_s=NOW - 600, burst_s=burst_s)
    idle, supply = load((0, 0), (0, 0), (0, 0), (0, 0)), Supply(4, ready=4, lead_s=30)

    assert [decide(idle, supply, policy, history, NOW + after_s)[0].replicas for after_s in (14, 16, 121, 151)] == kept


def test_a_short_burst_is_waited_out_where_scale_up_is_stabilised() -> None:
    policy = replace(POLICY, up=replace(ANY_STEP, stabilization_s=10.0))
    history = History.start(NOW, 1)
    burst, supply = load((8, 18)), Supply(1, ready=1)

    early, history = decide(burst, supply, policy, history, NOW + 5)
    later, history = decide(burst, supply, policy, history, NOW + 9)
    late, _ = decide(burst, supply, policy, history, NOW + 11)

    assert [early.replicas, later.replicas, late.replicas] == [1, 1, 3]


def test_after_a_burst_of_arrivals_growing_waits_for_nothing() -> None:
    policy = replace(POLICY, up=replace(ANY_STEP, stabilization_s=10.0))
    history = replace(History.start(NOW, 1), burst_s=NOW)

    decision, _ = decide(load((8, 18)), Supply(1, ready=1), policy, history, NOW + 5)

    assert decision.replicas == 3


def test_growth_is_answered_at_once_and_predicted_from_what_runs_on(replica: ReplicaModel) -> None:
    policy = replace(POLICY, up=replace(ANY_STEP, stabilization_s=10.0), max_replicas=100, max_num_seqs=32)
    rates = [20, 22, 24, 26, 28, 30, 32, 34]
    samples = [(NOW + 15 * (number - 7), Demand(rate, 1000 * rate, 200 * rate)) for number, rate in enumerate(rates)]
    history = replace(History.start(NOW - 10_000, 30), demands=tuple(samples[:-1])).remember(NOW - 5, 30, 300.0)

    def decided(running: int, replicas: int = 30) -> tuple[Decision, Forecast]:
        now = load(*[(running, 0)] * replicas, demand=samples[-1][1])
        decision, _ = decide(now, Supply(replicas, ready=replicas, lead_s=30), policy, history, NOW, model=replica)
        assert decision.forecast is not None
        return decision, decision.forecast

    (_, few), (more, many), (surplus, _) = decided(1), decided(22), decided(1, replicas=90)

    assert (few.running or 0) < few.level < few.predicted
    assert (many.running or 0) > few.predicted
    assert many.predicted > (many.running or 0)
    assert more.replicas == more.wanted > 30
    assert surplus.wanted < surplus.replicas == 90
    assert surplus.reasons[-1] == "hold: the load grows, not shrinking"


def test_a_likely_growth_removes_nothing(replica: ReplicaModel) -> None:
    policy = replace(POLICY, max_replicas=100, max_num_seqs=32)
    samples = [
        (NOW - 15 * back, Demand(rate, 1000 * rate, 200 * rate))
        for rate, back in zip([20] * 4 + [22] * 4, range(7, -1, -1), strict=True)
    ]
    history = replace(History.start(NOW - 10_000, 90), demands=tuple(samples[:-1])).remember(NOW - 5, 60, 300.0)

    idle = load(*[(1, 0)] * 90, demand=samples[-1][1])
    decision, _ = decide(idle, Supply(90, ready=90, lead_s=30), policy, history, NOW, model=replica)

    assert decision.wanted < decision.replicas == 90
    assert decision.reasons[-1] == "hold: the load may be growing, not shrinking"


DEMAND = Demand(10, 9000, 2000)
FORECAST = Forecast(
    DEMAND,
    Capacity("predicted", DEMAND.scaled(1 / 2.6)),
    level=2.6,
    predicted=2.6,
    horizon_s=30,
    trend=None,
    recent=2.6,
    is_burst=False,
    request=0.4,
)


def asked(now: Load, forecast: Forecast, supply: Supply, changes: tuple[tuple[float, int], ...] = ()) -> int:
    analysis = Analysis(None, busy=1.0, utilization=1.0, arrivals=None, capacity_per_s=None, forecast=forecast)
    return optimise(analysis, now, supply, POLICY, History.start(NOW, 1, changes=changes), NOW, feasible=True).replicas


@pytest.mark.parametrize(("age_s", "expected"), [(0, 6), (10, 5), (20, 4)])
def test_a_queue_asks_for_what_comes_until_new_replicas_serve(age_s: float, expected: int) -> None:
    """10 requests of 0.4 s wait beyond the queue's depth; 2.6 replicas' load comes, for a start of 30 s.

    Of the three replicas one serves, and two have been starting for so long.
    """
    supply = Supply(3, ready=1, starting=2, lead_s=30, ahead_s=2 * age_s)

    assert asked(load((8, 10 + POLICY.queue_depth)), FORECAST, supply) == expected


@pytest.mark.parametrize(("running", "replicas", "expected"), [(0.79, 1, 1), (0.81, 1, 2), (1.59, 3, 2), (1.61, 3, 3)])
def test_running_requests_add_and_keep_the_replicas_that_they_need(
    running: float, replicas: int, expected: int
) -> None:
    """One may be used to 80 %, without the tolerance of 10 %."""
    forecast = replace(FORECAST, level=0.5, predicted=0.5, recent=0.5, running=running)
    now = load(*[(6 / replicas, 0)] * replicas)

    assert asked(now, forecast, Supply(replicas, ready=replicas)) == expected


@pytest.mark.parametrize(("running", "removed_ago_s", "expected"), [(0.87, 299, 1), (0.89, 299, 2), (0.87, 301, 2)])
def test_a_removed_replica_returns_only_for_a_need_beyond_the_tolerance(
    running: float, removed_ago_s: float, expected: int
) -> None:
    forecast = replace(FORECAST, level=0.5, predicted=0.5, recent=0.5, running=running)

    assert asked(load((6, 0)), forecast, Supply(1, ready=1), changes=((NOW - removed_ago_s, -1),)) == expected


def test_after_a_burst_the_demand_is_that_since_then(replica: ReplicaModel) -> None:
    samples = tuple((NOW - 15 * age, Demand(rate, 1000 * rate, 200 * rate)) for age, rate in ((3, 5), (2, 5), (1, 20)))
    now = load((6, 0), demand=Demand(20, 20_000, 4000))

    def level(burst_s: float | None) -> float:
        history = replace(History.start(NOW, 1), demands=(*samples, (NOW, now.demand or NO_DEMAND)), burst_s=burst_s)
        found = forecast_of(now, Supply(1, ready=1), POLICY, history, replica, NOW)
        assert found is not None
        return found.demand.requests

    assert (level(None), level(NOW - 15)) == (12.5, 20)


@pytest.mark.parametrize(("removed_ago_s", "grows"), [(299, False), (301, True)])
def test_growth_is_not_extrapolated_soon_after_a_replica_was_removed(
    replica: ReplicaModel, removed_ago_s: float, grows: bool
) -> None:
    rates = [20, 20, 20, 20, 40, 40, 40, 40]
    samples = tuple((NOW + 15 * (number - 7), Demand(rate, 1000 * rate)) for number, rate in enumerate(rates))
    history = replace(History.start(NOW, 9, changes=((NOW - removed_ago_s, -1),)), demands=samples)

    found = forecast_of(load((6, 0), demand=samples[-1][1]), Supply(9, ready=9), POLICY, history, replica, NOW)

    assert found is not None
    assert found.may_grow
    assert (found.trend is not None, found.predicted > found.level) == (grows, grows)


@pytest.mark.parametrize(
    ("pods", "expected"),
    [
        pytest.param(((3, 0), (3, 0)), 2, id="the one that stays would be busy"),
        pytest.param(((0, 0), (1, 0)), 1, id="it would not: one replica is as fast as two"),
    ],
)
def test_a_nearly_missed_target_keeps_replicas_that_the_load_uses(
    pods: tuple[tuple[float, float], ...], expected: int
) -> None:
    decision, _ = decide(load(*pods, ttft_p99_s=1.9), Supply(2, ready=2), POLICY, SETTLED, NOW)

    assert decision.replicas == expected
    assert ("close to the target of 2.00s" in decision.reasons[-1]) == (expected == 2)


def test_a_target_that_no_replica_can_meet_adds_and_holds_none() -> None:
    slow = load((1, 0), (0, 0), ttft_p99_s=9.0)

    decision, _ = decide(slow, Supply(2, ready=2), POLICY, SETTLED, NOW, feasible=False)

    assert decision.replicas == 1


@pytest.mark.parametrize(
    ("supply", "last_up_s", "expected"),
    [
        pytest.param(Supply(2, ready=1, starting=1), None, 2, id="one is starting"),
        pytest.param(Supply(2, ready=2), NOW - 119, 2, id="one had its start, but no whole window"),
        pytest.param(Supply(2, ready=2), NOW - 121, 3, id="the last one had both"),
    ],
)
def test_a_missed_target_waits_for_the_replica_that_was_just_added(
    supply: Supply, last_up_s: float | None, expected: int
) -> None:
    history = replace(SETTLED, changes=() if last_up_s is None else ((last_up_s, 1),))

    slow = load((5, 0), (5, 0), ttft_p99_s=5.0, ttft_count=60)
    decision, _ = decide(slow, supply, POLICY, history, NOW)

    assert decision.replicas == expected


def test_starting_pods_are_supply_and_overdue_ones_are_not() -> None:
    busy = load((8, 10))

    patient, _ = decide(busy, Supply(2, ready=1, starting=1), POLICY, SETTLED, NOW)
    impatient, _ = decide(busy, Supply(2, ready=1, overdue=1), POLICY, SETTLED, NOW)

    assert patient.replicas == 2
    assert impatient.replicas == 3
    assert "1 pods are overdue" in impatient.reasons[-1]


@pytest.mark.parametrize(
    ("supply", "expected", "why"),
    [
        pytest.param(Supply(2, ready=1, overdue=1), 3, "1 pods are overdue and not counted on", id="one more"),
        pytest.param(Supply(8, ready=1, overdue=7), 4, "7 pods are overdue and not counted on", id="a step at most"),
        pytest.param(
            Supply(2, ready=1, overdue=1, trouble="CrashLoopBackOff"), 2, "CrashLoopBackOff would", id="none that crash"
        ),
    ],
)
def test_overdue_pods_are_replaced_by_one_step_at_most(supply: Supply, expected: int, why: str) -> None:
    policy = replace(POLICY, up=replace(ANY_STEP, replicas=2))

    decision, _ = decide(load((8, 10)), supply, policy, SETTLED, NOW)

    assert decision.wanted == expected
    assert any(why in reason for reason in decision.reasons), decision.reasons


@pytest.mark.parametrize(
    ("lead_s", "expected"),
    [
        pytest.param(60.0, 5, id="a minute's arrivals and the queue"),
        pytest.param(600.0, 4, id="in ten minutes fewer do: the arrivals rule"),
        pytest.param(10.0, 8, id="in ten seconds more: as many as hold them all, up to the maximum"),
    ],
)
def test_a_queue_asks_for_replicas_that_finish_it_while_one_starts(lead_s: float, expected: int) -> None:
    measured = replace(SETTLED, capacity=(NOW, 1.0))
    queued = load((8, 130), arrivals_per_s=3.0)

    decision, _ = decide(queued, Supply(1, ready=1, lead_s=lead_s), POLICY, measured, NOW)

    assert decision.replicas == expected


def test_a_queue_of_pods_that_cannot_start_asks_for_no_more() -> None:
    supply = Supply(3, ready=1, starting=2, trouble="ImagePullBackOff")

    decision, _ = decide(load((8, 500)), supply, POLICY, SETTLED, NOW)

    assert decision.replicas == 3


def test_one_low_reading_of_the_capacity_changes_little() -> None:
    """A regression: it asked for 36 replicas for an hour, since no replica was full any more."""
    policy, measured = replace(POLICY, max_replicas=60), replace(SETTLED, capacity=(NOW - 5, 1.0))
    stalled = load((8, 1), (7, 0), (7, 0), arrivals_per_s=2.3, capacity_per_s=0.08, finished_per_s=0.7)

    decision, _ = decide(stalled, Supply(3, ready=3), policy, measured, NOW)

    assert decision.wanted == 3


@pytest.mark.parametrize(
    ("silent", "expected"), [pytest.param(1, 1, id="one in eleven"), pytest.param(2, 12, id="one in six")]
)
def test_few_missing_pods_are_assumed_to_be_like_the_others(silent: int, expected: int) -> None:
    idle = load(*((0, 0),) * (12 - silent), missing=tuple(f"gone-{n}" for n in range(silent)))
    policy, supply = replace(POLICY, max_replicas=12), Supply(12, ready=12)

    decision, history = decide(idle, supply, policy, SETTLED, NOW)

    assert decision.replicas == expected
    assert history.recommendations[-1] == (NOW, 1)  # a held number is no recommendation


def test_an_old_measurement_of_the_capacity_is_forgotten() -> None:
    stale = replace(SETTLED, capacity=(NOW - CAPACITY_KEEP_S - 1, 0.5))

    decision, _ = decide(load((1, 0), arrivals_per_s=4.0), Supply(1, ready=1), POLICY, stale, NOW)

    assert decision.replicas == 1


def test_a_steady_load_keeps_its_replicas_long_after_they_were_last_full() -> None:
    """4/s need four replicas of 1.5/s at 80 %, however few requests happen to run when one looks."""
    measured = replace(History.start(NOW - 600, 4), capacity=(NOW - 600, 1.5))

    decision, _ = decide(load((1, 0), (0, 0), (1, 0), (0, 0), arrivals_per_s=4.0), Supply(4, 4), POLICY, measured, NOW)

    assert decision.replicas == 4


def test_a_changed_spec_forgets_the_capacity() -> None:
    assert replace(SETTLED, capacity=(NOW, 1.5)).forget_capacity().capacity is None


loads = st.builds(
    load,
    st.tuples(st.floats(0, 8), st.floats(0, 200)),
    kv_usage=st.floats(0, 1),
    arrivals_per_s=st.none() | st.floats(0, 100),
    capacity_per_s=st.none() | st.floats(0.01, 10),
    ttft_p99_s=st.none() | st.floats(0, 60),
    missing=st.sampled_from([(), ("gone",)]),
)
supplies = st.builds(Supply, st.integers(0, 20), st.integers(0, 8), st.integers(0, 4), st.integers(0, 4))
histories = st.builds(
    History,
    recommendations=st.lists(st.tuples(st.floats(NOW - 400, NOW), st.integers(0, 20)), max_size=5).map(tuple),
    changes=st.lists(st.tuples(st.floats(NOW - 400, NOW), st.integers(-5, 5)), max_size=4).map(tuple),
    capacity=st.none() | st.tuples(st.floats(NOW - 400, NOW), st.floats(0.01, 10)),
)


@given(now=st.none() | loads, supply=supplies, history=histories, feasible=st.booleans())
def test_a_decision_is_always_within_the_users_bounds(
    now: Load | None, supply: Supply, history: History, feasible: bool
) -> None:
    decision, _ = decide(now, supply, POLICY, history, NOW, feasible=feasible)

    assert POLICY.min_replicas <= decision.replicas <= POLICY.max_replicas


@given(now=loads, supply=supplies, history=histories)
def test_missing_metrics_never_shrink(now: Load, supply: Supply, history: History) -> None:
    kept = min(supply.replicas, POLICY.max_replicas)

    blind, _ = decide(None, supply, POLICY, history, NOW)
    half, _ = decide(replace(now, missing=("gone",)), supply, POLICY, history, NOW)

    assert blind.replicas >= kept
    assert half.replicas >= kept


@given(now=loads, supply=supplies, history=histories)
def test_every_decision_has_reasons(now: Load, supply: Supply, history: History) -> None:
    decision, _ = decide(now, supply, POLICY, history, NOW)

    assert decision.reasons
    assert all(decision.reasons)


Simulate = Callable[..., list[Sample]]


@pytest.fixture
def simulate(service_of: Callable[..., LLMService], sized: Sized) -> Simulate:
    """Runs a service of at most 60 replicas, by default for an hour."""

    def run(
        moment_at: Moment | Callable[[float], Moment],
        replicas: int = 1,
        duration_s: float = 3600,
        learned_s: float = 60.0,
        **autoscaling: Any,
    ) -> list[Sample]:
        autoscaling = {"minReplicas": 1, "maxReplicas": 60, "queueDepth": 4, **autoscaling}
        service = service_of(autoscaling=autoscaling, slo={"ttftP99": "2s"})
        simulated = SimulatedService(service, sized, replicas, learned_s=learned_s)
        return simulated.run(duration_s, moment_at if callable(moment_at) else lambda _: moment_at)

    return run


def most(samples: list[Sample]) -> int:
    return max(sample.replicas for sample in samples)


def test_a_missed_target_that_the_load_does_not_explain_adds_no_replica(simulate: Simulate) -> None:
    """One request at a time, whose first token takes three seconds."""
    one_at_a_time = Moment(arrivals_per_s=0.4, service_s=2.5, ttft_s=2.6)

    assert most(simulate(one_at_a_time, duration_s=1260)) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("learned_s", "expected"),
    [pytest.param(600.0, 12, id="as pods did before"), pytest.param(60.0, 16, id="longer than ever before")],
)
def test_a_slow_start_asks_for_replicas_that_finish_the_queue_in_that_time(
    learned_s: float, expected: int, simulate: Simulate
) -> None:
    """5.6 requests per second need seven replicas at 80 %, and a pod takes ten minutes to start."""

    def moment_at(at_s: float) -> Moment:
        return Moment(arrivals_per_s=0.5 if at_s < 300 else 5.6, startup_s=600)

    samples = simulate(moment_at, duration_s=2 * 3600, learned_s=learned_s)

    assert 7 <= most(samples) <= expected
    assert samples[-1].replicas == 7
    assert samples[-1].waiting == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        pytest.param(Moment(7.8, crashing=True), 10, id="pods crash: more of them would crash as well"),
        pytest.param(Moment(14.0, quota=10), 18, id="the quota is used up: the load asks for 18, the queue for none"),
        pytest.param(
            Moment(7.8, hanging=True), 16, id="pods hang for an unknown reason: one step more than the queue's"
        ),
    ],
)
def test_pods_that_do_not_start_are_not_replaced_without_end(fault: Moment, expected: int, simulate: Simulate) -> None:
    """Ten replicas hold the load; from the fifth minute on half of them don't serve, and requests queue up."""
    samples = simulate(lambda at_s: Moment(7.8) if at_s < 300 else fault, replicas=10, duration_s=3600)

    assert 10 <= most(samples) <= expected


def test_one_low_reading_of_the_capacity_asks_for_no_replicas(simulate: Simulate) -> None:
    """The pods stall for half a minute, as they do when kernels are compiled."""

    def moment_at(at_s: float) -> Moment:
        return Moment(arrivals_per_s=2.3, service_s=8.0 if not 600 < at_s <= 630 else 400.0)

    samples = simulate(moment_at, replicas=3, duration_s=2 * 3600)

    assert most(samples) <= 8
    assert samples[-1].replicas <= 4


@pytest.mark.parametrize("every", [2, 3])
def test_metrics_that_are_there_every_other_tick_are_enough_to_grow_and_to_shrink(
    every: int, simulate: Simulate
) -> None:
    def moment_at(at_s: float) -> Moment:
        return Moment(arrivals_per_s=3.0 if at_s < 1200 else 0.2, blind=bool(at_s / 5 % every))

    samples = simulate(moment_at, duration_s=2400)

    assert max(sample.replicas for sample in samples if sample.at_s < 300) >= 4
    assert samples[-1].replicas == 1


@pytest.mark.parametrize("replicas", [3, 40])
def test_one_failed_scrape_in_a_hundred_does_not_keep_idle_replicas(replicas: int, simulate: Simulate) -> None:
    ticks = iter(range(10**6))

    samples = simulate(Moment(arrivals_per_s=0.1, silent=lambda _: next(ticks) % 100 == 0), replicas, duration_s=900)

    assert samples[-1].replicas == 1


@pytest.mark.parametrize("lanes", [True, False])
@pytest.mark.parametrize(("batch", "expected"), [(None, 1), ("fill", 1), ("scale", 12)])
def test_an_endless_batch_backlog_adds_replicas_only_where_it_is_to(
    batch: str | None, expected: int, lanes: bool, simulate: Simulate
) -> None:
    """With and without servers that report running requests by lane."""
    queue = Moment(arrivals_per_s=0.5, batch_waiting=500, lanes=lanes)
    mode = {} if batch is None else {"batch": batch}

    assert most(simulate(queue, maxReplicas=12, duration_s=1200, **mode)) == expected


def test_interactive_requests_scale_beside_a_batch_backlog(simulate: Simulate) -> None:
    def moment_at(at_s: float) -> Moment:
        return Moment(arrivals_per_s=3.0 if at_s < 1800 else 0.3, batch_waiting=500)

    samples = simulate(moment_at)

    assert samples[300].replicas == 4
    assert most(samples) <= 12
    assert samples[-1].replicas == 1


@pytest.mark.parametrize("set_by_s", [-3600.0, -110.0, 110.0, 3600.0])
def test_a_clock_that_is_set_shrinks_nothing_early(set_by_s: float, simulate: Simulate) -> None:
    """The load goes at 600 s and the clock is set at 650 s; five minutes have to pass in any case."""

    def moment_at(at_s: float) -> Moment:
        return Moment(arrivals_per_s=3.0 if at_s < 600 else 0.1, set_by_s=0.0 if at_s < 650 else set_by_s)

    def shrunk_s(samples: list[Sample]) -> float:
        return next(sample.at_s for sample in samples if sample.at_s > 600 and sample.replicas < 4)

    assert shrunk_s(simulate(moment_at, replicas=4)) == shrunk_s(
        simulate(lambda at_s: replace(moment_at(at_s), set_by_s=0.0), replicas=4)
    )
