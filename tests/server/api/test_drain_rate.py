import pytest

from llmservice_server.api.drain_rate import DrainRate


@pytest.mark.parametrize("seconds", [1, 10, 100])
def test_a_steady_rate_is_seen_as_what_it_is_however_young(seconds: int) -> None:
    rate = DrainRate(0.0)
    for step in range(seconds * 10):
        rate.add(0.5, step / 10)
    assert rate.per_s(seconds) == pytest.approx(5.0, rel=0.05)


def test_a_queue_that_stands_still_drains_ever_more_slowly() -> None:
    rate = DrainRate(0.0)
    for second in range(100):
        rate.add(3, second)
    assert rate.per_s(100) > 2.5
    assert rate.per_s(110) == pytest.approx(rate.per_s(100) / 2.718, rel=0.01)


def test_a_new_queue_has_no_rate() -> None:
    assert DrainRate(5.0).per_s(5.0) == 0
