"""`llmservice bench serve`, as a user runs it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from llmservice_planner.command import main


async def bench(*flags: str) -> int:
    return await asyncio.to_thread(main, ["bench", "serve", "--model", "m", *flags])


async def test_json_names_the_settings_and_both_kinds_of_figures(
    server: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--num-prompts", "6", "--request-rate", "200", "--scale", "0.01", "--seed", "5", "-o", "json")
    assert await bench("--url", server.url, *flags) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["completed"], result["failed"], result["request_rate"], result["seed"]) == (6, 0, 200.0, 5)
    assert result["output_tokens_per_s"] > 0
    assert result["itl_s"]["p99"] >= 0
    assert result["ttft_s"]["count"] == 6


async def test_infinity_is_a_text_in_json(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--request-rate", "inf", "--duration", "inf", "--num-prompts", "2", "--scale", "0.01", "-o", "json")
    assert await bench("--url", server.url, *flags) == 0
    result = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (result["request_rate"], result["duration"]) == ("inf", "inf")


async def test_failed_requests_make_the_exit_status_1(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    server.cut_after = 0
    assert await bench("--url", server.url, "--num-prompts", "2", "--scale", "0.01") == 1
    assert "requests failed                        2  (2 × the stream ended before [DONE])" in capsys.readouterr().out


async def test_key_comes_from_the_environment_and_goes_into_the_header_alone(
    server: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    assert await bench("--url", server.url, "--num-prompts", "1", "--scale", "0.01", "-o", "json") == 0
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer sk-secret"}
    assert "sk-secret" not in capsys.readouterr().out


async def test_trace_alone_is_replayed_with_its_times_and_lengths(
    server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n10,20,2\n11,30,3\n12,40,4\n")
    assert await bench("--url", server.url, "--trace", str(trace), "--time-scale", "0.1", "-o", "json") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["arrivals"], result["completed"], result["prompt_tokens"], result["output_tokens"]) == (
        "replayed",
        3,
        90,
        9,
    )
    assert 0.15 < result["duration_s"] < 5
    assert [body["max_tokens"] for body in server.bodies if body["stream"]] == [2, 3, 4]


async def test_goodput_says_how_many_met_the_targets(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--url", server.url, "--num-prompts", "4", "--scale", "0.01")
    assert await bench(*flags, "--goodput", "ttft:60000", "e2e:60000") == 0
    assert "100.0% met ttft:60000 e2e:60000 (ms)" in capsys.readouterr().out
    assert await bench(*flags, "--goodput", "ttft:0.000001", "-o", "json") == 0
    assert json.loads(capsys.readouterr().out)["goodput"]["share"] == 0.0


async def test_result_is_written_beside_the_table(
    server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--url", server.url, "--num-prompts", "2", "--scale", "0.01", "--result")
    assert await bench(*flags, str(tmp_path / "run.json")) == 0
    captured = capsys.readouterr()
    assert "requests completed" in captured.out
    assert captured.err == "", "without a terminal there is no progress bar"
    assert json.loads((tmp_path / "run.json").read_text())["completed"] == 2


async def test_a_client_s_base_url_is_accepted(server: Any) -> None:
    assert await bench("--url", f"{server.url}/v1/", "--num-prompts", "1", "--scale", "0.01") == 0


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "http://me:hush@127.0.0.1:8000", "me:hush@127.0.0.1", "http://::1:8000"]
)
async def test_other_urls_are_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        await bench("--url", url)
    errors = capsys.readouterr().err
    assert "expected http://HOST" in errors
    assert "hush" not in errors


async def test_key_may_have_another_name(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEAM_KEY", "sk-team")
    assert await bench("--url", server.url, "--num-prompts", "1", "--scale", "0.01", "--api-key-env", "TEAM_KEY") == 0
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer sk-team"}


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--trace", "/absent.csv"), "cannot read the trace /absent.csv"),
        (("--url", "http://127.0.0.1:1"), "cannot reach http://127.0.0.1:1/v1/completions"),
        (("--duration", "1"), "needs max_concurrency"),
        (("--time-scale", "2"), "--time-scale stretches the times of --trace"),
        (("--burstiness", "2"), "--burstiness shapes the gaps of --request-rate"),
        (("--burstiness", "2", "--request-rate", "inf"), "give both, and a rate that is finite"),
        (("--goodput", "speed:5"), "cannot read the target 'speed:5'"),
        (("--result", "/absent/run.json"), "/absent is no folder: create it"),
        (("--result", "."), ". is a folder: give the name of a file"),
    ],
)
async def test_user_errors_are_one_message(
    flags: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await bench(*flags) == 2
    assert complaint in capsys.readouterr().err


async def test_a_server_that_does_not_answer_in_time_is_named(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    server.wait_s = 5.0
    assert await bench("--url", server.url, "--timeout", "0.05") == 2
    assert f"cannot reach {server.url}/v1/completions: it did not answer in time" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--scale", "--timeout", "--time-scale", "--burstiness"])
@pytest.mark.parametrize("value", ["inf", "nan", "many"])
async def test_what_is_no_finite_number_is_refused(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        await bench(flag, value)
    assert f"argument {flag}: {value!r} is not a number above 0" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--request-rate", "--burstiness", "--scale", "--concurrency", "--num-prompts"])
async def test_zero_is_refused_where_it_makes_no_sense(flag: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        await bench(flag, "0")
