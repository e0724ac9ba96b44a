import pytest

from llmservice_bench.simulation.traffic import SHAPES, scaled, synthetic
from llmservice_planner.traffic.traces import TraceRequest

TRACE = [TraceRequest(float(number), 10, 10, (number,)) for number in range(1000)]
LENGTHS = [TraceRequest(0.0, 100, 10), TraceRequest(0.0, 900, 300)]


@pytest.mark.parametrize("name", list(SHAPES))
def test_the_rate_follows_the_shape(name: str) -> None:
    shape = SHAPES[name]
    requests = synthetic(shape, 200.0, 100.0, LENGTHS, seed=1)
    for tenth in range(10):
        expected = sum(shape((tenth * 10 + second + 0.5) / 100) * 200 for second in range(10))
        found = sum(tenth * 10 <= each.arrival_s < tenth * 10 + 10 for each in requests)
        assert found == pytest.approx(expected, abs=4.5 * expected**0.5 + 40)
    assert max(map(shape, [number / 1000 for number in range(1000)])) == pytest.approx(1.0, abs=0.01)
    assert {(each.prompt_tokens, each.output_tokens) for each in requests} == {(100, 10), (900, 300)}


def test_a_seed_gives_one_traffic() -> None:
    shape = SHAPES["ramp"]
    assert synthetic(shape, 5.0, 60.0, LENGTHS, 1) == synthetic(shape, 5.0, 60.0, LENGTHS, 1)
    assert synthetic(shape, 5.0, 60.0, LENGTHS, 1) != synthetic(shape, 5.0, 60.0, LENGTHS, 2)


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
