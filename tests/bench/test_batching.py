"""The comparison of the strategies with a tiny model."""

import pytest

from llmservice_bench.trace import Lengths
from llmservice_server.tiny.model import TinyModelSpec, write_tiny_model
from scheduling.batching import Contest, LatencyTarget, ttft_alone_s
from scheduling.findings import CONTINUOUS, DYNAMIC, STATIC, Findings, Setup

pytestmark = pytest.mark.slow

COARSE = LatencyTarget(10, start=1.0, tolerance=1.0)


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    folder = tmp_path_factory.mktemp("tiny")
    spec = TinyModelSpec(layers=1, hidden_size=32, heads=2, kv_heads=1)
    write_tiny_model(folder, spec)
    lengths = [Lengths(5, 2), Lengths(40, 12)]
    return Setup(folder, spec.vocab_size, lengths, "tiny", max_num_seqs=2, kv_cache_bytes=4 << 20)


def test_target_is_a_multiple_of_the_latency_on_an_idle_engine(setup: Setup) -> None:
    engine = setup.engine(scheduler=CONTINUOUS)
    assert 0 < ttft_alone_s(setup, engine) < 60
    assert not engine.has_work


def test_every_strategy_has_its_capacity_its_searched_runs_and_its_ratio(setup: Setup) -> None:
    contest = Contest(setup, setup.engine(scheduler=CONTINUOUS, prefix_caching=False), COARSE, alone_s=0.002)
    findings = Findings()
    capacity = contest.capacities(dict.fromkeys(contest.engines, 200.0), findings)
    assert list(capacity) == [CONTINUOUS, DYNAMIC, STATIC]
    for name, report in capacity.items():
        assert report.completed >= 100
        assert report.row().items() <= next(row for row in findings.rows if row["load"].startswith(f"{name}, ")).items()
        searched = [row for row in findings.rows if row["load"] == name]
        assert {row["target_ms"] for row in searched} <= {20.0}
        assert [row["rate"] for row in searched] == sorted(row["rate"] for row in searched)
    assert [check.what.partition("of one alone, ")[2] for check in findings.checks] == [
        "continuous ÷ static",
        "continuous ÷ dynamic",
    ]


def test_latencies_of_all_strategies_are_measured_on_the_same_requests(setup: Setup) -> None:
    contest = Contest(setup, setup.engine(scheduler=CONTINUOUS, prefix_caching=False), COARSE, alone_s=0.002)
    findings = Findings()
    contest.near_capacity(50.0, findings)
    assert [row["completed"] for row in findings.rows] == [2, 2, 2]
    assert findings.checks[0].measured > 0
