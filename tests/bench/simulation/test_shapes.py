import pytest

from llmservice_bench.simulation.shapes import SHAPES, traffic
from llmservice_planner.traffic import TraceRequest

LENGTHS = [TraceRequest(0.0, 100, 10), TraceRequest(0.0, 900, 300)]


@pytest.mark.parametrize("name", list(SHAPES))
def test_the_rate_follows_the_shape(name: str) -> None:
    shape = SHAPES[name]
    requests = traffic(shape, 200.0, 100.0, LENGTHS, seed=1)
    for tenth in range(10):
        expected = sum(shape((tenth * 10 + second + 0.5) / 100) * 200 for second in range(10))
        found = sum(tenth * 10 <= each.arrival_s < tenth * 10 + 10 for each in requests)
        assert found == pytest.approx(expected, abs=4.5 * expected**0.5 + 40)
    assert max(map(shape, [number / 1000 for number in range(1000)])) == pytest.approx(1.0, abs=0.01)
    assert {(each.prompt_tokens, each.output_tokens) for each in requests} == {(100, 10), (900, 300)}


def test_a_seed_gives_one_traffic() -> None:
    shape = SHAPES["ramp"]
    assert traffic(shape, 5.0, 60.0, LENGTHS, 1) == traffic(shape, 5.0, 60.0, LENGTHS, 1)
    assert traffic(shape, 5.0, 60.0, LENGTHS, 1) != traffic(shape, 5.0, 60.0, LENGTHS, 2)
