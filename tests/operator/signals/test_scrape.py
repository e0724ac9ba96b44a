from __future__ import annotations

import math

import pytest

from llmservice_operator.scaling.demand import Demand
from llmservice_operator.signals.scrape import ScrapeError, parse_exposition

EXPOSITION = """\
# TYPE llmservice_num_requests_running gauge
llmservice_num_requests_running 3
# TYPE llmservice_num_requests_waiting gauge
llmservice_num_requests_waiting{lane="interactive"} 4
llmservice_num_requests_waiting{lane="batch"} 1
# TYPE llmservice_kv_cache_usage_perc gauge
llmservice_kv_cache_usage_perc 0.5
# TYPE llmservice_request_success counter
llmservice_request_success_total{finished_reason="stop"} 10
llmservice_request_success_total{finished_reason="length"} 2
llmservice_request_success_total{finished_reason="abort"} 5
llmservice_request_success_total{finished_reason="error"} 1
# TYPE llmservice_time_to_first_token_seconds histogram
llmservice_time_to_first_token_seconds_bucket{le="0.5"} 7
llmservice_time_to_first_token_seconds_bucket{le="+Inf"} 12
llmservice_time_to_first_token_seconds_sum 4.2
llmservice_time_to_first_token_seconds_count 12
# TYPE llmservice_kv_cache_blocks gauge
llmservice_kv_cache_blocks{state="free"} 90
llmservice_kv_cache_blocks{state="held"} 9
llmservice_kv_cache_blocks{state="cached"} 1
# TYPE llmservice_memory_bytes gauge
llmservice_memory_bytes{kind="weights"} 1.5e9
llmservice_memory_bytes{kind="kv_cache"} 3e9
# TYPE llmservice_kernel_fallback gauge
llmservice_kernel_fallback{part="attention"} 0.0
llmservice_kernel_fallback{part="top_k_top_p"} 1.0
"""


def test_lanes_reasons_and_states_are_added_up() -> None:
    scrape = parse_exposition(EXPOSITION, 100.0)

    assert (scrape.time_s, scrape.running, scrape.waiting) == (100.0, 3, 5)
    assert (scrape.finished, scrape.answered) == (18, 12)
    assert (scrape.kv_usage, scrape.kv_blocks, scrape.weights_bytes) == (0.5, 100, 1.5e9)
    assert scrape.fallbacks == ("top_k_top_p",)
    assert scrape.ttft_buckets == ((0.5, 7), (math.inf, 12))


def test_arrivals_are_counted_by_lane_where_the_server_reports_them() -> None:
    arrivals = """\
llmservice_arrived_requests_total{lane="interactive"} 7
llmservice_arrived_requests_total{lane="batch"} 2
llmservice_arrived_prompt_tokens_total{lane="interactive"} 700
llmservice_arrived_output_tokens_total{lane="interactive"} 140.5
llmservice_prefix_cache_hits_total 300
llmservice_prefix_cache_queries_total 900
llmservice_prompt_tokens_total 650
llmservice_generation_tokens_total 90
llmservice_request_prompt_tokens_bucket{le="128"} 6
llmservice_request_prompt_tokens_bucket{le="+Inf"} 7
"""
    scrape = parse_exposition(EXPOSITION + arrivals, 0.0)

    assert scrape.arrived == Demand(9, 700, 140.5)
    assert scrape.batch_arrived == Demand(2, 0, 0)
    assert (scrape.cache_hits, scrape.cache_queries) == (300, 900)
    assert scrape.served == Demand(12, 650, 90)
    assert scrape.prompt_buckets == ((128, 6), (math.inf, 7))
    assert parse_exposition(EXPOSITION, 0.0).arrived is None


@pytest.mark.parametrize("text", ["", "up 1\n", "llmservice_num_requests_waiting 1\n", "<html>not found</html>\n"])
def test_metrics_of_another_server_are_refused(text: str) -> None:
    with pytest.raises(ScrapeError):
        parse_exposition(text, 0.0)


@pytest.mark.parametrize("value", ["NaN", "+Inf"])
def test_a_value_that_is_not_finite_counts_as_missing(value: str) -> None:
    with pytest.raises(ScrapeError):
        parse_exposition(EXPOSITION.replace("running 3", f"running {value}"), 0.0)
    assert parse_exposition(f"{EXPOSITION}llmservice_kv_cache_blocks {value}\n", 0.0).kv_blocks == 100


@pytest.mark.parametrize("labels", ["", '{le="wide"}'])
def test_buckets_without_a_bound_are_refused(labels: str) -> None:
    with pytest.raises(ScrapeError):
        parse_exposition(f"{EXPOSITION}llmservice_time_to_first_token_seconds_bucket{labels} 1\n", 0.0)


def test_a_lane_without_a_series_is_empty() -> None:
    assert parse_exposition("llmservice_num_requests_running 1\n", 0.0).waiting == 0


@pytest.mark.parametrize(
    ("running", "batch_running"),
    [
        pytest.param('{lane="interactive"} 3\nllmservice_num_requests_running{lane="batch"} 2', 2, id="by lane"),
        pytest.param(" 5", None, id="a server that does not tell the lane of what runs"),
        pytest.param(" 0", 0, id="nothing runs"),
    ],
)
def test_requests_are_counted_by_lane(running: str, batch_running: float | None) -> None:
    text = EXPOSITION.replace("llmservice_num_requests_running 3", f"llmservice_num_requests_running{running}")

    scrape = parse_exposition(text, 0.0)

    assert (scrape.waiting, scrape.batch_waiting, scrape.batch_running) == (5, 1, batch_running)
