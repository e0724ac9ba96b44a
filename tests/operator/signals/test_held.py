"""Reading what gateways hold, from gateways on real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from llmservice_operator.scaling.load import Held
from llmservice_operator.signals.held import HeldRequests, gateway_urls, parse_held
from llmservice_operator.signals.sources import SignalError

KEY = ("team-a", "tiny")


@dataclass
class Gateways:
    """As many as there are answers, each on a path of one port; one whose answer is None never ends its own."""

    answers: list[Any]
    urls: list[str] = field(default_factory=list)
    lists: int = 0
    failure: str | None = None
    released: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, request: web.Request) -> web.Response:
        given = self.answers[int(request.match_info["number"])]
        if given is None:
            await self.released.wait()
        if isinstance(given, int):
            return web.Response(status=given)
        return web.json_response({"held": given})

    async def list(self) -> list[str]:
        self.lists += 1
        if self.failure is not None:
            raise SignalError(self.failure)
        return self.urls


@pytest.fixture
async def gateways() -> AsyncIterator[Gateways]:
    state = Gateways([])
    app = web.Application()
    app.router.add_get("/{number}/internal/held", state.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    state.urls = [f"http://127.0.0.1:{port}/{number}" for number in range(40)]
    yield state
    state.released.set()
    await runner.cleanup()


@dataclass
class Clock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


def one(requests: int, tokens: int = 10, oldest_s: float = 1.0) -> dict[str, Any]:
    return {"team-a/tiny": {"requests": requests, "tokens": tokens, "oldest_s": oldest_s}}


async def test_what_gateways_hold_is_added_up_and_wakes_services_at_zero(
    gateways: Gateways, session: aiohttp.ClientSession
) -> None:
    other = {"team-a/other": {"requests": 1, "tokens": 1, "oldest_s": 0.1}}
    gateways.answers = [one(3, 30, 4.0), {**one(2, 5, 9.0), **other}, {}]
    gateways.urls = gateways.urls[:3]
    woken: list[tuple[str, str]] = []
    held = HeldRequests(session, gateways.list, woken.append, at_zero={KEY})

    await held.read()

    assert held.of(KEY) == Held(5, 35, 9.0)
    assert held.of(("team-a", "none")) == Held()
    assert set(woken) == {KEY}


async def test_a_gateway_that_hangs_or_fails_delays_no_other(
    gateways: Gateways, session: aiohttp.ClientSession
) -> None:
    gateways.answers = [None, 500, one(1), {"x": 1}]
    gateways.urls = [*gateways.urls[:4], "http://127.0.0.1:1/9"]
    results: list[str] = []
    woken = asyncio.Event()
    held = HeldRequests(session, gateways.list, lambda key: woken.set(), results.append, at_zero={KEY})

    reading = asyncio.create_task(held.read())
    await asyncio.wait_for(woken.wait(), 0.7)
    assert not reading.done()
    assert held.of(KEY) == Held(1, 10, 1.0)
    await reading

    assert sorted(results) == ["error"] * 4 + ["ok"]


async def test_a_gateway_that_is_gone_counts_no_longer_and_one_that_is_silent_for_some_seconds(
    gateways: Gateways, session: aiohttp.ClientSession
) -> None:
    clock = Clock()
    gateways.answers, urls = [one(1), one(2)], gateways.urls
    gateways.urls = urls[:2]
    held = HeldRequests(session, gateways.list, clock=clock, at_zero={KEY})
    await held.read()
    assert held.of(KEY) == Held(3, 20, 1.0)

    gateways.urls, clock.now_s = urls[:1], 103.0
    await held.read()
    await held.read()
    assert held.of(KEY) == Held(1, 10, 1.0)

    gateways.answers = [500]
    clock.now_s = 104.0
    await held.read()
    assert held.of(KEY) == Held(1, 10, 1.0)
    clock.now_s = 110.0
    assert held.of(KEY) is None, "no gateway has answered: unknown, not none"


async def test_gateways_are_read_on_while_they_cannot_be_listed(
    gateways: Gateways, session: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    gateways.answers, gateways.urls = [one(1)], gateways.urls[:1]
    held = HeldRequests(session, gateways.list, clock=clock, at_zero={KEY})
    await held.read()
    gateways.failure = "403 forbidden"
    for _ in range(3):
        clock.now_s += 3.0
        await held.read()

    assert held.of(KEY) == Held(1, 10, 1.0)
    assert caplog.text.count("403 forbidden") == 1


async def test_nothing_is_read_while_no_service_is_at_zero(gateways: Gateways, session: aiohttp.ClientSession) -> None:
    held = HeldRequests(session, gateways.list)
    running = asyncio.create_task(held.run())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    running.cancel()

    assert gateways.lists == 0
    assert held.of(KEY) == Held()


@given(body=st.binary() | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps).map(str.encode))
def test_anything_but_an_answer_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match="no answer of a gateway"):
        parse_held(body)


@pytest.mark.parametrize("held", [{"team-a": {}}, one(-1), one(1, oldest_s=-1.0), {"a/b": {"requests": 1}}, [], None])
def test_an_answer_without_sense_is_refused(held: Any) -> None:
    with pytest.raises(ValueError, match="no answer of a gateway"):
        parse_held(json.dumps({"held": held}).encode())


def test_the_gateways_are_pods_with_a_port_for_metrics() -> None:
    ports = {"ports": [{"name": "http", "containerPort": 8080}, {"name": "metrics", "containerPort": 9001}]}

    def pod(ip: str | None, *, gone: bool = False, containers: list[Any] | None = None) -> dict[str, Any]:
        metadata = {"deletionTimestamp": "2026-01-01T00:00:00Z"} if gone else {}
        return {"metadata": metadata, "spec": {"containers": containers or [ports]}, "status": {"podIP": ip}}

    pods = [pod("10.0.0.1"), pod("fd00::1"), pod(None), pod("10.0.0.3", gone=True), pod("10.0.0.4", containers=[{}])]

    assert gateway_urls(pods) == ["http://10.0.0.1:9001", "http://[fd00::1]:9001"]
