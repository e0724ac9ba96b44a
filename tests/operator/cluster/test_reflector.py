"""List and watch, through everything that an API server does to those who follow it. On a clock that jumps."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from kubernetes.aio import client as kubernetes_client

from harness.jumping_loop import JumpingLoop
from llmservice_operator.api.kinds import FOLLOWED, Followed
from llmservice_operator.cluster.kube_client import KubeClient, KubeError
from llmservice_operator.cluster.object_cache import ObjectCache
from llmservice_operator.cluster.reflector import Reflector
from llmservice_operator.monitoring.metrics import OperatorMetrics

Object = dict[str, Any]

PODS, MONITORS = (next(one for one in FOLLOWED if one.kind.name == name) for name in ("Pod", "PodMonitor"))
SILENCE_S = 70.0
HOLD = "hold"
"""The connection stays open, and nothing comes."""
BREAK = "break"
"""The connection is gone in the middle of the answer."""


def pod(name: str, version: int) -> Object:
    return {"metadata": {"name": name, "namespace": "team-a", "uid": f"uid-of-{name}", "resourceVersion": str(version)}}


def line(kind: str, obj: Object) -> bytes:
    return json.dumps({"type": kind, "object": obj}).encode() + b"\n"


def bookmark(version: int) -> bytes:
    return line("BOOKMARK", {"metadata": {"resourceVersion": str(version)}})


@dataclass(frozen=True)
class Reply:
    """A whole answer."""

    body: Object
    status: int = 200
    retry_after_s: int | None = None

    def response(self) -> web.Response:
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return web.json_response(self.body, status=self.status, headers=headers)


def refused(code: int, retry_after_s: int | None = None) -> Reply:
    return Reply({"message": f"says {code}"}, code, retry_after_s)


def listed(version: int, *objects: Object, token: str = "") -> Reply:
    metadata = {"resourceVersion": str(version), "continue": token}
    return Reply({"kind": "List", "apiVersion": "v1", "metadata": metadata, "items": list(objects)})


ERROR_410 = line("ERROR", {"code": 410, "reason": "Expired", "message": "too old resource version"})
ERROR_500 = line("ERROR", {"code": 500, "message": "etcdserver: no leader"})
Answer = Reply | list[bytes | str]


@dataclass
class Api:
    """Answers each list and each watch as it was told to; watches that it was told nothing of bring nothing."""

    lists: deque[Answer]
    watches: deque[Answer]
    asked: list[tuple[float, Object]] = field(default_factory=list)
    """The moment and the query of each request, in order."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((asyncio.get_running_loop().time(), dict(request.query)))
        answers = self.watches if "watch" in request.query else self.lists
        answer = answers.popleft() if answers else [HOLD]
        if isinstance(answer, Reply):
            return answer.response()
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in answer:
            if isinstance(piece, bytes):
                await response.write(piece)
            elif piece == HOLD:
                await asyncio.Event().wait()
            elif request.transport is not None:
                request.transport.abort()
        return response

    def begun_at(self) -> list[str]:
        """The versions that watches were begun at, and a word for each list."""
        return [query["resourceVersion"] if "watch" in query else "list" for _, query in self.asked]


@dataclass
class Following:
    """A reflector at work, and all that it told of: name of the object, whether it was news."""

    api: Api
    cache: ObjectCache
    reflector: Reflector
    task: asyncio.Task[None]
    told: list[tuple[str, bool]]

    def names(self) -> set[str]:
        kind = self.reflector.followed.kind.name
        return {name for name in "abc" if self.cache.child(kind, "team-a", name) is not None}

    async def until(self, check: Callable[[], bool]) -> None:
        async with asyncio.timeout(600):
            while not check():
                await asyncio.sleep(0.01)

    async def asks(self, count: int) -> list[str]:
        """The versions of the first so many requests."""
        await self.until(lambda: len(self.api.asked) >= count)
        return self.api.begun_at()[:count]


Play = Callable[[Following], Awaitable[None]]


@asynccontextmanager
async def connected(api: Api, folder: Path) -> AsyncIterator[KubeClient]:
    application = web.Application()
    application.router.add_get("/{path:.*}", api.handle)
    runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.UnixSite(runner, folder / "api").start()
    configuration = kubernetes_client.Configuration(host="http://api")
    connector = aiohttp.UnixConnector(str(folder / "api"))
    configuration.client_session_kwargs = {"connector": connector}
    kube = kubernetes_client.ApiClient(configuration)
    try:
        yield KubeClient(kube)
    finally:
        await kube.close()
        await connector.close()
        await runner.cleanup()


def follow(
    folder: Path, play: Play, lists: list[Answer], watches: list[Answer] | None = None, followed: Followed = PODS
) -> None:
    """Let a reflector follow an API server that answers so, and play meanwhile."""

    async def run() -> None:
        api = Api(deque(lists), deque(watches or []))
        async with connected(api, folder) as client:
            cache, told = ObjectCache(), list[tuple[str, bool]]()

            def changed(kind: str, obj: Object, *, news: bool) -> None:
                assert kind == followed.kind.name
                told.append((obj["metadata"]["name"], news))

            reflector = Reflector(
                client, cache, followed, None, changed, OperatorMetrics().process, asyncio.Lock(), SILENCE_S
            )
            task = asyncio.create_task(reflector.run())
            await play(Following(api, cache, reflector, task, told))
            task.cancel()
            await asyncio.wait([task])

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(run())


def test_what_a_watch_tells_is_in_the_cache_and_told_on(tmp_path: Path) -> None:
    async def play(one: Following) -> None:
        await one.until(lambda: len(one.told) == 4)
        assert one.told == [("a", True), ("b", True), ("a", True), ("b", True)]
        assert one.names() == {"a"}
        assert one.api.begun_at() == ["list", "5"]
        assert one.api.asked[1][1]["labelSelector"] == PODS.selector

    events = line("ADDED", pod("b", 6)) + line("MODIFIED", pod("a", 7)) + line("DELETED", pod("b", 8))
    follow(tmp_path, play, [listed(5, pod("a", 4))], [[events, HOLD]])


def test_what_is_older_than_the_list_changes_nothing_and_is_no_news(tmp_path: Path) -> None:
    async def play(one: Following) -> None:
        await one.until(lambda: len(one.told) == 3)
        assert one.told == [("a", True), ("a", False), ("a", False)]
        known = one.cache.child("Pod", "team-a", "a")
        assert known is not None
        assert known["metadata"]["resourceVersion"] == "9"

    older = line("MODIFIED", pod("a", 7)) + line("DELETED", pod("a", 8))
    follow(tmp_path, play, [listed(10, pod("a", 9))], [[older, HOLD]])


def test_a_watch_that_ends_is_followed_by_one_from_the_last_version_seen(tmp_path: Path) -> None:
    async def play(one: Following) -> None:
        assert await one.asks(4) == ["list", "5", "6", "40"]
        await one.until(lambda: one.names() == {"a"})

    ends: list[Answer] = [[line("ADDED", pod("b", 6))], [bookmark(40)], [line("DELETED", pod("b", 41)), HOLD]]
    follow(tmp_path, play, [listed(5, pod("a", 4))], ends)


@pytest.mark.parametrize("gone", [refused(410), [ERROR_410]], ids=["by status", "by event"])
def test_what_was_deleted_in_a_gap_is_found_by_the_list_after_it(gone: Answer, tmp_path: Path) -> None:
    async def play(one: Following) -> None:
        assert await one.asks(5) == ["list", "5", "5", "list", "20"]
        assert one.names() == {"a", "c"}
        assert one.told[2:] == [("c", True), ("b", True)]

    lists: list[Answer] = [listed(5, pod("a", 4), pod("b", 4)), listed(20, pod("a", 4), pod("c", 9))]
    follow(tmp_path, play, lists, [[BREAK], gone])


def test_half_a_line_is_no_event_and_comes_again(tmp_path: Path) -> None:
    async def play(one: Following) -> None:
        assert await one.asks(3) == ["list", "5", "5"]
        await one.until(lambda: one.names() == {"a"})

    whole = line("ADDED", pod("a", 6))
    follow(tmp_path, play, [listed(5)], [[whole[:40], BREAK], [whole, HOLD]])


def test_a_watch_that_falls_silent_is_begun_anew_where_it_broke_off(tmp_path: Path) -> None:
    async def play(one: Following) -> None:
        assert await one.asks(4) == ["list", "5", "30", "30"]
        moments = [moment for moment, _ in one.api.asked]
        assert moments[2] - moments[1] == pytest.approx(SILENCE_S, abs=1.0)
        assert moments[3] - moments[2] == pytest.approx(SILENCE_S, abs=1.0)

    follow(tmp_path, play, [listed(5)], [[bookmark(30), HOLD]])


def test_a_list_that_grows_too_old_between_its_pages_is_begun_anew(tmp_path: Path) -> None:
    async def play(one: Following) -> None:
        assert await one.asks(5) == ["list", "list", "list", "list", "9"]
        assert [query.get("continue") for _, query in one.api.asked[:4]] == [None, "page-2", None, "page-2"]
        assert one.names() == {"b", "c"}

    lists: list[Answer] = [listed(5, pod("a", 4), token="page-2"), refused(410)]
    lists += [listed(9, pod("b", 8), token="page-2"), listed(9, pod("c", 8))]
    follow(tmp_path, play, lists)


def test_a_kind_whose_crd_comes_later_is_watched_from_then_on(tmp_path: Path) -> None:
    async def play(one: Following) -> None:
        await one.reflector.listed.wait()
        assert one.cache.lacks("PodMonitor")
        assert await one.reflector.list_again() == 0
        await asyncio.sleep(1000)
        assert one.api.begun_at() == ["list", "list"], "nobody but the resync looks"
        assert await one.reflector.list_again() == 1
        await one.until(lambda: one.names() == {"a", "b"})
        assert not one.cache.lacks("PodMonitor")

    there = listed(7, pod("a", 6))
    follow(tmp_path, play, [refused(404), refused(404), there, there], [[line("ADDED", pod("b", 8)), HOLD]], MONITORS)


def test_a_crd_that_goes_takes_its_objects_along(tmp_path: Path) -> None:
    async def play(one: Following) -> None:
        assert await one.asks(4) == ["list", "5", "5", "list"]
        await one.until(lambda: one.cache.lacks("PodMonitor"))
        assert one.names() == set()

    follow(tmp_path, play, [listed(5, pod("a", 4)), refused(404)], [[], refused(404)], MONITORS)


def test_a_kind_of_every_cluster_that_is_not_found_is_asked_for_ever_more_seldom(tmp_path: Path) -> None:
    async def play(one: Following) -> None:
        await one.asks(12)
        moments = [moment for moment, _ in one.api.asked]
        gaps = [later - earlier for earlier, later in pairwise(moments)]
        assert gaps[0] < 0.1
        assert gaps[5] > gaps[2] > gaps[1]
        assert 7 < gaps[10] < 11
        assert not one.reflector.listed.is_set()

    follow(tmp_path, play, [refused(404)] * 12)


def test_an_error_is_waited_out_and_what_happened_meanwhile_is_told(tmp_path: Path) -> None:
    async def play(one: Following) -> None:
        assert await one.asks(5) == ["list", "5", "5", "5", "5"]
        await one.until(lambda: one.names() == {"a"})

    watches: list[Answer] = [[ERROR_500], refused(503), [b"<html>"], [line("ADDED", pod("a", 6)), HOLD]]
    follow(tmp_path, play, [listed(5)], watches)


def test_a_version_from_which_no_watch_goes_on_is_given_up_for_a_list(tmp_path: Path) -> None:
    async def play(one: Following) -> None:
        assert await one.asks(8) == ["list", *["5"] * 5, "list", "3"]

    follow(tmp_path, play, [listed(5), listed(3)], [refused(500)] * 5)


@pytest.mark.parametrize(
    ("lists", "watches"),
    [
        pytest.param([refused(429, 65), listed(5)], [], id="before a list"),
        pytest.param([listed(5)], [refused(429, 65)], id="before a watch"),
    ],
)
def test_an_api_server_that_asks_for_a_pause_has_it(lists: list[Answer], watches: list[Answer], tmp_path: Path) -> None:
    async def play(one: Following) -> None:
        await one.asks(3)
        moments = [moment for moment, _ in one.api.asked]
        assert max(later - earlier for earlier, later in pairwise(moments)) > 64.9

    follow(tmp_path, play, lists, watches)


@pytest.mark.parametrize(
    ("lists", "watches"), [([refused(403)], []), ([listed(5)], [refused(403)])], ids=["list", "watch"]
)
def test_what_is_forbidden_is_not_asked_for_again(lists: list[Answer], watches: list[Answer], tmp_path: Path) -> None:
    async def play(one: Following) -> None:
        with pytest.raises(KubeError, match="says 403"):
            await one.task

    follow(tmp_path, play, lists, watches)
