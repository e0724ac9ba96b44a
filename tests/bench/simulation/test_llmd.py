import pytest

from llmservice_bench.simulation.llmd import Hardware, WorkloadVariantAutoscaler, max_rate
from llmservice_bench.simulation.observation import Bounds, Observation, Totals
from llmservice_operator.scaling.load import Held

HARDWARE = Hardware(alpha_s=0.010, beta_s=0.0001, gamma_s=0.000001)


def test_the_rate_follows_from_the_longest_iteration_within_both_targets() -> None:
    # TTFT: T <= 1.0 - 0.000101 x 1000 = 0.899; ITL: T <= 0.05 - 0.0001 - 0.000001 x (1000 + 50.5) = 0.0488495
    work_s = 0.0001 * 1100 + 0.000001 * 101 * 1050
    expected = (1 - 0.010 / 0.0488495) / work_s
    assert max_rate(HARDWARE, 1000, 100, 1.0, 0.05, 10_000) == pytest.approx(expected)


def test_without_targets_an_iteration_may_take_three_times_an_empty_one() -> None:
    work_s = 0.0001 * 1100 + 0.000001 * 101 * 1050
    assert max_rate(HARDWARE, 1000, 100, None, None, 10_000) == pytest.approx((1 - 1 / 3) / work_s)


def test_the_rate_fills_no_more_than_the_sequences_of_a_replica() -> None:
    rate = max_rate(HARDWARE, 1000, 100, 1.0, 0.05, 4)
    work_s = 0.0001 * 1100 + 0.000001 * 101 * 1050
    iteration_s = 0.010 / (1 - rate * work_s)
    assert rate * 101 * iteration_s == pytest.approx(4)


@pytest.mark.parametrize(("ttft_s", "itl_s"), [(0.1, None), (1.0, 0.011)])
def test_targets_that_an_empty_replica_misses_give_no_rate(ttft_s: float, itl_s: float | None) -> None:
    assert max_rate(HARDWARE, 1000, 100, ttft_s, itl_s, 100) == 0.0


def seen(time_s: float, arrived: int, finished: int) -> Observation:
    totals = Totals(
        time_s=time_s,
        arrived=arrived,
        arrived_prompt_tokens=1000 * arrived,
        finished=finished,
        finished_output_tokens=100 * finished,
    )
    return Observation(now_s=time_s, replicas=1, pods=(), scrapes={}, held=Held(), totals=totals)


def test_arrivals_are_divided_by_that_rate_once_a_minute() -> None:
    policy = WorkloadVariantAutoscaler(Bounds(1, 50), HARDWARE, 1.0, 0.05, 1000)
    assert not policy.decide(seen(0.0, 0, 0)).active
    assert not policy.decide(seen(15.0, 300, 100)).active
    decision = policy.decide(seen(60.0, 600, 500))
    assert (
        decision.reasons[0] == "llmd: 10.00/s of 1000 in and 100 out, one replica keeps its targets up to 3.68/s -> 3"
    )
    assert decision.replicas == 3
