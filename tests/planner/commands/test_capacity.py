"""`llmservice plan --rate …` as a user types it: the table, the JSON, the manifest and the errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from harness.stores.model_hub import LLAMA_3_8B
from llmservice_planner.command import main

SHAPE = "layers=32,kvHeads=8,heads=32,hiddenSize=4096,intermediateSize=14336,vocabSize=128256"
LENGTHS = ("--prompt-tokens", "p50=512,p99=2048", "--output-tokens", "p50=150,p99=800")
PROMISE = ("--ttft-p99", "1s", "--itl-p99", "50ms")
GPUS = ("--gpu", "l40s", "--gpu", "h100", "--gpu", "l4")

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "Llama-3.1-8B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_3_8B))
    return folder


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Ten minutes: a request a second, and in one minute ten a second."""
    times = sorted([*range(600), *(300 + place / 9 for place in range(540))])
    path = tmp_path / "trace.csv"
    rows = "".join(f"{time},{500 + place % 7 * 100},{50 + place % 5 * 50}\n" for place, time in enumerate(times))
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")
    return path


def plan(*arguments: str | Path) -> int:
    return main(["plan", *map(str, arguments)])


def test_table_has_every_gpu_with_its_replicas_costs_and_limit(model: Path, capsys: Capture) -> None:
    twice = ("--gpu", "l4", "--price", "l40s=1.9")
    assert plan("--model", model, "--rate", "20", *LENGTHS, *PROMISE, *GPUS, *twice) == 0
    out = capsys.readouterr().out
    assert "Traffic: 20 requests/s" in out
    assert "prompts: p50 512, p99 20" in out
    assert "Promise: TTFT p99 1000 ms, ITL p99 50 ms, at 80% of what a replica sustains" in out
    rows = [line for line in out.splitlines() if line.startswith(("l40s ", "h100-80gb ", "2 x l4 "))]
    assert len(rows) == 3, "a GPU that is named twice has one row"
    assert [row.split()[0] for row in rows] == ["l40s", "h100-80gb", "2"]  # the priced one first
    assert "not yet servable" in rows[2]
    assert max(map(len, out.splitlines())) <= 110


def test_json_has_the_same_and_the_manifest(model: Path, capsys: Capture) -> None:
    assert plan("--model", model, "--rate", "20", *LENGTHS, *PROMISE, *GPUS, "--price", "l40s=1.9", "-o", "json") == 0
    answer = json.loads(capsys.readouterr().out)
    first = answer["candidates"][0]
    assert first["gpu"] == "l40s"
    assert first["cost_per_hour"] == pytest.approx(1.9 * first["replicas"])
    assert first["utilisation"] <= 0.8
    assert first["ttft_p99_s"] <= 1.0
    assert first["itl_p99_s"] <= 0.05
    assert answer["manifest"]["spec"]["resources"]["gpu"] == {"product": "l40s", "count": 1}
    assert plan("--model", model, "--rate", "20", *LENGTHS, *GPUS, "-o", "yaml") == 0
    assert yaml.safe_load(capsys.readouterr().out)["requests_per_s"] == 20


def test_manifest_alone_is_that_of_the_best_gpu(model: Path, capsys: Capture) -> None:
    arguments = ("--model", model, "--rate", "200", *LENGTHS, *PROMISE, "--gpu", "h100", "--dtype", "float16")
    assert plan(*arguments, "-o", "manifest") == 0
    document = yaml.safe_load(capsys.readouterr().out)
    assert document["metadata"]["name"] == "llama-3-1-8b"
    spec = document["spec"]
    assert spec["model"] == {"uri": f"file://{model}", "dtype": "float16"}
    assert spec["slo"] == {"ttftP99": "1s", "itlP99": "50ms"}
    assert spec["engine"]["sizing"]["expectedTokens"] == pytest.approx(800, rel=0.1)
    assert spec["engine"]["maxModelLen"] % 256 == 0
    assert spec["autoscaling"]["minReplicas"] > 1
    assert spec["autoscaling"]["maxReplicas"] == spec["autoscaling"]["minReplicas"] + 1


def test_trace_gives_lengths_the_busiest_rate_and_the_quiet_one(model: Path, trace: Path, capsys: Capture) -> None:
    assert plan("--model", model, "--trace", trace, *PROMISE, "--gpu", "a10", "-o", "json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["requests_per_s"] == pytest.approx(10, rel=0.05)
    scaling = answer["manifest"]["spec"]["autoscaling"]
    assert 1 <= scaling["minReplicas"] < answer["candidates"][0]["replicas"] < scaling["maxReplicas"]
    assert plan("--model", model, "--trace", trace, "--rate", "1", "--gpu", "a10") == 0
    assert "Traffic: 1 requests/s (the given rate)" in capsys.readouterr().out


def test_requests_that_the_model_is_too_short_for_are_counted(model: Path, capsys: Capture) -> None:
    long = ("--rate", "5", "--gpu", "h100", "--prompt-tokens", "p50=4096,p99=32768", "--output-tokens", "100")
    assert plan("--model", model, *long) == 0
    assert (
        "  22.3% of the requests are longer than max_model_len 8192, and would be refused\n" in capsys.readouterr().out
    )
    assert plan("--model", model, *long, "-o", "json") == 0
    assert json.loads(capsys.readouterr().out)["share_longer_than_max_model_len"] == 0.223
    assert plan("--model", model, "--rate", "5", *LENGTHS, "--gpu", "h100") == 0
    assert "would be refused" not in capsys.readouterr().out


def test_cached_prefixes_need_fewer_replicas(model: Path, capsys: Capture) -> None:
    def replicas(*more: str) -> int:
        arguments = ("--model", model, "--rate", "100", *LENGTHS, *PROMISE, "--gpu", "l40s", "-o", "json", *more)
        assert plan(*arguments) == 0
        return int(json.loads(capsys.readouterr().out)["candidates"][0]["replicas"])

    assert replicas("--prefix-hit-rate", "0.7") < replicas("--prefix-hit-rate", "0") == replicas()


def test_measured_latency_replaces_the_gpus(model: Path, tmp_path: Path, capsys: Capture) -> None:
    slow = {"step_s": 0.01, "sequence_s": 1e-5, "weights_s": 0.01, "token_s": 1e-4, "kv_token_s": 1e-7, "pair_s": 1e-9}
    (tmp_path / "slow.json").write_text(json.dumps(slow))
    arguments = ("--model", model, "--rate", "20", *LENGTHS, "--gpu", "h100", "-o", "json")
    assert plan(*arguments) == 0
    assert plan(*arguments, "--latency", tmp_path / "slow.json") == 0
    first, second = capsys.readouterr().out.split("\n}\n")[:2]
    assert json.loads(second + "}")["candidates"][0]["replicas"] > json.loads(first + "}")["candidates"][0]["replicas"]


def test_workload_is_explained_and_written_into_the_manifest(model: Path, capsys: Capture) -> None:
    assert plan("--model", model, "--gpu", "l40s", "--workload", "batch") == 0
    assert "batch, more sequences than the ridge" in capsys.readouterr().out
    arguments = ("--model", model, "--rate", "20", *LENGTHS, "--gpu", "l40s", "--workload", "batch")
    assert plan(*arguments, "-o", "manifest") == 0
    assert yaml.safe_load(capsys.readouterr().out)["spec"]["workload"] == "batch"
    assert plan("--model", model, "--gpu", "l40s", "--workload", "embeddings") == 2
    assert "workload embeddings is for an encoder, and the model is llama" in capsys.readouterr().err


def test_encoder_has_no_cache_to_wait_for(tmp_path: Path, capsys: Capture) -> None:
    config = {"model_type": "bert", "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
    sizes = {"intermediate_size": 3072, "vocab_size": 30522, "max_position_embeddings": 512, "type_vocab_size": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | sizes))
    lengths = ("--prompt-tokens", "p50=200,p99=450", "--output-tokens", "1")
    arguments = ("--model", tmp_path, "--rate", "500", *lengths, "--ttft-p99", "200ms", "--gpu", "l4")
    assert plan(*arguments, "-o", "json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["candidates"][0]["limited_by"] == "compute"
    assert answer["candidates"][0]["ttft_p99_s"] < 0.2
    engine = answer["manifest"]["spec"]["engine"]
    assert engine["maxNumBatchedTokens"] >= engine["maxModelLen"] == 512


def test_dimensions_alone_have_a_table_but_no_manifest(capsys: Capture) -> None:
    assert plan("--shape", SHAPE, "--rate", "5", *LENGTHS, "--gpu", "h100") == 0
    out = capsys.readouterr().out
    assert "h100-80gb" in out
    assert "No manifest, as --shape names no model to serve: give --model." in out


def test_a_replica_of_less_than_a_request_per_minute_does_not_take_none(capsys: Capture) -> None:
    shape = "layers=80,kvHeads=8,heads=64,headDim=128,hiddenSize=8192,intermediateSize=28672,vocabSize=128256"
    lengths = ("--prompt-tokens", "60000", "--output-tokens", "20000", "--max-model-len", "131072")
    assert plan("--shape", shape, "--rate", "0.01", *lengths, "--gpu", "h200") == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("2 x h200-141gb ")]
    assert row.split()[5] == "0.0062"


def test_promise_that_nothing_keeps_ends_with_1(model: Path, capsys: Capture) -> None:
    assert plan("--model", model, "--rate", "5", *LENGTHS, "--itl-p99", "0.1ms", "--gpu", "l4") == 1
    out = capsys.readouterr().out
    assert "No GPU keeps the promise" in out
    assert "l4: a step takes" in out
    assert "No manifest, as no candidate both keeps the targets" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "5"], "how long are the requests? give --prompt-tokens and --output-tokens, or --trace FILE"),
        (["--ttft-p99", "1s", "--gpu", "l4"], "--ttft-p99 is about traffic or the curve: give --rate N, --trace FILE"),
        (["--prefix-hit-rate", "0.5", "--gpu", "l4"], "--prefix-hit-rate is about traffic: give --rate N or --trace"),
        (["--rate", "5", *LENGTHS, "--curve"], "--curve shows one replica without its traffic"),
        (["--rate", "5", *LENGTHS, "--latency", "x.json"], "--latency is measured on one GPU: name it with --gpu"),
        (["--price", "l4=1", "--gpu", "l4"], "--price is about traffic"),
        (["--rate", "5", *LENGTHS, "--cpu-memory", "8Gi"], "--rate plans for GPUs"),
        (["--rate", "5", *LENGTHS, "--gpu-count", "2"], "--rate finds the GPUs per replica itself"),
        (["--rate", "5", *LENGTHS, "--price", "l4=1", "--price", "l4=2"], "a GPU has two prices"),
        (["--rate", "5", *LENGTHS, "--price", "l4=1", "--gpu", "t4"], "--price names l4, and --gpu does not"),
        (
            ["--rate", "5", "--prompt-tokens", "9000", "--output-tokens", "10"],
            "all requests are longer than max_model_len 8192, and would be refused: shorten them",
        ),
        (["--trace", "/nowhere.csv"], "cannot read the trace /nowhere.csv"),
        (["--trace", "/nowhere.csv", *LENGTHS], "the lengths come from --trace"),
        (["--rate", "5", *LENGTHS, "--gpu", "l40"], "GPU 'l40' is not in the catalogue: did you mean l40s"),
        (["--gpu", "l4", "--gpu", "a10"], "several need --rate or --trace"),
        (["--gpu", "l4", "-o", "manifest"], "which traffic? -o manifest needs --rate or --trace"),
        (
            ["--rate", "5", *LENGTHS, "--max-model-len", "99999"],
            "max_model_len 99999 is longer than the 8192 positions",
        ),
        (
            ["--rate", "5", *LENGTHS, "--itl-p99", "0.1ms", "--gpu", "l4", "-o", "manifest"],
            "no candidate both keeps the targets",
        ),
    ],
)
def test_a_users_error_ends_with_2_and_one_sentence(
    model: Path, arguments: list[str], message: str, capsys: Capture
) -> None:
    assert plan("--model", model, *arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("llmservice plan: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "0"], "'0' is not a number of requests per second"),
        (["--rate", "5", "--prompt-tokens", "long"], "'long' is no length in tokens, expected p50=512,p99=4096"),
        (["--rate", "5", "--prefix-hit-rate", "2"], "'2' is not a share, 0 to 1"),
        (["--rate", "5", "--price", "cheap"], "GPU 'cheap' is not in the catalogue"),
        (["--rate", "5", "--price", "l4=free"], "'l4=free' is not GPU=PRICE, such as l40s=1.9"),
    ],
)
def test_unusable_values_are_named(model: Path, arguments: list[str], message: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        plan("--model", model, *arguments)
    assert message in capsys.readouterr().err
