from __future__ import annotations

import pytest

from llmservice_operator.scaling.lanes import counted
from llmservice_operator.signals.load import Load, PodLoad


def load(*pods: PodLoad) -> Load:
    return Load("pods", pods, batch=True, arrivals_per_s=5.0, drain_per_s=1.0, ttft_p99_s=60.0, ttft_count=100)


@pytest.mark.parametrize(
    ("pod", "expected"),
    [
        pytest.param(PodLoad("a", 8, 100, 0.8, 100, 6), (2, 0, 0.2), id="two of eight count"),
        pytest.param(PodLoad("a", 8, 103, 0.8, 100, 0), (8, 3, 0.8), id="batch requests that only wait"),
        pytest.param(PodLoad("a", 8, 100, 0.9, 100, None), (6.4, 0, 0.8), id="lanes untold: no more than the target"),
        pytest.param(PodLoad("a", 5, 100, 0.5, 100, None), (5, 0, 0.5), id="nor more than there is"),
        pytest.param(PodLoad("a", 8, 103, 0.9, 100, None), (8, 3, 0.9), id="what waits beside them has the slots"),
        pytest.param(PodLoad("a", 8, 0, 0.9, 0, None), (8, 0, 0.9), id="nothing of the batch lane waits"),
        pytest.param(PodLoad("a", 0, 4, 0.0, 4, 0), (0, 0, 0.0), id="nothing runs yet"),
    ],
)
def test_batch_requests_fill_what_the_others_leave(pod: PodLoad, expected: tuple[float, float, float]) -> None:
    [left] = counted(load(pod), "fill", 0.8, 8).pods

    assert (left.running, left.waiting, left.kv_usage) == pytest.approx(expected)


def test_rates_of_all_lanes_say_nothing_about_one() -> None:
    mixed = load(PodLoad("a", 8, 100, 0.8, 100, 6))

    left = counted(mixed, "fill", 0.8, 8)

    assert (left.arrivals_per_s, left.ttft_p99_s, left.ttft_count) == (None, None, 0)
    assert left.drain_per_s == 1.0


def test_all_requests_count_where_they_are_to_or_where_there_are_none_of_the_batch_lane() -> None:
    mixed, plain = load(PodLoad("a", 8, 100, 0.8, 100, 6)), Load("pods", (PodLoad("a", 8, 100, 0.8),))

    assert counted(mixed, "scale", 0.8, 8) is mixed
    assert counted(plain, "fill", 0.8, 8) is plain
