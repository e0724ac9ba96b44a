from llmservice_bench.simulation.traffic_scale import scaled
from llmservice_planner.traffic import TraceRequest

TRACE = [TraceRequest(float(number), 10, 10, (number,)) for number in range(1000)]


def test_time_and_rate_are_scaled_apart() -> None:
    assert [each.arrival_s for each in scaled(TRACE, 0.5, 1.0, 0)] == [number / 2 for number in range(1000)]
    doubled = scaled(TRACE, 1.0, 2.0, 0)
    assert len(doubled) == 2000
    assert doubled[-1].arrival_s == 999.0
    assert abs(sum(each.arrival_s < 500 for each in doubled) - 1000) < 10
    assert 200 < len(scaled(TRACE, 1.0, 0.25, 0)) < 300


def test_repeated_prompts_share_nothing_with_the_first() -> None:
    doubled = scaled(TRACE, 1.0, 2.0, 0)
    assert len({each.hash_ids for each in doubled}) == 2000


def test_a_seed_gives_one_trace() -> None:
    assert scaled(TRACE, 1.0, 1.5, 4) == scaled(TRACE, 1.0, 1.5, 4)
    assert scaled(TRACE, 1.0, 1.5, 4) != scaled(TRACE, 1.0, 1.5, 5)
