"""Statistics of recorded traffic, against traffic whose statistics are known."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from llmservice_planner.traffic.summary import Statistics, summarise
from llmservice_planner.traffic.traces import TraceError, TraceRequest


def even(count: int, gap_s: float = 1.0, prompt: int = 100, output: int = 10) -> list[TraceRequest]:
    return [TraceRequest(place * gap_s, prompt, output) for place in range(count)]


def poisson(rate: float, count: int) -> list[TraceRequest]:
    rng = random.Random(7)  # noqa: S311 - traffic, not secrets
    times = itertools.accumulate(rng.expovariate(rate) for _ in range(count))
    return [TraceRequest(time, rng.randint(1, 1000), rng.randint(1, 200)) for time in times]


def test_even_arrivals_have_no_burstiness() -> None:
    found = summarise(even(601))
    assert found.requests == 601
    assert found.duration_s == 600
    assert found.requests_per_s == pytest.approx(1)
    assert found.gap_variation == pytest.approx(0)
    assert found.windows.window_s == 5
    assert found.windows.requests_per_s == (1.0,) * 120
    assert found.windows.prompt_tokens_per_s[3] == pytest.approx(100)
    assert found.windows.output_tokens_per_s[3] == pytest.approx(10)
    assert found.windows.dispersion == pytest.approx(0)
    assert found.peak_to_mean == pytest.approx(1)


def test_poisson_arrivals_have_variation_and_dispersion_of_one() -> None:
    found = summarise(poisson(20, 40_000))
    assert found.requests_per_s == pytest.approx(20, rel=0.03)
    assert found.gap_variation == pytest.approx(1, rel=0.03)
    assert found.windows.dispersion == pytest.approx(1, rel=0.35)


def test_busy_window_is_the_peak() -> None:
    burst = [TraceRequest(300 + place / 100, 100, 10) for place in range(500)]
    found = summarise(even(601) + burst)
    assert found.windows.peak == pytest.approx(101)
    assert found.peak_to_mean > 50
    assert found.windows.dispersion > 50


def test_load_of_a_window_is_by_its_tokens() -> None:
    """Twice the requests, or requests twice as long, are twice the load."""
    long = [TraceRequest(place, 400 if 300 <= place < 360 else 100, 10) for place in range(601)]
    found = summarise(long)
    assert found.windows.peak == pytest.approx(1)
    assert max(found.loads) == pytest.approx(400 / found.prompt.mean)
    assert max(summarise(even(601)).loads) == pytest.approx(1)


def test_unsorted_requests_are_sorted_with_their_lengths() -> None:
    requests = poisson(1, 500)
    shuffled = list(requests)
    random.Random(1).shuffle(shuffled)  # noqa: S311 - likewise
    assert summarise(shuffled).to_dict() == summarise(requests).to_dict()


def test_percentiles_of_lengths() -> None:
    found = summarise([TraceRequest(place, place + 1, 2 * (place + 1)) for place in range(100)])
    assert (found.prompt.p50, found.prompt.p90, found.prompt.p95, found.prompt.p99, found.prompt.longest) == (
        50,
        90,
        95,
        99,
        100,
    )
    assert found.output.mean == pytest.approx(101)
    assert found.total.p99 == 297
    assert found.longer_than(270) == 10


def test_shared_prefixes_are_what_a_cache_without_bound_would_hit() -> None:
    requests = [
        TraceRequest(0, 1024, 1, hash_ids=(1, 2)),
        TraceRequest(1, 1536, 1, hash_ids=(1, 2, 3)),  # 1024 tokens hit
        TraceRequest(2, 600, 1, hash_ids=(1, 4)),  # 512 hit
        TraceRequest(3, 700, 1, hash_ids=(5, 2)),  # none: the first block is new
        TraceRequest(4, 600, 1, hash_ids=(1, 4)),  # all 600
    ]
    found = summarise(requests)
    assert found.shared_prefix_share == pytest.approx((1024 + 512 + 600) / (1024 + 1536 + 600 + 700 + 600))
    assert summarise(even(5)).shared_prefix_share is None


def test_recorded_hits_are_of_the_requests_that_recorded_them() -> None:
    requests = [
        TraceRequest(0, 100, 1),
        TraceRequest(1, 100, 1, cached_tokens=50),
        TraceRequest(2, 300, 1, cached_tokens=0),
    ]
    assert summarise(requests).cached_share == pytest.approx(50 / 400)
    assert summarise(even(5)).cached_share is None


def test_static_batches_pad_to_their_longest_member() -> None:
    requests = [TraceRequest(0, 100, 10), TraceRequest(1, 300, 10), TraceRequest(2, 50, 30)]
    found = summarise(requests, static_batch=2)
    assert found.static_padding_share == pytest.approx(1 - (100 + 300 + 20 + 50 + 30) / (2 * 310 + 80))
    assert summarise(requests, static_batch=1).static_padding_share == 0


def test_prediction_by_prompt_length_orders_outputs_that_follow_it() -> None:
    requests = [
        TraceRequest(place, *lengths) for place in range(300) for lengths in [((64, 10), (4096, 500))[place % 2]]
    ]
    found = summarise(requests)
    assert found.predicted_order_share is not None
    assert found.predicted_order_share > 0.95
    assert summarise(even(5)).predicted_order_share is None  # all outputs are alike


@pytest.mark.parametrize("requests", [even(1), [TraceRequest(5, 1, 1)] * 3])
def test_traffic_without_duration_has_statistics(requests: list[TraceRequest]) -> None:
    found: Statistics = summarise(requests)
    assert found.duration_s == 0
    assert found.gap_variation is None
    json.dumps(found.to_dict(), allow_nan=False)


def test_no_request_is_refused() -> None:
    with pytest.raises(TraceError, match="no request"):
        summarise([])
