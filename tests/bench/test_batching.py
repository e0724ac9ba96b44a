"""The search for what a strategy bears, on a model so small that it takes a moment."""

import pytest

from llmservice_bench.lengths import Lengths
from llmservice_server.tiny.model import TinyModelSpec, write_tiny_model
from scheduling.batching import CONTINUOUS, highest_rate, ttft_alone_s
from scheduling.findings import Setup


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    folder = tmp_path_factory.mktemp("tiny")
    spec = TinyModelSpec(layers=1, hidden_size=32, heads=2, kv_heads=1)
    write_tiny_model(folder, spec)
    return Setup(folder, spec.vocab_size, [Lengths(5, 2), Lengths(40, 12)], max_num_seqs=2, kv_cache_bytes=4 << 20)


def test_promise_begins_with_what_requests_wait_that_have_the_engine_to_themselves(setup: Setup) -> None:
    engine = setup.engine(scheduler=CONTINUOUS)
    assert 0 < ttft_alone_s(setup, engine) < 60
    assert not engine.has_work


def test_search_ends_though_every_request_is_in_time_at_any_rate(setup: Setup) -> None:
    report = highest_rate(setup, setup.engine(scheduler=CONTINUOUS), ttft_bound_s=60.0, start=400.0)
    assert (report.completed, report.failed) == (2, 0)


def test_who_keeps_the_bound_at_no_rate_is_credited_with_the_lowest(setup: Setup) -> None:
    report = highest_rate(setup, setup.engine(scheduler=CONTINUOUS), ttft_bound_s=0.0, start=400.0)
    assert (report.completed, report.failed) == (2, 0)
    assert report.ttft_s.p99 > 0
