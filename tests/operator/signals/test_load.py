from __future__ import annotations

import math

import pytest

from llmservice_operator.signals.load import load_of
from llmservice_operator.signals.scrape import Scrape


def scrape(time_s: float, *, running: float = 0, waiting: float = 0, finished: float = 0, **more: object) -> Scrape:
    return Scrape(time_s, running, waiting, finished=finished, **more)  # type: ignore[arg-type]


def test_no_pod_that_answers_means_no_load() -> None:
    assert load_of({}, ["a"], "pods") is None
    assert load_of({"a": []}, ["a"], "pods") is None


def test_pods_that_do_not_answer_are_named_and_strangers_ignored() -> None:
    load = load_of({"a": [scrape(0, running=2)], "stranger": [scrape(0, running=9)]}, ["b", "a"], "pods")

    assert load is not None
    assert (load.running, load.missing) == (2, ("b",))


def test_arrivals_count_what_an_overloaded_pod_could_not_finish() -> None:
    before, after = scrape(0, running=8, waiting=2, finished=100), scrape(10, running=8, waiting=32, finished=120)

    load = load_of({"a": [before, after]}, ["a"], "pods")

    assert load is not None
    assert load.arrivals_per_s == pytest.approx((20 + 30) / 10)
    assert load.drain_per_s == pytest.approx(2.0)


def test_a_pod_without_a_constant_queue_does_not_tell_what_it_could_drain() -> None:
    scrapes = [scrape(0, waiting=1, finished=1), scrape(5, waiting=0, finished=9), scrape(10, waiting=3, finished=20)]

    load = load_of({"a": scrapes}, ["a"], "pods")

    assert load is not None
    assert load.drain_per_s is None


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


def test_one_scrape_has_gauges_but_no_rates() -> None:
    load = load_of({"a": [scrape(0, running=1, waiting=1, finished=5, kv_blocks=99)]}, ["a"], "pods")

    assert load is not None
    assert (load.arrivals_per_s, load.drain_per_s, load.ttft_p99_s) == (None, None, None)
    assert (load.kv_blocks, load.peak_in_flight) == (99, 2)
