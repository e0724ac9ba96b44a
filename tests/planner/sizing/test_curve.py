"""The curve over batch sizes: what holds of any model, and what `llmservice plan --curve` shows."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from llmservice_planner.command import main
from llmservice_planner.sizing.curve import TypicalRequest, curve
from llmservice_planner.sizing.latency import LatencyModel, StepBatch, attention_pairs

Capture = pytest.CaptureFixture[str]
MODEL = LatencyModel(5e-4, 1e-6, 5e-3, 2e-5, 5e-8, 1e-9)
SHAPE = "layers=32,kvHeads=8,heads=32,hiddenSize=4096,intermediateSize=14336,vocabSize=128256"
ON_H100 = ("plan", "--shape", SHAPE, "--gpu", "h100", "--max-model-len", "8192", "--curve")

coefficients = st.floats(1e-7, 1e-2)
models = st.builds(LatencyModel, *[coefficients] * 6, expert_share=st.floats(0, 1), expert_idle=st.floats(0, 1))
requests = st.builds(TypicalRequest, st.integers(1, 5000), st.integers(1, 2000), st.integers(64, 2048))


@settings(max_examples=50)
@given(models, requests, st.integers(1, 300), st.none() | coefficients, st.none() | coefficients)
def test_latencies_grow_with_the_batch_and_the_largest_within_the_targets_is_the_last_that_meets_them(
    model: LatencyModel, typical: TypicalRequest, most: int, itl_s: float | None, ttft_s: float | None
) -> None:
    found = curve(model, typical, most, "", itl_p99_s=itl_s, ttft_p99_s=ttft_s)
    for name in ("itl_p50_s", "itl_p99_s", "ttft_s"):
        times = [getattr(point, name) for point in found.points]
        assert all(later >= earlier * (1 - 1e-9) for earlier, later in pairwise(times)), name
    assert 1 <= found.knee <= most
    meeting = [
        point.num_seqs
        for point in found.points
        if (itl_s is None or point.itl_p99_s <= itl_s) and (ttft_s is None or point.ttft_s <= ttft_s)
    ]
    assert found.within_slo == (None if itl_s is None and ttft_s is None else max(meeting, default=0))


@pytest.mark.slow
@given(models, requests)
def test_the_tokens_per_second_have_no_jump_where_every_step_has_a_prompt(
    model: LatencyModel, typical: TypicalRequest
) -> None:
    points = curve(model, typical, 600, "").points
    for low, high in pairwise(points[10:]):
        assert high.tokens_per_s == pytest.approx(low.tokens_per_s, rel=0.11)


def test_one_sequence_gets_a_token_a_step_and_its_prompt_now_and_then() -> None:
    typical = TypicalRequest(1000, 500, 2048)
    (point,) = curve(MODEL, typical, 1, "").points
    request_s = 500 * MODEL.decode_s(1, 1250) + MODEL.prefill_s(1000)
    assert point.tokens_per_s == pytest.approx(500 / request_s, rel=0.02)
    assert point.itl_p99_s == point.itl_p50_s, "0.2 % of the steps have a prompt"
    assert point.ttft_s == pytest.approx(MODEL.decode_s(1, 1250) + MODEL.prefill_s(1000), rel=0.02)


def test_the_others_decode_while_a_prompt_is_computed() -> None:
    point = curve(MODEL, TypicalRequest(1000, 500, 2048), 100, "").points[-1]
    step_s = MODEL.seconds(StepBatch(100, 100 * 1250, 1000, 1, attention_pairs(0, 1000)))
    assert point.ttft_s == pytest.approx(point.itl_p99_s + step_s)


def test_the_knee_is_where_more_sequences_stop_to_pay() -> None:
    """Of decoding alone without contexts, tokens/s = n / max(w, n t): they grow up to the ridge, 500."""
    model = LatencyModel(0, 0, 1e-2, 2e-5, 0, 0)
    found = curve(model, TypicalRequest(1, 100_000, 2048), 1000, "")
    assert found.knee == pytest.approx(500, abs=6)
    assert [(bound, low) for low, _, bound in found.regions] == [("memory", 1), ("compute", pytest.approx(501, abs=1))]


def test_the_table_marks_knee_targets_regions_and_the_end(capsys: Capture) -> None:
    assert main([*ON_H100, "--itl-p99", "50ms", "--ttft-p99", "0.3s"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0] == "llama on h100-80gb: prompts of 1280 tokens, answers of 256"
    (knee,) = [line for line in lines if line.endswith("<- knee")]
    (within,) = [line for line in lines if line.endswith("<- largest within the targets")]
    assert int(knee.split()[0]) < int(within.split()[0])
    assert {"memory", "compute"} <= {line.split()[-1] for line in lines[3:12]}
    assert f"up to {within.split()[0]} sequences" in out
    assert "the KV cache holds" in out
    assert "▲ knee" in out
    assert "--curve-out FILE.svg plots it" in out
    assert max(map(len, lines)) <= 120


def test_json_and_yaml_have_the_points(capsys: Capture) -> None:
    assert main([*ON_H100, "-o", "json"]) == 0
    as_json = json.loads(capsys.readouterr().out)
    assert main([*ON_H100, "-o", "yaml"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == as_json
    assert as_json["within_slo"] is None
    assert as_json["knee"] in [point["num_seqs"] for point in as_json["points"]]


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_the_plot_is_written(tmp_path: Path, suffix: str, capsys: Capture) -> None:
    path = tmp_path / f"curve{suffix}"
    assert main([*ON_H100, "--curve-out", str(path), "--itl-p99", "30ms"]) == 0
    assert f"plotted to {path}" in capsys.readouterr().out
    if suffix == ".svg":
        texts = [each.text or "" for each in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]  # noqa: S314
        assert {"llama on h100-80gb", "memory-bound", "compute-bound", "target: 30.0 ms"} <= set(texts)
        assert any(text.startswith("knee: ") for text in texts)


def test_a_calibrated_model_gives_a_cpu_a_curve(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "measured.json"
    path.write_text(json.dumps({**MODEL.to_dict(), "calibration": {}}))
    flags = ("plan", "--shape", SHAPE, "--cpu-memory", "64Gi", "--max-model-len", "4096", "--curve")
    assert main([*flags, "--latency", str(path)]) == 0
    assert capsys.readouterr().out.startswith("llama on cpu, measured.json: prompts of")
    assert main([*flags[:-1], "--latency", str(path)]) == 2
    assert "--latency is about traffic or the curve" in capsys.readouterr().err
    assert main(flags) == 2
    assert "llmservice calibrate -o FILE, and give --latency FILE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (("--itl-p99", "1ms"), 1, "even one sequence misses ITL p99 of 1.0 ms"),
        (("--curve-out", "curve.gif"), 2, "expected .svg or .png"),
        (("--latency", "absent.json"), 2, "absent.json is no latency model"),
        (("--max-num-seqs", "8"), 0, "the curve ends at 8: max_num_seqs as set"),
        (("--prompt-tokens", "p50=300,p99=3000", "--output-tokens", "200"), 0, "answers of 200"),
        (("--prompt-tokens", "300"), 2, "needs both lengths of a request or none"),
        (("--prompt-tokens", "9000", "--output-tokens", "200"), 2, "longer than max_model_len 8192: lower them"),
    ],
)
def test_what_cannot_be_is_said(flags: tuple[str, ...], status: int, message: str, capsys: Capture) -> None:
    assert main([*ON_H100, *flags]) == status
    captured = capsys.readouterr()
    assert message in captured.out + captured.err


def test_without_matplotlib_the_table_says_how_to_get_plots() -> None:
    code = (
        "import sys; import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'matplotlib' else find(name, *rest)\n"
        "sys.modules['matplotlib'] = None\n"
        f"from llmservice_planner.command import main; sys.exit(main({list(ON_H100)!r}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "pip install 'llmservice[plots]'" in done.stdout
