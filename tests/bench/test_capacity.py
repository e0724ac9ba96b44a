"""The search for a strategy's capacity with a tiny model."""

import pytest

from llmservice_bench.sweep import RateSearch
from llmservice_bench.trace import Lengths
from llmservice_server.engine.engine import Engine
from llmservice_server.tiny.model import TinyModelSpec, write_tiny_model
from scheduling.capacity import FEWEST, CapacitySearch, num_requests, rate_search, search_by_turns, served
from scheduling.findings import AT_ONCE, CONTINUOUS, Setup

TURNOVER_S = 0.01


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    folder = tmp_path_factory.mktemp("tiny")
    spec = TinyModelSpec(layers=1, hidden_size=32, heads=2, kv_heads=1)
    write_tiny_model(folder, spec)
    return Setup(folder, spec.vocab_size, [Lengths(5, 2), Lengths(40, 12)], max_num_seqs=2, kv_cache_bytes=4 << 20)


@pytest.fixture(scope="module")
def engine(setup: Setup) -> Engine:
    return setup.engine(scheduler=CONTINUOUS)


@pytest.mark.parametrize(
    ("rate", "target_s", "turnover_s", "requests"),
    [(80.0, 0.5, 0.1, 400), (200.0, 0.5, 0.1, 1000), (200.0, 0.1, 0.5, 1000), (2.0, 0.5, 0.1, FEWEST)],
)
def test_run_lasts_ten_targets_or_turnovers_but_never_has_too_few_requests_for_a_p99(
    rate: float, target_s: float, turnover_s: float, requests: int
) -> None:
    assert num_requests(rate, target_s, turnover_s) == requests


@pytest.mark.slow
def test_search_ends_where_more_requests_come_than_the_engine_can_serve(setup: Setup, engine: Engine) -> None:
    search = CapacitySearch(setup, engine, 0.05, TURNOVER_S, rate_search(200.0, tolerance=0.5))
    search_by_turns([search])
    assert search.search.broken < float("inf")
    capacity = search.capacity()
    assert capacity.completed >= FEWEST
    assert capacity.failed == 0
    assert not engine.has_work


@pytest.mark.slow
def test_the_lowest_rate_is_the_result_if_none_meets_the_target(setup: Setup, engine: Engine) -> None:
    search = CapacitySearch(setup, engine, 0.0, TURNOVER_S, rate_search(400.0, tolerance=0.5))
    search_by_turns([search])
    assert search.search.kept == 0
    assert search.capacity().completed == FEWEST
    assert search.capacity().ttft_s.p99 > 0


def test_capacity_is_the_run_at_the_highest_rate_kept_not_that_of_a_higher_one(setup: Setup, engine: Engine) -> None:
    calm, hasty = (served(engine, setup.arrivals(AT_ONCE, count), 60.0) for count in (1, 2))
    assert calm is not None
    assert hasty is not None
    known = RateSearch(10.0, kept=10.0, broken=10.2)
    search = CapacitySearch(setup, engine, 1.0, TURNOVER_S, known, [(10.0, calm), (10.2, hasty)])
    assert search.is_over
    assert search.capacity() is calm


@pytest.mark.slow
def test_searches_alternate_until_all_have_ended(setup: Setup, engine: Engine) -> None:
    searches = [CapacitySearch(setup, engine, 0.0, TURNOVER_S, rate_search(start, 0.5)) for start in (100.0, 400.0)]
    search_by_turns(searches)
    assert all(search.is_over for search in searches)


def test_late_runs_are_reported_and_stopped_ones_are_not(setup: Setup, engine: Engine) -> None:
    arrivals = setup.arrivals(AT_ONCE, 4)
    assert served(engine, arrivals, target_s=0.0) is None
    report = served(engine, arrivals, target_s=60.0)
    assert report is not None
    assert report.completed == 4
