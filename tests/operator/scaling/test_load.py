from __future__ import annotations

import math

import pytest

from llmservice_operator.scaling.demand import Demand
from llmservice_operator.scaling.load import Scrape, increase, load_of, quantile


def scrape(time_s: float, *, running: float = 0, waiting: float = 0, finished: float = 0, **more: object) -> Scrape:
    """All that has finished was answered where nothing else is said."""
    more.setdefault("answered", finished)
    return Scrape(time_s, running, waiting, finished=finished, **more)  # type: ignore[arg-type]


def test_without_a_pod_that_answers_there_is_no_load() -> None:
    assert load_of({}, ["a"], "pods") is None
    assert load_of({"a": []}, ["a"], "pods") is None


def test_missing_pods_are_named_and_unknown_ones_ignored() -> None:
    load = load_of({"a": [scrape(0, running=2)], "stranger": [scrape(0, running=9)]}, ["b", "a"], "pods")

    assert load is not None
    assert (load.running, load.missing) == (2, ("b",))


def test_arrivals_count_what_an_overloaded_pod_could_not_finish() -> None:
    before, after = scrape(0, running=8, waiting=2, finished=100), scrape(10, running=8, waiting=32, finished=120)

    load = load_of({"a": [before, after]}, ["a"], "pods")

    assert load is not None
    assert load.arrivals_per_s == pytest.approx((20 + 30) / 10)
    assert load.capacity_per_s == pytest.approx(2.0)


def test_a_pod_without_a_constant_queue_says_nothing_about_its_capacity() -> None:
    scrapes = [scrape(0, waiting=1, finished=1), scrape(5, waiting=0, finished=9), scrape(10, waiting=3, finished=20)]

    load = load_of({"a": scrapes}, ["a"], "pods")

    assert load is not None
    assert load.capacity_per_s is None


def test_ttft_is_over_the_window_and_survives_a_restart_of_the_server() -> None:
    def buckets(fast: float, all_of_them: float) -> tuple[tuple[float, float], ...]:
        return ((1.0, fast), (10.0, all_of_them), (math.inf, all_of_them))

    scrapes = [
        scrape(0, ttft_buckets=buckets(1000, 1000)),
        scrape(10, ttft_buckets=buckets(1000, 1010)),
        scrape(20, ttft_buckets=buckets(0, 10)),
    ]

    load = load_of({"a": scrapes}, ["a"], "pods")

    assert load is not None
    assert load.ttft_count == 20
    assert load.ttft_p99_s == pytest.approx(1 + 9 * 0.99)
    assert load.ttft_certain_s == pytest.approx(1 + 9 * (0.99 - 2 * math.sqrt(0.99 * 0.01 / 20)))


def test_one_scrape_has_gauges_but_no_rates() -> None:
    load = load_of({"a": [scrape(0, running=1, waiting=1, finished=5, kv_blocks=99)]}, ["a"], "pods")

    assert load is not None
    assert (load.arrivals_per_s, load.capacity_per_s, load.ttft_p99_s) == (None, None, None)
    assert (load.kv_blocks, load.peak_in_flight) == (99, 2)


def test_arrivals_at_a_new_pod_count_over_the_whole_window() -> None:
    old = [scrape(0, finished=10), scrape(60, finished=70)]
    new = [scrape(55), scrape(60, running=6)]

    load = load_of({"old": old, "new": new}, ["old", "new"], "pods")

    assert load is not None
    assert load.arrivals_per_s == pytest.approx(66 / 60)


@pytest.mark.parametrize(
    ("scrapes", "capacity_per_s"),
    [
        pytest.param([(0, 3, 0), (5, 3, 1)], None, id="one of eight has ended: it was nearly done anyway"),
        pytest.param([(0, 3, 0), (5, 3, 8)], 8 / 5, id="all that ran have"),
        pytest.param([(0, 3, 0), (50, 3, 2)], 2 / 50, id="requests longer than the window"),
        pytest.param([(0, 0, 0), (10, 1, 90), (20, 1, 100), (30, 0, 190)], 1, id="only the time with a queue counts"),
    ],
)
def test_the_capacity_is_measured_over_all_time_with_a_queue(
    scrapes: list[tuple[float, float, float]], capacity_per_s: float | None
) -> None:
    pod = [scrape(time_s, running=8, waiting=waiting, finished=finished) for time_s, waiting, finished in scrapes]

    load = load_of({"a": pod}, ["a"], "pods")

    assert load is not None
    assert load.capacity_per_s == capacity_per_s


def test_the_throughput_of_a_pod_is_known_after_45_seconds() -> None:
    short, long = ([scrape(0), scrape(time_s, finished=90)] for time_s in (40, 45))

    loads = [load_of({"a": pod}, ["a"], "pods") for pod in (short, long)]

    assert [load.finished_per_s for load in loads if load] == [None, 2]


def test_what_is_aborted_has_left_and_is_no_work() -> None:
    full = [scrape(5.0 * n, running=8, waiting=3, finished=13.0 * n, answered=3.0 * n) for n in range(13)]

    load = load_of({"a": full}, ["a"], "pods")

    assert load is not None
    assert load.arrivals_per_s == pytest.approx(13 / 5)
    assert load.capacity_per_s == load.finished_per_s == pytest.approx(3 / 5)


@pytest.mark.parametrize(
    ("running", "waiting", "is_full"),
    [
        pytest.param([20, 14, 22, 17, 19, 15], 3, True, id="full, of requests that fill the cache"),
        pytest.param([2, 6, 10, 14, 18, 20], 3, False, id="it fills up"),
        pytest.param([20, 14, 22, 17, 19, 15], 0, False, id="without a queue"),
    ],
)
def test_a_pod_is_full_that_has_a_queue_throughout_and_runs_as_many_as_before(
    running: list[int], waiting: float, is_full: bool
) -> None:
    scrapes = [scrape(10.0 * number, running=each, waiting=waiting) for number, each in enumerate(running)]
    load = load_of({"a": scrapes}, ["a"], "pods")
    assert load is not None
    assert [pod.is_full for pod in load.pods] == [is_full]


def test_the_work_of_a_pod_is_counted_in_tokens_and_known_after_45_seconds() -> None:
    """Cached tokens of prompts are apart. A server that does not count tokens has no work, nor has one that hangs."""
    busy = [
        scrape(at_s, served=Demand(0.1 * at_s, 100 * at_s, 400 * at_s), cache_hits=at_s, cache_queries=4 * at_s)
        for at_s in (0, 20, 40, 50)
    ]
    silent = [scrape(at_s, running=9, waiting=1) for at_s in (0, 20, 40, 50)]

    loads = [load_of({"a": pod}, ["a"], "pods") for pod in (busy[:3], busy, silent)]

    assert [load.pods[0].work for load in loads if load] == [None, pytest.approx(Demand(0.1, 75, 400, 25)), None]


def test_a_batch_request_anywhere_in_the_window_is_noted() -> None:
    pod = [scrape(0, waiting=1, batch_waiting=1), scrape(5, running=1, batch_running=1), scrape(10)]

    loads = [load_of({"a": pod[first:]}, ["a"], "pods") for first in range(3)]

    assert [load.batch for load in loads if load] == [True, True, False]


@pytest.mark.parametrize(
    ("values", "expected"), [([], 0), ([5], 0), ([1, 4, 9], 8), ([7, 9, 2, 3], 2 + 2 + 1), ([3, 0], 0)]
)
def test_a_counter_that_drops_was_restarted_at_zero(values: list[float], expected: float) -> None:
    assert increase(values) == expected


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.5, 0.1), (0.25, 0.05), (0.75, 0.1 + 0.9 * 0.5), (1.0, 1.0)],
)
def test_a_quantile_is_linear_within_its_bucket(share: float, expected: float) -> None:
    assert quantile(share, {0.1: 10, 1.0: 20, math.inf: 20}) == pytest.approx(expected)


def test_beyond_the_last_bound_the_quantile_is_that_bound() -> None:
    assert quantile(0.99, {0.1: 1, 1.0: 2, math.inf: 100}) == 1.0


@pytest.mark.parametrize("buckets", [{}, {0.1: 0.0, math.inf: 0.0}])
def test_without_observations_there_is_no_quantile(buckets: dict[float, float]) -> None:
    assert quantile(0.99, buckets) is None


@pytest.mark.parametrize(
    ("scrapes", "quiet_s"),
    [
        pytest.param([scrape(0), scrape(5), scrape(10)], 10.0, id="no request in the window"),
        pytest.param([scrape(0)], 0.0, id="one scrape shows no time"),
        pytest.param([scrape(0), scrape(5, running=1), scrape(10), scrape(15)], 5.0, id="since one ran"),
        pytest.param([scrape(0), scrape(5, waiting=1)], 0.0, id="one waits"),
        pytest.param([scrape(0), scrape(5, finished=1), scrape(10, finished=1)], 5.0, id="one came and went"),
        pytest.param([scrape(0), scrape(5, rejected=1)], 0.0, id="one was refused"),
        pytest.param([scrape(0), scrape(5, embedded=3), scrape(7, embedded=3)], 2.0, id="embeddings"),
        pytest.param([scrape(0, finished=9), scrape(5)], 0.0, id="a restart"),
    ],
)
def test_the_quiet_time_ends_with_the_last_request_that_scrapes_show(scrapes: list[Scrape], quiet_s: float) -> None:
    load = load_of({"a": scrapes, "b": [scrape(-50), scrape(50)]}, ["a", "b"], "pods")

    assert load is not None
    assert load.quiet_s == quiet_s


def test_nothing_is_quiet_while_a_pod_is_silent() -> None:
    load = load_of({"a": [scrape(0), scrape(60)]}, ["a", "b"], "pods")

    assert load is not None
    assert load.quiet_s == 0.0
    assert load.with_held(0) is load


def counting(time_s: float, requests: float, *, cached: float = 0, batch: float = 0) -> Scrape:
    """Requests of 100 prompt and 10 predicted output tokens each."""
    arrived, in_batch = (Demand(count, 100 * count, 10 * count) for count in (requests, batch))
    return scrape(time_s, arrived=arrived, batch_arrived=in_batch, cache_hits=cached, cache_queries=100 * requests)


def test_demand_is_what_arrived_in_the_last_seconds_without_cached_prompt_tokens() -> None:
    first = [counting(0, 0), counting(45, 900), counting(50, 910, cached=45_500), counting(60, 930, cached=46_500)]
    second = [counting(50, 0), counting(60, 15)]  # ready since then

    load = load_of({"a": first, "b": second}, ["a", "b"], "pods")

    assert load is not None
    assert load.demand is not None
    assert load.demand.requests == pytest.approx((30 + 15) / 15)
    assert load.demand.output_tokens == pytest.approx((30 + 15) * 10 / 15)
    share_cached = 46_500 / (93_000 + 1_500)
    assert load.demand.prompt_tokens == pytest.approx((30 + 15) * 100 / 15 * (1 - share_cached))


def test_demand_of_the_batch_lane_is_told_apart_and_a_restart_counts_from_zero() -> None:
    load = load_of({"a": [counting(0, 50, batch=20), counting(10, 30, batch=10)]}, ["a"], "pods")

    assert load is not None
    assert load.demand == Demand(3, 300, 30)
    assert load.batch_demand == Demand(1, 100, 10)


def test_servers_that_do_not_count_arrivals_have_no_demand() -> None:
    load = load_of({"a": [scrape(0), scrape(10, finished=5)]}, ["a"], "pods")

    assert load is not None
    assert (load.demand, load.arrivals_per_s) == (None, 0.5)


def test_the_p99_of_prompt_lengths_is_what_they_surely_have_within_the_window() -> None:
    """All of a bucket's prompts may be as short as its lower bound."""

    def buckets(short: float, long: float) -> tuple[tuple[float, float], ...]:
        return ((4096.0, short), (8192.0, long), (math.inf, long))

    before = scrape(0, prompt_buckets=buckets(5000, 5000))
    lengths = {
        long: load_of({"a": [before, scrape(9, prompt_buckets=buckets(6000 - long, 6000))]}, ["a"], "pods")
        for long in (5, 50, 1000)
    }

    assert {long: load.prompt_p99_tokens for long, load in lengths.items() if load} == {5: 0, 50: 4096, 1000: 4096}


def test_until_answers_have_ended_they_are_at_least_as_long_as_those_that_have_begun() -> None:
    """Where nobody knows better: of two pods, the one that has answered 30 does."""
    arrived = [Demand(), Demand(10, 1000, 1900)]
    served = {"served": Demand(20, 2000, 12_000)}
    new = [scrape(at_s, arrived=demand, answered=29, **served) for at_s, demand in zip((0, 10), arrived, strict=True)]
    old = [scrape(at_s, arrived=demand, answered=30, **served) for at_s, demand in zip((0, 10), arrived, strict=True)]

    loads = [load_of(pods, pods, "pods") for pods in ({"a": new}, {"a": old}, {"a": new, "b": old})]

    assert [load.demand.output_tokens for load in loads if load and load.demand] == [600, 190, 380]
