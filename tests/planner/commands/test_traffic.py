"""`llmservice traffic` as a user types it: text, JSON, the page, and what it recommends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.stores.model_hub import LLAMA_3_8B
from llmservice_bench.trace import SAMPLE
from llmservice_planner.command import main

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))
    return tmp_path


def traffic(*arguments: str | Path) -> int:
    return main(["traffic", *map(str, arguments)])


def test_text_has_the_figures_and_a_reason_for_each_recommendation(capsys: Capture) -> None:
    assert traffic(SAMPLE) == 0
    out = capsys.readouterr().out
    assert "1000 requests in " in out
    assert "coefficient of variation" in out
    assert "not recorded in these files" in out
    assert "69% of the token slots would be padding, in batches of 32" in out
    assert "engine.maxModelLen: 4864\n      p99 of prompt and output is " in out
    assert max(map(len, out.splitlines())) <= 110


def test_json_has_statistics_and_recommendations_for_a_replica(model: Path, capsys: Capture) -> None:
    assert traffic(SAMPLE, "--model", model, "--gpu", "l4", "-o", "json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["prompt_tokens"]["p50"] == pytest.approx(1020, rel=0.05)
    fields = {each["field"]: each for each in answer["recommendations"]}
    assert set(fields) == {
        "engine.maxModelLen",
        "engine.sizing.expectedTokens",
        "engine.maxNumBatchedTokens",
        "slo.ttftP99",
        "slo.itlP99",
        "autoscaling.minReplicas",
        "autoscaling.maxReplicas",
    }
    assert all(each["reason"] for each in fields.values())
    assert fields["autoscaling.minReplicas"]["value"] <= fields["autoscaling.maxReplicas"]["value"]


def test_targets_that_are_given_are_not_recommended(model: Path, capsys: Capture) -> None:
    assert traffic(SAMPLE, "--model", model, "--gpu", "h100", "--itl-p99", "50ms", "-o", "json") == 0
    fields = {each["field"] for each in json.loads(capsys.readouterr().out)["recommendations"]}
    assert "slo.ttftP99" in fields
    assert "slo.itlP99" not in fields


def test_no_length_is_recommended_that_the_model_does_not_know(model: Path, capsys: Capture) -> None:
    (model / "config.json").write_text(json.dumps(LLAMA_3_8B | {"max_position_embeddings": 1024}))
    assert traffic(SAMPLE, "--model", model, "--gpu", "h100", "-o", "json") == 0
    fields = {each["field"]: each for each in json.loads(capsys.readouterr().out)["recommendations"]}
    assert fields["engine.maxModelLen"]["value"] == fields["engine.sizing.expectedTokens"]["value"] == 1024
    assert "tokens, more than the model knows; 587 of 1000 requests" in fields["engine.maxModelLen"]["reason"]


def test_page_has_plots_tables_and_no_reference_to_other_files(tmp_path: Path, capsys: Capture) -> None:
    page = tmp_path / "report.html"
    assert traffic(SAMPLE, "--html", page) == 0
    capsys.readouterr()
    text = page.read_text()
    assert text.count("<svg") == 2
    assert "engine.maxModelLen" in text
    assert "<script" not in text
    assert "src=" not in text


def test_window_and_batch_are_the_users(capsys: Capture) -> None:
    assert traffic(SAMPLE, "--window", "60s", "--static-batch", "8", "-o", "json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["windows"]["window_s"] == 60
    assert answer["static_batch"] == 8
    assert 0.3 < answer["static_padding_share"] < 0.7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nowhere.csv"], "cannot read the trace /nowhere.csv"),
        ([SAMPLE, "--gpu", "l4"], "a replica needs both --model and --gpu"),
        ([SAMPLE, "--itl-p99", "50ms"], "targets are about a replica: give --model and --gpu as well"),
        ([SAMPLE, "--html", "/nowhere/report.html"], "/nowhere is no folder"),
        ([SAMPLE, "--window", "1e-9s"], "more than a million windows of 1e-09 s"),
        ([SAMPLE, "--format", "burstgpt"], "no column Timestamp, Request tokens, Response tokens"),
        ([SAMPLE, "--model", "/nowhere", "--gpu", "l4"], "/nowhere/config.json does not exist"),
    ],
)
def test_a_users_error_ends_with_2_and_one_sentence(arguments: list[str], message: str, capsys: Capture) -> None:
    assert traffic(*arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("llmservice traffic: ")
    assert message in err
    assert err.count("\n") == 1


def test_replica_that_does_not_fit_ends_with_1(model: Path, capsys: Capture) -> None:
    assert traffic(SAMPLE, "--model", model, "--gpu", "t4") == 1
    assert "on t4 the model does not fit, no request meets the targets, or" in capsys.readouterr().err


def test_replica_that_holds_hardly_more_than_one_request_ends_with_1(
    model: Path, tmp_path: Path, capsys: Capture
) -> None:
    trace = tmp_path / "long.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"{i * 100},12000,200\n" for i in range(50)))
    assert traffic(trace, "--model", model, "--gpu", "l4") == 1
    assert "so few are held at once that their waits have no bound" in capsys.readouterr().err
    assert traffic(trace, "--model", model, "--gpu", "l4", "--ttft-p99", "10m") == 0
