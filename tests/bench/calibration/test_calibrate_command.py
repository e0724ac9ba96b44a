"""`llmservice calibrate`, as a user runs it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from llmservice_bench.models import MODEL, serving
from llmservice_planner.command import main
from llmservice_planner.sizing.latency import LatencyModel

Capture = pytest.CaptureFixture[str]


async def calibrate(*flags: str) -> int:
    return await asyncio.to_thread(main, ["calibrate", *flags])


@pytest.mark.slow
async def test_a_real_server_is_measured_within_the_time_and_its_model_written(tmp_path: Path, capsys: Capture) -> None:
    async with serving() as server:
        for flags in ((), ("--chat", "--max-num-seqs", "8")):
            path = tmp_path / f"latency-{len(flags)}.json"
            for seconds in ("5", "10", "30"):
                began_s = time.monotonic()
                given = ("--url", server.url, "--seconds", seconds, "-o", str(path), "--gpu", "h100", *flags)
                status = await calibrate(*given)
                assert time.monotonic() - began_s < 60
                out, error = capsys.readouterr()
                if "give more --seconds" not in error:  # on a busy machine, as it says
                    break
            assert status in (0, 1), error  # 1: this machine was too busy for a good fit
            model = LatencyModel.read(path)
            assert model.prefill_s(1024) > 0
            assert model.decode_s(64, 500) >= model.decode_s(1, 100) > 0
            report = json.loads(path.read_text())["calibration"]
            assert report["model"] == MODEL
            assert report["limits"]["max_num_seqs"] == (8 if flags else 64)
            assert {"decode", "prefill"} <= set(report["errors"])
            assert "held out" in out
            assert "the planner's default for 1 x h100 takes, of the measured time:" in out


@pytest.fixture
async def other_server() -> AsyncIterator[str]:
    """Lists models and serves none of them; under /busy, it serves single tokens of one; under /new, it lists none."""

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "max_model_len": 128}, {"id": "n"}]})

    async def refuse(_: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "no GPU"}}, status=500)

    async def no_models(_: web.Request) -> web.Response:
        return web.json_response({"data": []})

    async def serve_one_token(request: web.Request) -> web.Response:
        body = await request.json()
        usage = {"prompt_tokens": len(body["prompt"].split()), "completion_tokens": 1}
        if body["max_tokens"] > 1:
            return await refuse(request)
        chunk = {"choices": [{"text": "w"}], "usage": usage}
        return web.Response(
            text=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n" if body["stream"] else json.dumps(chunk)
        )

    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.post("/v1/completions", refuse)])
    app.add_routes([web.get("/busy/v1/models", models), web.post("/busy/v1/completions", serve_one_token)])
    app.router.add_get("/new/v1/models", no_models)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--model", "q"), "lists m, n, not q"),
        ((), "takes 128 tokens of prompt and answer, at least 256"),
        (("--model", "n"), "answered 500"),
        (("--model", "n", "--metrics-url", "URL"), "does not answer as a server of ours"),
        (("--model", "n", "--gpu", "h100"), "give --model-folder DIR"),
        (("--model", "n", "-o", "absent/latency.json"), "is no folder"),
        (("--model", "n", "-o", "."), ". is a folder"),
    ],
)
async def test_what_cannot_be_measured_is_said_in_a_sentence(
    other_server: str, capsys: Capture, flags: tuple[str, ...], message: str
) -> None:
    given: list[Any] = [flag.replace("URL", other_server) for flag in flags]
    assert await calibrate("--url", other_server, *given) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/new", "/new/v1/models lists no model: wait until one is served there"),
        ("/busy", "compositions of steps were measured, at least 8 are needed, and requests failed: "),
    ],
)
async def test_a_server_that_does_not_serve_is_named_as_the_reason(
    other_server: str, capsys: Capture, path: str, message: str
) -> None:
    model = () if path == "/new" else ("--model", "n")
    assert await calibrate("--url", f"{other_server}{path}", "--seconds", "1", *model) == 2
    assert message in capsys.readouterr().err


async def test_a_negative_seed_is_refused(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        await calibrate("--url", "http://127.0.0.1:9", "--seed", "-1")
    assert "argument --seed: '-1' is not a whole number of at least 0" in capsys.readouterr().err


async def test_a_url_where_nothing_listens_is_named(capsys: Capture) -> None:
    assert await calibrate("--url", "http://127.0.0.1:9") == 2
    assert "cannot reach http://127.0.0.1:9/v1/models" in capsys.readouterr().err
