"""Invariants of the autoscaler over random histories, missing samples and a clock that is set."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmservice_operator.scaling.capacity import ReplicaModel
from llmservice_operator.scaling.decision import Decision, decide, decide_wake_up
from llmservice_operator.scaling.demand import Demand
from llmservice_operator.scaling.history import History
from llmservice_operator.scaling.load import Held, Load, PodLoad
from llmservice_operator.scaling.policy import ScalePolicy, ScalingRules
from llmservice_operator.scaling.supply import Supply
from llmservice_planner.model.block_groups import BlockGroups
from llmservice_planner.sizing.latency import LatencyModel

NOW = 1_000_000.0
SLOTS = 8
IDLE_S = 40.0


def policy_of(
    low: int = 1,
    high: int = 12,
    up: tuple[int, int] = (1000, 100),
    down: tuple[int, int] = (1000, 100),
    up_stabilization_s: float = 0.0,
) -> ScalePolicy:
    return ScalePolicy(
        min_replicas=low,
        max_replicas=high,
        queue_depth=2,
        tolerance=0.1,
        up=ScalingRules(*up, period_s=30.0, cooldown_s=0.0, stabilization_s=up_stabilization_s),
        down=ScalingRules(*down, period_s=30.0, cooldown_s=0.0, stabilization_s=60.0),
        window_s=30.0,
        ttft_p99_s=2.0,
        max_num_seqs=SLOTS,
        idle_timeout_s=IDLE_S if low == 0 else math.inf,
    )


@dataclass(frozen=True)
class Tick:
    """What a pass sees: how much later it is, the load of each ready pod, whose metrics are missing."""

    after_s: float
    pods: tuple[tuple[float, float], ...]
    blind: bool = False
    missing: int = 0
    ttft_p99_s: float | None = None
    quiet: bool = False
    """Whether the scrapes since the last tick show no request; at zero, whether gateways hold none."""

    @property
    def is_busy(self) -> bool:
        return any(running or waiting for running, waiting in self.pods)

    def held(self) -> Held | None:
        return None if self.blind else Held(0 if self.quiet else 1)

    def load(self) -> Load | None:
        if self.blind:
            return None
        pods = tuple(PodLoad(f"pod-{n}", running, waiting, 0.0) for n, (running, waiting) in enumerate(self.pods))
        gone = tuple(f"gone-{n}" for n in range(self.missing))
        quiet_s = self.after_s if self.quiet and not self.is_busy and not gone else 0.0
        return Load(
            "pods",
            pods,
            gone,
            ttft_p99_s=self.ttft_p99_s,
            ttft_certain_s=self.ttft_p99_s,
            ttft_count=100.0,
            quiet_s=max(0.0, quiet_s),
        )


ticks = st.builds(
    Tick,
    after_s=st.sampled_from([0.0, 1.0, 5.0, 30.0, 61.0, 3600.0, -3600.0, -5.0]),
    pods=st.lists(st.tuples(st.integers(0, SLOTS), st.integers(0, 60)), min_size=1, max_size=4).map(tuple),
    blind=st.booleans(),
    missing=st.sampled_from([0, 0, 1]),
    ttft_p99_s=st.none() | st.floats(0, 10),
    quiet=st.booleans(),
)
calm = st.builds(
    Tick,
    after_s=st.sampled_from([5.0, 10.0]),
    pods=st.sampled_from([((0, 0),), ((0, 0),), ((0, 0),), ((1, 0),)]),
    blind=st.sampled_from([False, False, False, True]),
    quiet=st.sampled_from([True, True, True, False]),
)
steps = st.tuples(st.integers(0, 4), st.integers(0, 100)).filter(any)
policies = st.builds(
    policy_of,
    low=st.integers(0, 3),
    high=st.integers(3, 12),
    up=steps,
    down=steps,
    up_stabilization_s=st.sampled_from([0.0, 10.0]),
)


@dataclass(frozen=True)
class Moment:
    now: float
    tick: Tick
    current: int
    decision: Decision
    history: History


def play(policy: ScalePolicy, story: Sequence[Tick], start: int) -> Iterator[Moment]:
    """Decide tick by tick; what is decided is what the Deployment is asked for from then on."""
    now, current, history = NOW, start, History.start(NOW, start)
    for tick in story:
        now += tick.after_s
        supply = Supply(current, ready=min(current, len(tick.pods)), starting=max(0, current - len(tick.pods)))
        if policy.sleeps and current == 0:
            decision, history = decide_wake_up(tick.held(), policy, history, now)
        else:
            decision, history = decide(tick.load(), supply, policy, history, now)
        yield Moment(now, tick, current, decision, history)
        current = decision.replicas


@given(policy=policies, story=st.lists(ticks, min_size=1, max_size=30), start=st.integers(1, 12))
def test_never_outside_the_bounds(policy: ScalePolicy, story: list[Tick], start: int) -> None:
    for moment in play(policy, story, start):
        assert policy.min_replicas <= moment.decision.replicas <= policy.max_replicas


@given(policy=policies, story=st.lists(ticks, min_size=1, max_size=30), start=st.integers(1, 12))
def test_never_fewer_without_fresh_metrics_of_every_pod(policy: ScalePolicy, story: list[Tick], start: int) -> None:
    for moment in play(policy, story, start):
        if moment.tick.blind or moment.tick.missing:
            assert moment.decision.replicas >= min(moment.current, policy.max_replicas)


@given(policy=st.builds(policy_of, low=st.just(0), up=steps, down=steps), story=st.lists(calm, min_size=1, max_size=40))
def test_zero_is_left_for_a_request_at_once_and_reached_after_the_idle_time_alone(
    policy: ScalePolicy, story: list[Tick]
) -> None:
    idle_s = 0.0
    for moment in play(policy, story, start=1):
        tick, before, after = moment.tick, moment.current, moment.decision.replicas
        if before == 0:
            assert (after > 0) == (not tick.blind and not tick.quiet)
            idle_s = 0.0
        else:
            measured = not tick.blind
            idle_s = idle_s + tick.after_s if not measured or (tick.quiet and not tick.is_busy) else 0.0
            assert after > 0 or (measured and idle_s >= IDLE_S)


@given(policy=policies, story=st.lists(ticks, min_size=1, max_size=30))
def test_no_step_is_larger_than_allowed(policy: ScalePolicy, story: list[Tick]) -> None:
    """What was added or removed within the period counts; without that, one step is the most."""
    for moment in play(policy, story, start=3):  # within all bounds, which would rule at once
        before, after = moment.current, moment.decision.replicas
        added = sum(max(0, more) for _, more in moment.history.changes)
        removed = -sum(min(0, more) for _, more in moment.history.changes)
        assert after <= before + removed + policy.up.size(before + removed)
        assert after >= before - added - policy.down.size(before + removed)


@given(story=st.lists(ticks, min_size=1, max_size=20), jump_s=st.sampled_from([-86_400.0, -600.0, 600.0, 86_400.0]))
def test_a_clock_that_is_set_removes_nothing_that_would_have_stayed(story: list[Tick], jump_s: float) -> None:
    policy = policy_of()
    *_, last = play(policy, [replace(tick, after_s=5.0) for tick in story], 8)
    idle = Load("pods", (PodLoad("pod-0", 0, 0, 0.0),))
    supply = Supply(last.decision.replicas, ready=last.decision.replicas)

    steady, _ = decide(idle, supply, policy, last.history, last.now)
    jumped, _ = decide(idle, supply, policy, last.history, last.now + jump_s)

    assert jumped.replicas == steady.replicas


@given(
    waiting=st.integers(0, 80),
    more=st.integers(0, 80),
    running=st.integers(0, SLOTS),
    busier=st.integers(0, SLOTS),
    replicas=st.integers(1, 8),
    kv_usage=st.floats(0, 0.79),
)
def test_more_load_never_asks_for_less(
    waiting: int, more: int, running: int, busier: int, replicas: int, kv_usage: float
) -> None:
    def asked(running: int, waiting: int) -> int:
        load = Load("pods", (PodLoad("pod-0", running, waiting, kv_usage),))
        history = History.start(NOW - 1000, replicas)
        return decide(load, Supply(replicas, ready=replicas), policy_of(high=50), history, NOW)[0].replicas

    assert asked(running, waiting + more) >= asked(running, waiting)
    assert asked(max(running, busier), waiting) >= asked(running, waiting)


@pytest.mark.parametrize("demand", [0, 1, 5, 6, 7, 8, 13, 17, 26, 40, 64, 77])
@pytest.mark.parametrize("start", [1, 2, 5, 12])
@pytest.mark.parametrize("startup_ticks", [0, 4])
def test_a_constant_load_is_never_oscillated_about(demand: int, start: int, startup_ticks: int) -> None:
    """So many requests are always in flight, spread over the replicas that are ready: up, or down, and then at rest."""
    policy, now, history = policy_of(), NOW, History.start(NOW, start)
    current, seen, births = start, [], [-startup_ticks] * start
    for tick in range(120):
        births = [*births, *[tick] * (current - len(births))][:current]
        ready = max(1, sum(tick - birth >= startup_ticks for birth in births))
        running = min(demand, ready * SLOTS)
        each = PodLoad("pod", running / ready, (demand - running) / ready, 0.0)
        supply = Supply(current, ready=ready, starting=current - ready)
        decision, history = decide(Load("pods", (each,) * ready), supply, policy, history, now)
        current, now = decision.replicas, now + 5
        seen.append(current)

    directions = [math.copysign(1, after - before) for before, after in pairwise(seen) if after != before]
    assert len(set(directions)) <= 1, seen
    assert len(set(seen[-60:])) == 1, seen
    assert seen[-1] * SLOTS >= demand or seen[-1] == policy.max_replicas


@dataclass(frozen=True)
class Flow:
    """What a pass sees of a service whose servers count arrivals."""

    requests_per_s: float
    running: int
    waiting: int
    blind: bool = False
    missing: int = 0

    def load(self, ready: int) -> Load | None:
        if self.blind:
            return None
        each = PodLoad("pod", min(SLOTS, self.running / ready), self.waiting / ready, 0.0)
        gone = tuple(f"gone-{n}" for n in range(self.missing))
        rate = self.requests_per_s
        return Load("pods", (each,) * ready, gone, demand=Demand(rate, 1000 * rate, 200 * rate))


flows = st.builds(
    Flow,
    requests_per_s=st.floats(0, 30),
    running=st.integers(0, 60),
    waiting=st.integers(0, 60),
    blind=st.sampled_from([False] * 9 + [True]),
    missing=st.sampled_from([0] * 9 + [1]),
)
REPLICA = ReplicaModel(
    LatencyModel(step_s=5e-4, sequence_s=1e-5, weights_s=0.06, token_s=1.5e-4, kv_token_s=5e-7, pair_s=1e-9),
    num_blocks=1250,
    groups=BlockGroups(16, num_layers=32),
    max_num_seqs=SLOTS,
    max_num_batched_tokens=2048,
    prefill_chunk_tokens=512,
    ttft_p99_s=2.0,
)
"""About an 8B model on an L4: half a request a second."""


def decide_each(story: Sequence[Flow], policy: ScalePolicy) -> Iterator[tuple[int, Flow, Decision]]:
    """Passes five seconds apart; replicas are ready at once."""
    now, current, history = NOW, 3, History.start(NOW - 1000, 3)
    for flow in story:
        now += 5.0
        supply = Supply(current, ready=current)
        decision, history = decide(flow.load(current), supply, policy, history, now, model=REPLICA)
        yield current, flow, decision
        current = decision.replicas


@given(story=st.lists(flows, min_size=1, max_size=40))
def test_a_flow_of_requests_is_decided_within_bounds_with_reasons_and_never_by_guessing(story: list[Flow]) -> None:
    for before, flow, decision in decide_each(story, policy_of(low=1, high=30)):
        assert 1 <= decision.replicas <= 30
        assert decision.reasons
        if flow.blind or flow.missing:
            assert decision.replicas >= before
        elif decision.replicas != before:
            assert any(reason.endswith(f"-> {decision.replicas}") for reason in decision.reasons)


@given(
    story=st.lists(flows, max_size=30),
    last=flows,
    arrivals=st.floats(0, 30),
    running=st.integers(0, 60),
    waiting=st.integers(0, 60),
)
def test_more_arrivals_or_requests_in_flight_never_ask_for_less(
    story: list[Flow], last: Flow, arrivals: float, running: int, waiting: int
) -> None:
    policy = policy_of(low=1, high=200)
    busier = replace(
        last,
        requests_per_s=last.requests_per_s + arrivals,
        running=last.running + running,
        waiting=last.waiting + waiting,
    )

    *_, (_, _, less) = decide_each([*story, last], policy)
    *_, (_, _, greater) = decide_each([*story, busier], policy)

    assert greater.wanted >= less.wanted
