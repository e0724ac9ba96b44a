"""`llmservice plan` as a user types it: the real command in this process, its output and its exit status."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from llmservice_planner.command import main

SHAPE_70B = "layers=80,kvHeads=8,heads=64,headDim=128,hiddenSize=8192,intermediateSize=28672,vocabSize=128256"
SHAPE_8B = "layers=32,kvHeads=8,heads=32,hiddenSize=4096,intermediateSize=14336,vocabSize=128256"

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder: one layer, float16, a single safetensors file of 1000 bytes of tensors."""
    config = {
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 1,
        "vocab_size": 64,
        "max_position_embeddings": 128,
        "dtype": "float16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"weights": np.zeros(500, np.float16)}, tmp_path / "model.safetensors")
    return tmp_path


def _plan(*arguments: str | Path) -> int:
    return main(["plan", *map(str, arguments)])


def test_70b_over_four_h100s_as_json(capsys: Capture) -> None:
    shape = ("--shape", SHAPE_70B)
    assert _plan(*shape, "--gpu", "h100-80gb", "--gpu-count", "4", "--max-model-len", "8192", "-o", "json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["kv_bytes_per_token"] == 327680
    assert answer["weights_bytes"] == 141_107_412_992
    assert answer["fits"] is True
    assert "caution: not yet servable, as the server runs on one GPU" in answer["explanation"]


def test_yaml_says_what_json_says(capsys: Capture) -> None:
    arguments = ("--shape", SHAPE_8B, "--gpu", "l4", "--max-model-len", "4096")
    _plan(*arguments, "-o", "json")
    as_json = json.loads(capsys.readouterr().out)
    _plan(*arguments, "-o", "yaml")
    assert yaml.safe_load(capsys.readouterr().out) == as_json


def test_the_table_shows_the_answer_and_every_line_of_the_working(capsys: Capture) -> None:
    arguments = ("--shape", SHAPE_8B, "--gpu", "h100", "--max-model-len", "8192")
    assert _plan(*arguments) == 0
    table = capsys.readouterr().out
    _plan(*arguments, "-o", "json")
    words = " ".join(table.split())
    for line in json.loads(capsys.readouterr().out)["explanation"]:
        assert line.split(": ", 1)[1] in words
    held = "memory for 53 of 8192 tokens or 285 typical ones"
    assert table.startswith(f"FITS on h100-80gb: at most 305 sequences in a step, {held}\n")
    assert "2 x 32 layers x 8 KV heads x 128 x 2 bytes (bfloat16) = 128.00 KiB" in table
    assert max(map(len, table.splitlines())) <= 100


def test_a_model_that_does_not_fit_exits_with_1_and_remedies(capsys: Capture) -> None:
    assert _plan("--shape", SHAPE_8B, "--gpu", "l4", "--max-model-len", "32768") == 1
    out = capsys.readouterr().out
    assert out.startswith("DOES NOT FIT on l4: ")
    assert "What would make it fit, each alone:\n  - lower max_model_len from 32768 to " in out


def test_the_proposed_length_is_one_that_fits(capsys: Capture) -> None:
    arguments = ("--shape", SHAPE_8B, "--gpu", "l4", "-o", "json")
    _plan(*arguments, "--max-model-len", "32768")
    remedies = json.loads(capsys.readouterr().out)["remedies"]
    length = next(text.rsplit(" ", 1)[1] for text in remedies if text.startswith("lower max_model_len"))
    assert _plan(*arguments, "--max-model-len", length) == 0


def test_a_folder_is_sized_by_the_bytes_of_its_checkpoint(model: Path, capsys: Capture) -> None:
    assert _plan("--model", model, "--gpu", "l4", "-o", "json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["weights_bytes"], answer["max_model_len"]) == (1000, 128)
    assert _plan("--model", model, "--gpu", "l4", "--dtype", "float32", "-o", "json") == 0
    assert json.loads(capsys.readouterr().out)["weights_bytes"] == 2000


def test_every_option_reaches_the_plan(capsys: Capture) -> None:
    def answer(*options: str) -> dict[str, object]:
        _plan("--shape", SHAPE_8B, "--gpu", "h100", "--max-model-len", "4096", "-o", "json", *options)
        return json.loads(capsys.readouterr().out)

    plain = answer()
    changed = {
        "kv_bytes_per_token": answer("--kv-dtype", "fp8"),
        "expected_sequences": answer("--expected-tokens", "512"),
        "num_blocks": answer("--block-size", "32"),
        "overhead_bytes": answer("--max-num-batched-tokens", "2048"),
        "kv_pool_bytes": answer("--gpu-memory-utilization", "0.8"),
        "limited_by": answer("--max-num-seqs", "3"),
        "itl_feasible": answer("--itl-p99", "80ms"),
        "weights_bytes": answer("--dtype", "float32"),
    }
    assert [key for key, other in changed.items() if other[key] == plain[key]] == []


def test_a_container_without_a_gpu(model: Path, capsys: Capture) -> None:
    assert _plan("--model", model, "--cpu-memory", "1Gi") == 0
    assert capsys.readouterr().out.startswith("FITS on cpu: ")


def test_the_catalogue_is_printed_without_a_model(capsys: Capture) -> None:
    assert _plan("--list-gpus") == 0
    assert "NVIDIA-H100-80GB-HBM3" in capsys.readouterr().out
    for output, parse in (("json", json.loads), ("yaml", yaml.safe_load)):
        assert _plan("--list-gpus", "-o", output) == 0
        gpus = {gpu["name"]: gpu for gpu in parse(capsys.readouterr().out)}
        assert gpus["l4"]["bandwidth_bytes_per_s"] == 300e9
        assert "NVIDIA-H100-80GB-HBM3" in gpus["h100-80gb"]["node_labels"]
    assert _plan("--list-gpus", "-o", "manifest") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "l4"], "which model? give --model MODEL or --shape"),
        (["--shape", SHAPE_8B], "which memory? give either --gpu PRODUCT"),
        (["--shape", SHAPE_8B, "--gpu", "l4", "--cpu-memory", "8Gi"], "which memory?"),
        (["--shape", SHAPE_8B, "--gpu", "l40"], "GPU 'l40' is not in the catalogue: did you mean l40s"),
        (["--shape", "layers", "--gpu", "l4"], "'layers' is not KEY=VALUE; the keys are layers, hiddenSize"),
        (["--shape", f"{SHAPE_8B},layers=3", "--gpu", "l4"], "--shape: layers is given twice"),
        (["--shape", f"{SHAPE_8B},depth=3", "--gpu", "l4"], "unknown shape key depth: the keys are layers, hiddenSize"),
        (["--shape", SHAPE_8B, "--gpu", "l4"], "max_model_len is missing"),
        (["--shape", SHAPE_8B, "--gpu", "l4", "--gpu-count", "3"], "cannot be split over 3 GPUs: use 1, 2, 4, 8"),
        (["--model", "/nowhere", "--gpu", "l4"], "/nowhere/config.json does not exist"),
    ],
)
def test_a_users_error_ends_with_2_and_one_sentence(arguments: list[str], message: str, capsys: Capture) -> None:
    assert _plan(*arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("llmservice plan: ")
    assert message in err
    assert err.count("\n") == 1


def test_a_corrupt_config_ends_with_2(model: Path, capsys: Capture) -> None:
    (model / "config.json").write_text("{")
    assert _plan("--model", model, "--gpu", "l4") == 2
    assert "config.json cannot be read as JSON" in capsys.readouterr().err


def test_a_corrupt_checkpoint_ends_with_2(model: Path, capsys: Capture) -> None:
    (model / "model.safetensors").write_bytes(b"<html>")
    assert _plan("--model", model, "--gpu", "l4") == 2
    assert "model.safetensors is no safetensors file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--cpu-memory", "8GiB", "'8GiB' is not a size such as 8Gi"),
        ("--cpu-memory", "-1", "'-1' is not a size"),
        ("--cpu-memory", "1e300Ti", "'1e300Ti' is more memory than any machine has"),
        ("--cpu-memory", "nan", "'nan' is not a size"),
        ("--itl-p99", "fast", "'fast' is not a time such as 80ms"),
        ("--itl-p99", "0ms", "'0ms' is not a time"),
        ("--gpu-count", "two", "invalid int value: 'two'"),
        ("--kv-dtype", "int4", "invalid choice: 'int4'"),
    ],
)
def test_an_option_of_the_wrong_form_is_named(option: str, value: str, message: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as stopped:
        _plan("--shape", SHAPE_8B, f"{option}={value}")
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "gib"), [("8Gi", 8), ("8192Mi", 8), ("8589934592", 8), ("8G", 8e9 / 2**30), ("0.5Gi", 0.5)]
)
def test_memory_is_a_kubernetes_quantity(text: str, gib: float, capsys: Capture) -> None:
    _plan("--shape", SHAPE_8B, "--max-model-len", "16", "--cpu-memory", text)
    size = f"{gib:.2f} GiB" if gib >= 1 else f"{gib * 1024:.2f} MiB"
    assert f"container, {size} seen by a process" in capsys.readouterr().out


@pytest.mark.parametrize(("text", "shown"), [("80ms", "80.0 ms"), ("0.08s", "80.0 ms"), ("0.08", "80.0 ms")])
def test_a_target_is_a_duration(text: str, shown: str, capsys: Capture) -> None:
    _plan(
        "--shape",
        SHAPE_70B,
        "--max-model-len",
        "512",
        "--gpu",
        "b200",
        "--itl-p99",
        text,
        "--max-num-batched-tokens",
        "8192",
    )
    assert f"past {shown}" in capsys.readouterr().out


def test_adapters_take_memory_before_the_kv_cache(capsys: Capture) -> None:
    pools = []
    for flags in ([], ["--max-loras", "4", "--max-lora-rank", "32"]):
        given = ("--shape", SHAPE_8B, "--max-model-len", "8192", "--max-num-seqs", "8", "--gpu", "l4", "-o", "json")
        assert _plan(*given, *flags) == 0
        pools.append(json.loads(capsys.readouterr().out))
    before, after = pools
    taken = after["overhead"]["4 LoRA adapters of rank 32"]
    assert taken > 0
    assert before["kv_pool_bytes"] - after["kv_pool_bytes"] == taken
    assert _plan(*given, *flags, "--lora-experts") == 2
    assert "lora_experts is set, but this model has no experts: leave it out" in capsys.readouterr().err


def test_overrides_change_what_the_model_s_config_says(
    capsys: Capture, config_of: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("qwen2.5-7b")))
    yarn = json.dumps({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}})
    given = ("--model", str(tmp_path), "--gpu", "h100", "--max-model-len", "131072", "-o", "json")
    assert _plan(*given) == 2
    capsys.readouterr()
    assert _plan(*given, "--config-overrides", yarn) == 0
    assert json.loads(capsys.readouterr().out)["max_model_len"] == 131072
    assert _plan("--shape", SHAPE_8B, *given[2:], "--config-overrides", yarn) == 2
    assert "--config-overrides are of --model's config.json" in capsys.readouterr().err


def _sizing(path: Path, num_blocks: int, weights: int, step_s: float) -> Path:
    """What a server reports, whose steps decode 8 sequences of 1000 tokens."""
    decode = {"kind": "decode", "sequences": 8, "steps": 500, "seconds": 500 * step_s}
    sums = {"num_seqs": 4000, "context_tokens": 4_000_000, "prompt_tokens": 0, "prompt_chunks": 0, "attention_pairs": 0}
    path.write_text(
        json.dumps({"num_blocks": num_blocks, "memory_bytes": {"weights": weights}, "steps": [decode | sums]})
    )
    return path


def test_a_plan_is_compared_with_what_a_server_measured(tmp_path: Path, capsys: Capture) -> None:
    flags = ("--shape", SHAPE_8B, "--gpu", "h100-80gb", "--max-model-len", "8192")
    assert _plan(*flags, "-o", "json") == 0
    answer = json.loads(capsys.readouterr().out)
    sizing = _sizing(tmp_path / "sizing.json", (answer["num_blocks"] - 1) // 2, answer["weights_bytes"], 0.02)

    assert _plan(*flags, "--measured", sizing, "-o", "json") == 0
    found = {each["quantity"]: each for each in json.loads(capsys.readouterr().out)["predictions"]}
    assert found["blocks"]["errorRatio"] == pytest.approx(1.0, abs=0.001)
    assert found["weights"]["errorRatio"] == 0
    assert found["itl"]["measured"] == pytest.approx(0.02)
    assert found["itl"]["errorRatio"] == pytest.approx(found["itl"]["predicted"] / 0.02 - 1)

    latency = tmp_path / "latency.json"
    latency.write_text('{"step_s": 0.03, "sequence_s": 0, "weights_s": 0, "token_s": 0, "kv_token_s": 0, "pair_s": 0}')
    assert _plan(*flags, "--measured", sizing, "--latency", latency) == 0
    table = capsys.readouterr().out
    assert "a step that decodes (ITL)" in table
    assert "+50.0%" in table


@pytest.mark.parametrize(
    ("text", "more", "message"),
    [
        (None, (), "cannot be read"),
        ("no JSON", (), "it is no JSON"),
        ("[]", (), "it holds list, not an object"),
        ("{}", (), "it is no answer of GET /sizing"),
        ('{"num_blocks": Infinity, "memory_bytes": {"weights": 1}}', (), "it is no answer of GET /sizing"),
        ("{}", ("--curve",), "--measured compares a plan for one device"),
    ],
)
def test_what_is_no_report_of_a_server_is_refused(
    tmp_path: Path, capsys: Capture, text: str | None, more: tuple[str, ...], message: str
) -> None:
    file = tmp_path / "sizing.json"
    if text is not None:
        file.write_text(text)
    flags = ("--shape", SHAPE_8B, "--gpu", "h100-80gb", "--max-model-len", "8192")
    assert _plan(*flags, "--measured", file, *more) == 2
    assert message in capsys.readouterr().err
