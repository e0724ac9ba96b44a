"""The throughput of strategies without a target, with a tiny model and with given figures."""

import pytest

from llmservice_bench.report import Report
from llmservice_bench.trace import Lengths
from llmservice_server.tiny.model import TinyModelSpec, write_tiny_model
from scheduling.findings import CONTINUOUS, DYNAMIC, STATIC, Setup
from scheduling.saturation import BATCHES, Saturated, explanation, measure


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    folder = tmp_path_factory.mktemp("tiny")
    spec = TinyModelSpec(layers=1, hidden_size=32, heads=2, kv_heads=1)
    write_tiny_model(folder, spec)
    lengths = [Lengths(5, 3), Lengths(40, 12), Lengths(9, 1)]
    return Setup(folder, spec.vocab_size, lengths, "tiny", max_num_seqs=2, kv_cache_bytes=4 << 20)


def test_steps_in_between_are_full_of_sequences_only_where_batching_is_continuous(setup: Setup) -> None:
    findings = measure(setup)
    rows = {row["load"].partition(",")[0]: row for row in findings.rows}
    assert {row["completed"] for row in findings.rows} == {BATCHES * setup.max_num_seqs}
    assert rows[CONTINUOUS]["sequences_per_step"] > 1.5
    assert 1 <= rows[DYNAMIC]["sequences_per_step"] < rows[CONTINUOUS]["sequences_per_step"]
    assert rows[STATIC]["padding_waste"] > 0.2
    assert rows[DYNAMIC]["padding_waste"] == rows[CONTINUOUS]["padding_waste"] == 0
    assert all(row["step_mean_ms"] > 0 < row["step_p50_ms"] for row in findings.rows)
    assert findings.notes[0].startswith("tiny: while requests wait")


def test_ratio_is_explained_by_sequences_per_step_and_by_what_the_larger_step_takes() -> None:
    nothing = Report.of([])
    result = explanation(
        {
            CONTINUOUS: Saturated(nothing, 30.0, 0.004, 0.004, 0.0),
            DYNAMIC: Saturated(nothing, 12.0, 0.002, 0.002, 0.0),
            STATIC: Saturated(nothing, 12.0, 0.004, 0.004, 0.6),
        }
    )
    assert "continuous 30.0 in 4.00 ms, dynamic 12.0 in 2.00 ms, static 12.0 in 4.00 ms, where 60% " in result
    assert "2.50 times dynamic's sequences in steps that take 2.00 times as long: 1.25 times its tokens" in result
