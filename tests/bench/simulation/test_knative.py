import pytest

from llmservice_bench.simulation.knative import KnativePodAutoscaler, Panic, decide
from llmservice_bench.simulation.observation import Bounds, Observation, Totals
from llmservice_operator.scaling.load import Held, Scrape


@pytest.mark.parametrize(
    ("stable", "panic", "ready", "burst", "now", "replicas", "then"),
    [
        (20.0, 20.0, 2, None, 0.0, 2, None),
        (21.0, 25.0, 2, None, 0.0, 3, None),
        (12.0, 40.0, 2, None, 5.0, 4, Panic(5.0, 4)),  # twice what is ready
        (12.0, 39.0, 2, None, 5.0, 4, Panic(5.0, 4)),  # 3.9 is rounded up before it is compared
        (12.0, 29.0, 2, None, 5.0, 2, None),
        (50.0, 10.0, 3, Panic(0.0, 6), 60.0, 6, Panic(0.0, 6)),  # in panic it never falls
        (30.0, 10.0, 3, Panic(0.0, 6), 61.0, 3, None),
        (5.0, 5.0, 8, None, 0.0, 4, None),  # at most half are removed at once
        (0.0, 0.0, 1, None, 0.0, 0, None),
    ],
)
def test_replicas_of_both_windows(
    stable: float, panic: float, ready: int, burst: Panic | None, now: float, replicas: int, then: Panic | None
) -> None:
    assert decide(stable, panic, ready, 10.0, burst, now) == (replicas, then)


def seen(now_s: float, replicas: int, in_flight_s: float) -> Observation:
    scrapes = {f"pod-{number}": Scrape(now_s, 0.0, 0.0) for number in range(replicas)}
    totals = Totals(time_s=now_s, in_flight_s=in_flight_s)
    return Observation(now_s=now_s, replicas=replicas, pods=(), scrapes=scrapes, held=Held(), totals=totals)


def test_the_windows_are_means_over_time() -> None:
    policy = KnativePodAutoscaler(Bounds(1, 20), 10.0)
    for time_s in range(0, 60, 2):
        policy.decide(seen(time_s, 2, 20.0 * time_s))  # 20 in flight
    decision = policy.decide(seen(60.0, 2, 20.0 * 54 + 60.0 * 6))  # and 60 for the last 6 s
    assert decision.reasons[0] == "kpa: 24.0 in flight (60.0 in 6s), target 10, panic -> 6"
    assert decision.replicas == 6


def test_the_last_replica_stays_for_the_grace_period() -> None:
    policy = KnativePodAutoscaler(Bounds(0, 4), 10.0)
    replicas = [policy.decide(seen(time_s, 1, 0.0)).replicas for time_s in range(0, 34, 2)]
    assert replicas == [1] * 15 + [0, 0]
