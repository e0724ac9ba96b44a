"""`llmservice bench sweep`, as a user runs it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from llmservice_planner.command import main

QUICK = ("--seconds", "0.2", "--scale", "0.01", "--concurrency", "1", "4", "--load", "0.5", "--limit", "1")


async def sweep(*flags: str) -> int:
    return await asyncio.to_thread(main, ["bench", "sweep", "--model", "m", *QUICK, *flags])


async def test_table_has_a_row_a_load_and_the_files_have_its_figures(
    server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ("--result", str(tmp_path / "sweep.json"), "--plot", str(tmp_path / "curve.svg"))
    assert await sweep("--url", server.url, "--goodput", "ttft:60000", *files) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[2:4]] == ["1 at once", "4 at once"]
    assert lines[-1].startswith("highest rate at which 99% meet ttft:60000 (ms): ")
    result = json.loads((tmp_path / "sweep.json").read_text())
    assert [row["concurrency"] for row in result["rows"]][:3] == [1, 4, None]
    assert result["highest_rate"]["requests_per_s"] > 0
    assert (tmp_path / "curve.svg").read_text().rstrip().endswith("</svg>")


async def test_json_alone_goes_to_the_terminal_when_asked_for(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert await sweep("--url", server.url, "-o", "json") == 0
    result = json.loads(capsys.readouterr().out)
    assert len(result["rows"]) == 3
    assert "highest_rate" not in result, "no target was given"


async def test_no_prompt_is_sent_twice_as_a_prefix_cache_would_have_it(server: Any) -> None:
    await sweep("--url", server.url, "--scale", "0.2")
    streamed = [body["prompt"] for body in server.bodies if body["stream"]]
    prompts = [prompt for prompt in streamed if len(prompt.split()) > 8]  # shorter ones may be equal by chance
    assert len(prompts) == len({*prompts}) > 20


async def test_failed_requests_make_the_exit_status_1(server: Any) -> None:
    server.cut_every = 5
    assert await sweep("--url", server.url) == 1


async def test_unreachable_server_is_one_error_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert await sweep("--url", "http://127.0.0.1:1") == 2
    assert "cannot reach http://127.0.0.1:1/v1/completions" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--result", "--plot"])
async def test_a_file_that_cannot_be_written_is_refused_before_the_sweep(
    server: Any, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await sweep("--url", server.url, flag, "/absent/curve.svg") == 2
    assert capsys.readouterr().err == "llmservice bench: /absent is no folder: create it, or give another path\n"
    assert server.bodies == []


async def test_a_plot_of_another_format_is_refused_before_the_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        await sweep("--plot", "curve.pdf")
    assert "expected FILE.svg" in capsys.readouterr().err
