from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from llmservice_planner.command import main

Capture = pytest.CaptureFixture[str]


async def check(answer: web.Response) -> int:
    """The exit status of a check of a server whose list of models is `answer`."""

    async def models(_: web.Request) -> web.Response:
        return answer

    app = web.Application()
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
        return await asyncio.to_thread(main, ["check", url, "--timeout", "0"])
    finally:
        await runner.cleanup()


async def test_served_models_are_named(capsys: Capture) -> None:
    assert await check(web.json_response({"data": [{"id": "chat"}, {"id": "team/code"}]})) == 0
    assert "serves chat, team/code" in capsys.readouterr().out


async def test_a_gateway_without_models_is_well(capsys: Capture) -> None:
    assert await check(web.json_response({"data": []})) == 0
    assert "no model yet" in capsys.readouterr().out


async def test_a_gateway_that_wants_a_key_is_well(capsys: Capture) -> None:
    assert await check(web.json_response({}, status=401)) == 0
    assert "wants an API key" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (lambda: web.Response(status=503), "answered with 503"),
        (lambda: web.Response(text="<html>"), "no list of models"),
        (lambda: web.json_response({"data": 3}), "no list of models"),
    ],
)
async def test_an_invalid_answer_fails_with_a_reason(answer: type[web.Response], why: str, capsys: Capture) -> None:
    assert await check(answer()) == 1
    assert why in capsys.readouterr().err


def test_an_unreachable_url_fails_with_a_reason(capsys: Capture, unused_tcp_port: int) -> None:
    assert main(["check", f"http://127.0.0.1:{unused_tcp_port}", "--timeout", "0"]) == 1
    assert "gave no list of models within 0 s" in capsys.readouterr().err


def test_an_invalid_url_is_refused(capsys: Capture) -> None:
    assert main(["check", "gateway"]) == 2
    assert "expected http://HOST" in capsys.readouterr().err


@pytest.mark.parametrize(
    "url",
    ["http://me:secret@h:99999", "http://me:secret@[x", "http://me:secret/1@h", "me:secret@h", "http://me:secret@"],
)
def test_no_url_repeats_its_password(url: str, capsys: Capture) -> None:
    assert main(["check", url, "--timeout", "0"]) == 2
    error = capsys.readouterr().err
    assert "is no URL" in error
    assert "secret" not in error


def test_an_unreachable_url_is_shown_without_its_password(capsys: Capture, unused_tcp_port: int) -> None:
    assert main(["check", f"http://me:secret@127.0.0.1:{unused_tcp_port}", "--timeout", "0"]) == 1
    error = capsys.readouterr().err
    assert f"http://127.0.0.1:{unused_tcp_port} gave no list" in error
    assert "secret" not in error


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf"])
def test_a_timeout_that_is_none_is_refused(seconds: str, capsys: Capture) -> None:
    assert main(["check", "http://127.0.0.1:1", "--timeout", seconds]) == 2
    assert "expected seconds" in capsys.readouterr().err
