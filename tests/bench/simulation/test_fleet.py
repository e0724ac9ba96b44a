import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmservice_bench.simulation.fleet import Fleet, FleetConfig, Pod
from llmservice_bench.simulation.observation import Observation
from llmservice_bench.simulation.outcome import Outcome, Targets
from llmservice_bench.simulation.policies import Static
from llmservice_bench.simulation.replica import ReplicaConfig
from llmservice_operator.scaling.decision import Decision
from llmservice_planner.traffic.traces import TraceRequest
from llmservice_server.engine.admission_queue import QueueBound


class Planned:
    """Sets these numbers one after another, and keeps the last."""

    name = "planned"
    jitter = 0.0

    def __init__(self, replicas: list[int], interval_s: float = 5.0, wakes: bool = False) -> None:
        self.replicas, self.interval_s, self.wakes = replicas, interval_s, wakes
        self.seen: list[Observation] = []

    def decide(self, seen: Observation) -> Decision:
        self.seen.append(seen)
        replicas = self.replicas[min(len(self.seen), len(self.replicas)) - 1]
        return Decision(replicas, replicas, ("as planned",))


def steady(count: int, gap_s: float, prompt: int = 20, output: int = 30) -> list[TraceRequest]:
    return [TraceRequest(number * gap_s, prompt, output) for number in range(count)]


def conserves(outcome: Outcome) -> None:
    """Every request has ended once; the tokens of those that finished are those of their answers."""
    assert outcome.outcomes.total() == len(outcome.requests)
    assert "open" not in outcome.outcomes
    for request in outcome.requests:
        assert request.ended_s >= request.arrival_s
        if request.first_token_s is not None:
            assert request.first_scheduled_s is not None
            assert request.arrival_s <= request.first_scheduled_s < request.first_token_s
        assert (request.num_tokens == request.output_tokens) == (request.outcome == "finished")
        assert bool(request.reason) == (request.outcome != "finished")
    finished = [each for each in outcome.requests if each.outcome == "finished"]
    assert outcome.output_tokens >= sum(each.output_tokens for each in finished)
    assert outcome.gaps.total <= sum(max(0, each.num_tokens - 1) for each in outcome.requests)
    assert all(each.decision.reasons for each in outcome.decisions)


@settings(max_examples=60, deadline=None)
@given(
    arrivals=st.lists(st.tuples(st.floats(0, 40), st.integers(1, 420), st.integers(1, 120)), min_size=1, max_size=60),
    replicas=st.lists(st.integers(0, 4), min_size=1, max_size=8),
    failures=st.lists(st.floats(0, 50), max_size=3),
    startup=st.sampled_from([(0.5,), (3.0, 9.0)]),
    mtbf_s=st.sampled_from([math.inf, 15.0]),
    retries=st.integers(0, 2),
    drain_s=st.sampled_from([0.3, 60.0]),
)
def test_every_request_ends_once_whatever_starts_fails_and_leaves(
    replica_config: ReplicaConfig,
    arrivals: list[tuple[float, int, int]],
    replicas: list[int],
    failures: list[float],
    startup: tuple[float, ...],
    mtbf_s: float,
    retries: int,
    drain_s: float,
) -> None:
    config = FleetConfig(
        replica=replica_config,
        initial=replicas[0],
        startup_s=startup,
        mtbf_s=mtbf_s,
        failures_s=tuple(failures),
        drain_s=drain_s,
        client_retries=retries,
    )
    trace = sorted((TraceRequest(*each) for each in arrivals), key=lambda each: each.arrival_s)
    fleet = Fleet(config, trace, Planned(replicas), 60.0)
    outcome = fleet.run()
    conserves(outcome)
    assert fleet.totals.in_flight == 0
    assert fleet.totals.arrived == len(trace)
    longest = config.replica.max_request_tokens
    for request in outcome.requests:
        if request.prompt_tokens >= longest:
            assert request.outcome in ("refused", "timed_out")


def test_a_seed_gives_one_result(replica_config: ReplicaConfig) -> None:
    config = FleetConfig(replica=replica_config, initial=2, startup_s=(2.0, 5.0, 9.0), mtbf_s=20.0, seed=3)

    def run(seed: int) -> object:
        policy = Planned([2, 4, 1, 3], interval_s=7.0)
        return Fleet(replace(config, seed=seed), steady(200, 0.2), policy).run().to_dict(Targets(1.0))

    assert run(3) == run(3)
    assert run(3) != run(4)


def test_a_jump_does_not_change_what_a_fleet_does(replica_config: ReplicaConfig) -> None:
    def run(jumps: bool) -> Outcome:
        config = FleetConfig(replica=replace(replica_config, jumps=jumps), initial=2, startup_s=(3.0,), mtbf_s=30.0)
        return Fleet(config, steady(300, 0.11), Planned([2, 3, 1, 2])).run()

    jumped, stepped = run(True), run(False)
    assert jumped.outcomes == stepped.outcomes
    assert jumped.num_steps == stepped.num_steps
    for one, other in zip(jumped.requests, stepped.requests, strict=True):
        assert one.first_token_s == pytest.approx(other.first_token_s, rel=1e-9)
        assert one.ended_s == pytest.approx(other.ended_s, rel=1e-9)


def test_requests_are_held_at_zero_replicas_and_served_once_one_is_ready(replica_config: ReplicaConfig) -> None:
    config = FleetConfig(replica=replica_config, initial=0, startup_s=(10.0,))
    policy = Planned([0, 1], interval_s=100.0)
    outcome = Fleet(config, [TraceRequest(3.2, 10, 5)], policy, 30.0).run()
    (request,) = outcome.requests
    assert policy.seen[1].now_s == 4.0  # the operator reads gateways each second while a service is at zero
    assert policy.seen[1].held.requests == 1
    assert request.outcome == "finished"
    assert request.first_token_s is not None
    assert 14.0 < request.first_token_s < 14.1


def test_a_removed_replica_finishes_its_requests_and_gets_no_new_ones(replica_config: ReplicaConfig) -> None:
    config = FleetConfig(replica=replica_config, initial=2)
    trace = [TraceRequest(0.0, 20, 200), TraceRequest(0.0, 20, 200), TraceRequest(1.5, 20, 10)]
    outcome = Fleet(config, trace, Planned([2, 1], interval_s=1.0), 10.0).run()
    assert outcome.outcomes == {"finished": 3}
    terminating = [size for size in outcome.sizes if size.terminating]
    assert terminating[0].time_s == 1.0
    gone_s = next(size.time_s for size in outcome.sizes if size.time_s > 1.0 and not size.terminating)
    assert gone_s == min(each.ended_s for each in outcome.requests[:2])
    assert outcome.gpu_s == pytest.approx(10.0 + gone_s)


def test_a_lost_replica_fails_what_it_streamed_and_others_serve_what_it_had_not_begun(
    replica_config: ReplicaConfig,
) -> None:
    config = FleetConfig(replica=replica_config, initial=1, startup_s=(5.0,), failures_s=(1.0,))
    trace = [TraceRequest(0.0, 20, 300) for _ in range(8)] + [TraceRequest(0.9, 20, 10)]
    outcome = Fleet(config, trace, Static(1), 20.0).run()
    assert [each.outcome for each in outcome.requests] == ["failed"] * 8 + ["finished"]
    assert outcome.requests[0].reason.startswith("its replica was lost after ")
    assert outcome.requests[-1].first_token_s == pytest.approx(6.0, abs=0.1)


def test_waiting_requests_move_to_a_replica_that_becomes_ready(replica_config: ReplicaConfig) -> None:
    config = FleetConfig(replica=replica_config, initial=1, startup_s=(1.0,))
    trace = [TraceRequest(0.0, 20, 300) for _ in range(14)]
    outcome = Fleet(config, trace, Static(2), 10.0).run()
    waited = [each.ttft_s for each in outcome.requests[8:]]
    assert outcome.outcomes == {"finished": 14}
    assert all(each is not None and 1.0 < each < 1.4 for each in waited)


def test_a_full_queue_refuses_from_four_fifths_on_and_clients_may_try_again(replica_config: ReplicaConfig) -> None:
    trace = [TraceRequest(0.0, 20, 30) for _ in range(30)]
    for retries, refused in ((0, 30 - 8 - 10), (3, 0)):
        config = FleetConfig(replica=replica_config, initial=1, client_retries=retries)
        outcome = Fleet(config, trace, Static(1), 10.0).run()
        assert outcome.outcomes["refused"] == refused
        conserves(outcome)


def test_gpu_time_counts_starts_and_ends_with_the_duration(replica_config: ReplicaConfig) -> None:
    config = FleetConfig(replica=replica_config, initial=1, startup_s=(30.0,), gpus=2)
    outcome = Fleet(config, [TraceRequest(0.0, 5, 5)], Planned([1, 3], interval_s=10.0), 20.0).run()
    assert outcome.gpu_s == pytest.approx(2 * (20.0 + 2 * 10.0))


@pytest.mark.parametrize("jumps", [True, False])
def test_the_times_between_tokens_and_the_preemptions_of_the_warm_up_are_not_measured(
    replica_config: ReplicaConfig, jumps: bool
) -> None:
    config = FleetConfig(replica=replace(replica_config, num_blocks=100, jumps=jumps), initial=1)
    trace = [*steady(8, 0.01, output=60), TraceRequest(20.0, 20, 30)]
    whole = Fleet(config, trace, Static(1)).run()
    assert whole.num_preemptions > 0
    assert whole.gaps.total == sum(each.num_tokens - 1 for each in whole.requests)
    measured = Fleet(config, trace, Static(1), warmup_s=15.0).run()
    assert (measured.num_preemptions, measured.gaps.total) == (0, 29)


def test_waits_are_counted_by_lane_and_on_average_shorter_with_the_shortest_answers_first(
    replica_config: ReplicaConfig,
) -> None:
    """Of a queue of answers whose lengths follow from those of their prompts, beside a request of the other lane."""
    trace = [TraceRequest(0.0, 20, 30)]
    for number in range(60):
        prompt, output = (200, 100) if number % 2 else (10, 5)
        trace.append(TraceRequest(0.01 + 0.2 * number, prompt, output, lane="batch"))
    found = {}
    for order in ("fcfs", "sjf"):
        scheduler = replace(replica_config.scheduler, batch=replace(replica_config.scheduler.batch, order=order))
        replica = replace(replica_config, scheduler=scheduler, queue=QueueBound(100, 10**6), request_timeout_s=600.0)
        outcome = Fleet(FleetConfig(replica=replica, initial=1), trace, Static(1)).run()
        conserves(outcome)
        assert outcome.waits("interactive").requests == 1
        assert outcome.waits("batch").requests == 60
        found[order] = outcome.waits("batch").mean or 0.0
    assert 0 < found["sjf"] < 0.8 * found["fcfs"]


def test_starts_take_their_times_in_order_and_wake_the_policy_at_once(replica_config: ReplicaConfig) -> None:
    config = FleetConfig(replica=replica_config, initial=1, startup_s=(9.0, 2.0, 4.0), startups_in_order=True)
    policy = Planned([1, 4], interval_s=5.0, wakes=True)
    outcome = Fleet(config, [TraceRequest(0.0, 5, 5)], policy, 20.0).run()
    assert [(size.time_s, size.ready) for size in outcome.sizes] == [(0.0, 1), (5.0, 1), (7.0, 2), (9.0, 4)]
    created_s = [seen.now_s for seen in policy.seen if len(seen.pods) == 4 and seen.ready == 1]
    assert created_s[0] == pytest.approx(5.2)  # it sees the pods that it has asked for


def test_a_new_replica_is_sent_as_much_as_it_may_run_before_its_first_answer(replica_config: ReplicaConfig) -> None:
    """The KV cache holds three such requests at once, which the gateway knows of a replica that has answered."""
    replica = replace(replica_config, num_blocks=100, queue=QueueBound(100, 10**6))
    config = FleetConfig(replica=replica, initial=1, startup_s=(1.0,))
    trace = [TraceRequest(0.01 * number, 40, 90) for number in range(20)]
    fleet = Fleet(config, trace, Static(2), 60.0)
    slots = []
    become_ready = fleet._become_ready

    def noted(pod: Pod, now: float) -> None:
        become_ready(pod, now)
        slots.append((pod.slots, fleet._balancer.in_flight(pod)))

    fleet._become_ready = noted  # type: ignore[method-assign]
    outcome = fleet.run()
    conserves(outcome)
    assert slots[1] == (8, 8)
    assert fleet.pods[1].slots < 8
