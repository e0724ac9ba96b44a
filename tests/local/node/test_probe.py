from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from aiohttp import ClientSession, web

from llmservice_local.loopback import free_port
from llmservice_local.node.probe import Outcome, ProbeTarget, Tally, ask


async def execute(command: list[str], timeout_s: float) -> Outcome:
    return Outcome(command == ["true"], f"{timeout_s:g}")


@pytest.fixture
async def target() -> AsyncIterator[ProbeTarget]:
    async def answer(request: web.Request) -> web.Response:
        status = int(request.match_info["status"])
        return web.Response(status=status, headers={"Location": "/nowhere"}, text=request.headers.get("X", ""))

    application = web.Application()
    application.router.add_get("/{status}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield ProbeTarget("127.0.0.1", {"http": runner.addresses[0][1]}, execute)
    await runner.cleanup()


@pytest.mark.parametrize(
    ("probe", "success", "message"),
    [
        ({"httpGet": {"path": "/200", "port": "http"}}, True, ""),
        ({"httpGet": {"path": "302", "port": "http"}}, True, ""),
        ({"httpGet": {"path": "/503", "port": "http"}}, False, "HTTP probe failed with statuscode: 503"),
        ({"httpGet": {"path": "/", "port": "grpc"}}, False, "the container has no port named 'grpc'"),
        ({"tcpSocket": {"port": "http"}}, True, ""),
        ({"exec": {"command": ["true"]}}, True, "1"),
        ({"exec": {"command": ["false"]}, "timeoutSeconds": 3}, False, "3"),
        ({"grpc": {"port": 1}}, False, "the local node knows httpGet, tcpSocket and exec probes"),
    ],
)
async def test_answer_to_a_probe(target: ProbeTarget, probe: dict[str, object], success: bool, message: str) -> None:
    async with ClientSession() as session:
        outcome = await ask(session, probe, target)
    assert outcome.success is success
    assert outcome.message.startswith(message)


async def test_closed_port_is_a_failure(target: ProbeTarget) -> None:
    async with ClientSession() as session:
        for probe in ({"httpGet": {"port": free_port()}}, {"tcpSocket": {"port": free_port()}}):
            outcome = await ask(session, probe, target)
            assert not outcome.success
            assert outcome.message


def test_verdict_flips_only_after_enough_answers_in_a_row() -> None:
    tally = Tally({"failureThreshold": 2, "successThreshold": 1})
    answers = [False, True, False, True, False, False, False, True]
    assert [tally.add(answer) for answer in answers] == [False, True, False, False, False, True, False, True]
    assert tally.verdict is True
