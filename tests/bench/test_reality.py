"""How a cluster and its simulations are compared."""

from reality import Decided, Outcome, apart, median_of, where_they_part


def outcome(*replicas: tuple[float, int], ttft_s: float = 1.0) -> Outcome:
    decisions = [Decided(when, number, (f"asked for {number}",)) for when, number in replicas[1:]]
    return Outcome([ttft_s], 100.0 * ttft_s, 0, list(replicas), decisions)


def test_a_tick_makes_no_difference_and_more_does() -> None:
    real = outcome((0.0, 1), (50.0, 4))
    assert apart(real, outcome((0.0, 1), (60.0, 4)), 100.0) == 0
    assert apart(real, outcome((0.0, 1), (61.0, 4)), 100.0) == 3
    assert apart(real, outcome((0.0, 1), (50.0, 3)), 100.0) == 1


def test_the_forecast_is_the_median_by_the_second_and_has_the_ttft_of_all() -> None:
    simulations = [
        outcome((0.0, 1), (20.0, 5), ttft_s=1.0),
        outcome((0.0, 1), (30.0, 3), ttft_s=2.0),
        outcome((0.0, 1), (25.0, 9), (40.0, 2), ttft_s=6.0),
    ]
    forecast = median_of(simulations, 60.0)
    assert forecast.replicas == [(0.0, 1), (25.0, 5), (40.0, 3)]
    assert forecast.ttft_s == [1.0, 2.0, 6.0]
    assert forecast.output_tokens_per_s == 200.0


def test_the_moment_at_which_they_are_furthest_apart_has_the_decisions_of_both() -> None:
    real, simulated = outcome((0.0, 1), (20.0, 2), (50.0, 6)), outcome((0.0, 1), (22.0, 2), (55.0, 4))
    sentences = where_they_part(real, simulated, median_of([simulated], 100.0), 100.0)
    assert sentences[0] == "At 50 s the cluster had 6 replicas, the forecast 2, one of its simulations 2."
    assert sentences[1:] == [
        "20 s, the cluster -> 2: asked for 2.",
        "50 s, the cluster -> 6: asked for 6.",
        "22 s, that simulation -> 2: asked for 2.",
        "55 s, that simulation -> 4: asked for 4.",
    ]
    assert where_they_part(real, real, real, 100.0) == []
