"""A tiny model, profiled."""

import json
from pathlib import Path

import pytest
import torch

from harness.checkpoints.families import FAMILIES, OTHERS, save
from harness.checkpoints.quantized import FORMATS, write_both
from llmservice_bench.profile import ceilings as machine
from llmservice_bench.profile.benchmark import least, open_engine, profile_phase, table
from llmservice_bench.profile.ceilings import Ceilings
from llmservice_bench.profile.phase import Phase, PhaseLoad
from llmservice_planner.command import main
from llmservice_server.engine.engine import Engine
from llmservice_server.runtime import startup
from llmservice_server.tiny.model import TinyModelSpec, write_tiny_model

pytestmark = pytest.mark.slow

PHASES = (Phase("prefill", 1, 24), Phase("decode", 1, 8), Phase("decode", 3, 8))
CEILINGS = Ceilings(bandwidth_bytes_per_s=1e9, flops=1e9, dtype=torch.float32)


@pytest.fixture(autouse=True)
def quickly_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ceilings, before and after each phase, as no test looks at their size."""
    monkeypatch.setattr(machine, "_READ_BYTES", 1 << 20)
    monkeypatch.setattr(machine, "_MATMUL_WIDTH", 128)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, TinyModelSpec(layers=2, hidden_size=32, heads=4, kv_heads=2, vocab_size=512))
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return open_engine(folder, PHASES, threads=1)


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.name)
def test_a_phase_has_times_by_kind_latency_and_throughput(engine: Engine, phase: Phase) -> None:
    row = profile_phase(engine, phase)
    assert row["tokens_per_s"] > 0
    latency = "ttft" if phase.kind == "prefill" else "itl"
    assert 0 < row[f"{latency}_p50_ms"] <= row[f"{latency}_p99_ms"]
    kinds = [row[f"{kind}_ms"] for kind in ("products", "attention", "between", "sampling", "host")]
    assert all(milliseconds > 0 for milliseconds in kinds)
    assert row["layers_ms"] == 0
    assert phase.name in "\n".join(table(CEILINGS, [row | least(phase, engine.runner.model, CEILINGS, row)]))
    assert not engine.has_work


def test_layers_computed_in_compiled_calls_are_one_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(startup, "_WORTH_COMPILING_BYTES", 0)
    write_tiny_model(tmp_path, TinyModelSpec(layers=2, hidden_size=192, heads=6, kv_heads=3, vocab_size=512))
    engine = open_engine(tmp_path, PHASES, threads=1)
    assert engine.runner.decode_path is not None
    row = profile_phase(engine, PHASES[2])
    assert all(row[f"{kind}_ms"] > 0 for kind in ("layers", "products", "sampling", "host"))
    assert row["attention_ms"] == 0
    assert not caplog.records  # such as of a step that failed


def test_the_least_work_is_counted_from_the_shape(engine: Engine) -> None:
    model = engine.runner.model
    layer = 32 * (32 + 2 * 16) + 32 * 32 + 3 * 32 * 96
    weights, head = 2 * layer, 512 * 32
    kv_bytes = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, head_dim, float32
    assert PHASES[2].least_bytes(model) == 4 * (weights + head) + 3 * 8 * kv_bytes
    attention = 4 * 2 * 4 * 8
    assert PHASES[2].least_operations(model) == 2 * 3 * (weights + head) + attention * 3 * 8
    assert PHASES[0].least_bytes(model) == 4 * (weights + head)
    assert PHASES[0].least_operations(model) == 2 * (24 * weights + head) + attention * 24 * 25 // 2


def test_a_step_is_compared_with_its_minimum_time(engine: Engine) -> None:
    model, phase = engine.runner.model, PHASES[2]
    result = least(phase, model, CEILINGS, {"tokens_per_s": 300.0})  # 10 ms a step
    assert result["bound"] == "compute"
    assert result["least_ms"] == pytest.approx(phase.least_operations(model) / 1e9 * 1000)
    assert result["ceiling_share"] == pytest.approx(result["least_ms"] / 10)


def test_a_load_that_the_engine_refuses_is_not_timed_as_empty_steps(engine: Engine) -> None:
    with pytest.raises(ValueError, match="decode 1 x 8: 8 prompt tokens and max_tokens 1001 make 1009"):
        PhaseLoad(engine, PHASES[1], most_steps=1000)
    assert not engine.has_work


def test_the_command_prints_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--batches", "1", "--prompts", "16", "--context", "8", "-o", "json"]
    assert main(["bench", "profile", str(folder), *asked]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["phase"] for row in result["rows"]] == ["prefill 1 x 16", "decode 1 x 8"]
    assert all(row["least_ms"] > 0 for row in result["rows"])
    assert result["ceilings"]["ridge_rows"] > 0


@pytest.mark.parametrize("family", ["qwen3-moe", "olmoe"])
def test_a_mixture_and_a_model_of_transformers_code_are_refused(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save((FAMILIES | OTHERS)[family], tmp_path)
    assert main(["bench", "profile", str(tmp_path), "--batches", "1", "--prompts", "16", "--context", "8"]) == 2
    assert f"{tmp_path} is a mixture of experts or runs by transformers' code" in capsys.readouterr().err


def test_a_quantised_model_has_the_operations_of_its_dense_one(tmp_path: Path) -> None:
    quantized, dense = write_both(tmp_path, FORMATS["W4A16"])
    models = [open_engine(folder, PHASES, threads=1).runner.model for folder in (quantized, dense)]
    for phase in PHASES:
        assert phase.least_operations(models[0]) == phase.least_operations(models[1])
        assert phase.least_bytes(models[0]) < phase.least_bytes(models[1])


def test_a_folder_without_a_model_is_refused_with_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "profile", str(tmp_path)]) != 0
    assert "config.json" in capsys.readouterr().err
