"""The comparison of schedulers, on a model so small that it takes a moment."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from llmservice_bench.lengths import Lengths
from llmservice_server.tiny.model import TinyModelSpec, write_tiny_model

SCRIPT = Path(__file__).parents[2] / "benchmarks/strategies.py"
LENGTHS = [Lengths(5, 3), Lengths(40, 12), Lengths(9, 1), Lengths(20, 6), Lengths(3, 9)]


@pytest.fixture(scope="module")
def strategies() -> ModuleType:
    spec = importlib.util.spec_from_file_location("strategies", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["strategies"] = importlib.util.module_from_spec(spec)  # its dataclasses look it up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder, TinyModelSpec(layers=1, hidden_size=32, heads=2, kv_heads=1))
    return folder


def test_every_strategy_serves_the_whole_trace_and_only_static_pads(strategies: ModuleType, model: Path) -> None:
    waste = {}
    for name, settings in strategies.STRATEGIES.items():
        small = settings | {"kv_cache_memory_bytes": 4 << 20, "max_num_seqs": 2, "max_batch_wait_s": 0.0}
        if name == "continuous":
            del small["max_batch_wait_s"]
        report, waste[name] = strategies.measure(model, small, strategies.arrivals_of(LENGTHS, float("inf")))
        assert (report.completed, report.failed) == (5, 0)
        assert report.output_tokens == sum(each.output_tokens for each in LENGTHS)
        assert report.ttft_s.count == report.e2e_s.count == 5
    assert waste["static"].of_padding > 0.2
    assert waste["dynamic"].of_padding == waste["continuous"].of_padding == 0
    assert waste["continuous"].of_kv_cache < waste["dynamic"].of_kv_cache < waste["static"].of_kv_cache


def test_all_strategies_see_the_same_requests_at_any_rate(strategies: ModuleType) -> None:
    at_once, slowly = (strategies.arrivals_of(LENGTHS, rate) for rate in (float("inf"), 2.0))
    assert [each.prompt_token_ids for each in at_once] == [each.prompt_token_ids for each in slowly]
    assert {each.at_s for each in at_once} == {0.0}
    assert slowly[-1].at_s > 0.5
