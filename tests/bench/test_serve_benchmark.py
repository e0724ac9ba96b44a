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
    told = json.loads(capsys.readouterr().out)
    assert (told["completed"], told["failed"], told["request_rate"], told["seed"]) == (6, 0, 200.0, 5)
    assert told["output_tokens_per_s"] > 0
    assert told["itl_s"]["p99"] >= 0
    assert told["ttft_s"]["count"] == 6


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


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--trace", "/absent.csv"), "cannot read the trace /absent.csv"),
        (("--url", "http://127.0.0.1:1"), "cannot reach http://127.0.0.1:1/v1/completions"),
        (("--duration", "1"), "needs max_concurrency"),
    ],
)
async def test_users_errors_are_one_sentence(
    flags: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await bench(*flags) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--request-rate", "--burstiness", "--scale", "--concurrency", "--num-prompts"])
async def test_zero_is_refused_where_it_makes_no_sense(flag: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        await bench(flag, "0")
