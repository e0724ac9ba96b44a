import pytest

from llmservice_bench.simulation.hpa import Behavior, HorizontalPodAutoscaler, Keda, of_pods, of_total
from llmservice_bench.simulation.observation import Bounds, Observation, Totals
from llmservice_operator.scaling.load import Held, Scrape

BOUNDS = Bounds(1, 20)


def seen(now_s: float, replicas: int, in_flight: list[float], held: int = 0) -> Observation:
    scrapes = {f"pod-{number}": Scrape(now_s, each, 0.0) for number, each in enumerate(in_flight)}
    return Observation(
        now_s=now_s, replicas=replicas, pods=(), scrapes=scrapes, held=Held(held, 0, 0.0), totals=Totals()
    )


@pytest.mark.parametrize(
    ("values", "unready", "target", "current", "wanted"),
    [
        ([20.0, 20.0], 0, 10.0, 2, 4),  # ceil(2 x 20 / 10)
        ([21.0, 20.0], 0, 10.0, 2, 5),
        ([10.5, 11.0], 0, 10.0, 2, 2),  # within a tenth
        ([4.0, 5.0, 3.0], 0, 10.0, 3, 2),
        ([0.0], 0, 10.0, 1, 0),  # the bounds keep one
        ([20.0, 20.0], 2, 10.0, 4, 4),  # those that start count as idle
        ([40.0, 40.0], 2, 10.0, 4, 8),
        ([15.0], 3, 10.0, 4, 4),  # counting them would turn the direction round: it stays
        ([], 2, 10.0, 3, 3),  # no metric
    ],
)
def test_the_mean_of_the_pods(values: list[float], unready: int, target: float, current: int, wanted: int) -> None:
    assert of_pods(values, unready, target, current) == wanted


@pytest.mark.parametrize(
    ("total", "current", "wanted"),
    [(100.0, 4, 10), (43.0, 4, 4), (45.0, 4, 5), (36.0, 4, 4), (35.0, 4, 4), (0.0, 4, 0)],
)
def test_an_external_metric_is_divided_by_its_target_per_replica(total: float, current: int, wanted: int) -> None:
    assert of_total(total, 10.0, current) == wanted


def test_a_scale_down_waits_until_no_higher_recommendation_is_younger_than_300_s() -> None:
    behavior = Behavior()
    assert behavior.limit(8, 8, BOUNDS, 0.0)[0] == 8
    replicas, reasons = behavior.limit(2, 8, BOUNDS, 290.0)
    assert replicas == 8
    assert reasons == ["stabilization: 2 must hold for 300s -> 8"]
    assert behavior.limit(3, 8, BOUNDS, 301.0)[0] == 3


def test_a_scale_up_adds_four_or_doubles_within_15_s() -> None:
    behavior = Behavior()
    assert behavior.limit(19, 2, BOUNDS, 0.0)[0] == 6
    assert behavior.limit(19, 6, BOUNDS, 5.0)[0] == 6
    assert behavior.limit(19, 6, BOUNDS, 15.0)[0] == 12


def test_the_hpa_never_leaves_zero() -> None:
    policy = HorizontalPodAutoscaler(Bounds(0, 4), 10.0)
    decision = policy.decide(seen(0.0, 0, [], held=5))
    assert decision.replicas == 0
    assert "0 replicas" in decision.reasons[0]


def test_the_hpa_names_its_metric_and_target() -> None:
    decision = HorizontalPodAutoscaler(BOUNDS, 8.0).decide(seen(0.0, 2, [16.0, 12.0]))
    assert decision.replicas == 4
    assert decision.reasons == ("hpa: in_flight is 14 per ready replica, target 8 -> 4",)


def test_keda_starts_one_at_its_next_poll_and_removes_it_after_the_cooldown() -> None:
    policy = Keda(Bounds(0, 5), 10.0)
    assert policy.decide(seen(0.0, 0, [])).replicas == 0
    assert policy.decide(seen(15.0, 0, [], held=3)).replicas == 0  # polled every 30 s
    assert policy.decide(seen(30.0, 0, [], held=3)).replicas == 1
    assert policy.decide(seen(60.0, 1, [3.0])).replicas == 1
    idle = [policy.decide(seen(time_s, 1, [0.0])).replicas for time_s in range(75, 375, 15)]
    assert idle[-1] == 0
    assert set(idle[:-1]) == {1}


def test_keda_scales_by_all_requests_in_flight_in_between() -> None:
    assert Keda(BOUNDS, 10.0).decide(seen(0.0, 2, [20.0, 15.0])).replicas == 4
