"""Operator processes: who leads, and that none loses an event, whatever becomes of its watches."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from harness.proxy import ApiProxy, serve_proxy
from llmservice_local.endpoint import Endpoint
from llmservice_local.ports import free_port
from llmservice_operator.api.crd import crd
from llmservice_operator.api.kinds import CHILD_KINDS, FOLLOWED, ChildKind
from llmservice_operator.cluster.kube_client import KubeClient, KubeError

SERVICES = "/apis/serving.llmservice.io/v1alpha1/namespaces/team-a/llmservices"
LEASE = "/apis/coordination.k8s.io/v1/namespaces/team-a/leases/llmservice-operator"
SHAPE = {"layers": 2, "heads": 4, "hiddenSize": 64, "intermediateSize": 128, "vocabSize": 512}
SPEC = {"model": {"uri": "hf://org/name", "shape": SHAPE}, "engine": {"maxModelLen": 512}, "replicas": 1}
MAIN = "import sys; from llmservice_planner.command import main; sys.exit(main())"

WATCHED = sum(one.kind.group != "monitoring.coreos.com" for one in FOLLOWED)


@dataclass
class Operator:
    """One process, and the front of the API server that only it uses."""

    process: asyncio.subprocess.Process
    proxy: ApiProxy
    log: Path
    health_port: int

    @property
    def works(self) -> bool:
        return " leads" in self.log.read_text()

    @property
    def rests(self) -> bool:
        """Whether it has written all that it wants to: its passes wait for the tick, which is seconds away."""
        return not self.proxy.writes_since(time.monotonic() - 0.5)

    async def cached(self) -> float:
        """Objects in its cache."""
        port = re.search(r"metrics on port (\d+)", self.log.read_text())
        assert port is not None
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port[1]}/metrics") as response:
            found = re.search(r"^llmservice_operator_cached_objects (\S+)", await response.text(), re.MULTILINE)
        assert found is not None
        return float(found[1])

    async def ended(self) -> int:
        async with asyncio.timeout(20):
            return await self.process.wait()


Start = Callable[..., Awaitable[Operator]]


@pytest.fixture
async def start(api_url: str, kube: KubeClient, tmp_path: Path) -> AsyncIterator[Start]:
    """Starts `llmservice operator --leader-elect`; what still runs at the end is killed."""
    assert kube
    async with AsyncExitStack() as stack:
        started: list[Operator] = []

        async def run(*flags: str, fault: int | None = None) -> Operator:
            proxy = await stack.enter_async_context(serve_proxy(api_url))
            proxy.fault = fault
            kubeconfig, log = tmp_path / f"kubeconfig-{len(started)}", tmp_path / f"operator-{len(started)}.log"
            Endpoint(proxy.url).write_kubeconfig(kubeconfig)
            health_port = free_port()
            command = ["operator", "--port", "0", "--host", "127.0.0.1", "--server-image", "img:1", *flags]
            command += ["--health-port", str(health_port)]
            with log.open("wb") as errors:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-c",
                    MAIN,
                    *command,
                    env={**os.environ, "KUBECONFIG": str(kubeconfig)},
                    stderr=errors,
                )
            started.append(Operator(process, proxy, log, health_port))
            return started[-1]

        yield run
        for one in started:
            if one.process.returncode is None:
                one.process.send_signal(signal.SIGCONT)
                one.process.kill()
            await one.process.wait()


@pytest.fixture
def elect(start: Start) -> Start:
    return lambda: start("--leader-elect", "--lease-namespace", "team-a")


async def until(check: Callable[[], Any], limit_s: float = 30.0) -> float:
    """Poll for what no event tells the test; returns the seconds that it took."""
    started = time.monotonic()
    async with asyncio.timeout(limit_s):
        while not (await found if asyncio.iscoroutine(found := check()) else found):
            await asyncio.sleep(0.05)
    return time.monotonic() - started


async def create_service(kube: KubeClient) -> None:
    metadata = {"name": "tiny", "namespace": "team-a"}
    body = {"apiVersion": "serving.llmservice.io/v1alpha1", "kind": "LLMService", "metadata": metadata, "spec": SPEC}
    await kube.request("POST", SERVICES, body=body, content_type="application/json")


async def change_replicas(kube: KubeClient, replicas: int) -> None:
    await kube.request("PATCH", f"{SERVICES}/tiny", body={"spec": {"replicas": replicas}})


async def has_replicas(kube: KubeClient, replicas: int) -> bool:
    deployment = await kube.get_child(CHILD_KINDS["Deployment"], "team-a", "tiny")
    return deployment is not None and deployment["spec"]["replicas"] == replicas


async def test_one_works_and_the_other_takes_over_at_once_when_it_stops(elect: Start, kube: KubeClient) -> None:
    first = await elect()
    await until(lambda: first.works)
    second = await elect()
    await create_service(kube)
    await until(lambda: has_replicas(kube, 1))
    await until(lambda: "waiting: " in second.log.read_text())
    assert second.proxy.writes == []

    first.process.send_signal(signal.SIGTERM)
    took_s = await until(lambda: second.works)

    assert took_s < 5.0
    assert await first.ended() == 0
    await change_replicas(kube, 2)
    await until(lambda: has_replicas(kube, 2))
    assert second.proxy.writes


async def test_a_crashed_leader_is_followed_within_twenty_seconds(elect: Start, kube: KubeClient) -> None:
    first = await elect()
    await until(lambda: first.works)
    second = await elect()
    await create_service(kube)
    await until(lambda: has_replicas(kube, 1))
    await until(lambda: "waiting: " in second.log.read_text())

    first.process.kill()
    await change_replicas(kube, 3)
    took_s = await until(lambda: has_replicas(kube, 3))

    assert took_s < 20.0


async def test_a_leader_that_was_paused_writes_nothing_after_it_wakes(elect: Start, kube: KubeClient) -> None:
    first = await elect()
    await until(lambda: first.works)
    second = await elect()
    await create_service(kube)
    await until(lambda: has_replicas(kube, 1))
    await until(lambda: first.rests)  # no fence holds back a request that is just being sent

    first.process.send_signal(signal.SIGSTOP)
    await until(lambda: second.works)
    await change_replicas(kube, 2)
    await until(lambda: has_replicas(kube, 2))
    woken_s = time.monotonic()
    first.process.send_signal(signal.SIGCONT)  # a changed spec and a changed Deployment await it

    assert await first.ended() == 1
    assert first.proxy.writes_since(woken_s) == []
    assert "no longer the leader" in first.log.read_text()
    assert second.process.returncode is None


async def test_a_leader_that_cannot_renew_ends_and_writes_nothing_more(elect: Start, kube: KubeClient) -> None:
    first = await elect()
    await until(lambda: first.works)
    await create_service(kube)
    await until(lambda: has_replicas(kube, 1))

    stolen = {"spec": {"holderIdentity": "somebody-else"}}
    await kube.request("PATCH", LEASE, body=stolen)

    assert await first.ended() == 1
    assert "somebody-else holds the lease" in first.log.read_text()


async def test_a_watch_that_falls_silent_is_begun_anew_and_misses_nothing(start: Start, kube: KubeClient) -> None:
    one = await start("--watch-silence", "2", "--tick", "60")
    await create_service(kube)
    await until(lambda: has_replicas(kube, 1))
    await until(lambda: one.proxy.watches >= 8)
    one.proxy.silence_watches()

    await change_replicas(kube, 4)

    await until(lambda: has_replicas(kube, 4))
    assert one.process.returncode is None


async def test_a_watch_that_brings_only_bookmarks_is_left_alone_and_goes_on_from_them(
    start: Start, kube: KubeClient
) -> None:
    await create_service(kube)
    one = await start("--watch-silence", "1", "--tick", "60")
    one.proxy.bookmark = "7654321"
    await until(lambda: has_replicas(kube, 1))

    await until(lambda: one.proxy.bookmarks >= 15 * WATCHED)
    assert one.proxy.watches == WATCHED
    one.proxy.break_watches()
    await until(lambda: one.proxy.watches >= 2 * WATCHED)

    assert set(one.proxy.begun_at[WATCHED : 2 * WATCHED]) == {"7654321"}
    assert one.process.returncode is None


def error_event(code: int, message: str) -> bytes:
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": message}
    return json.dumps({"type": "ERROR", "object": status}).encode() + b"\n"


@pytest.mark.parametrize(
    "last_words",
    [
        pytest.param(b"", id="closed at once, again and again"),
        pytest.param(error_event(410, "too old resource version"), id="gone"),
    ],
)
async def test_watches_that_break_off_are_begun_anew_and_miss_nothing(
    last_words: bytes, start: Start, kube: KubeClient
) -> None:
    one = await start("--tick", "60")
    await create_service(kube)
    await until(lambda: has_replicas(kube, 1))
    await until(lambda: one.proxy.watches >= WATCHED)

    one.proxy.break_watches(last_words)
    await change_replicas(kube, 4)
    await kube.request("DELETE", "/apis/policy/v1/namespaces/team-a/poddisruptionbudgets/tiny")
    begun = one.proxy.watches
    await until(lambda: one.proxy.watches >= begun + 2 * WATCHED)
    one.proxy.last_words = None

    await until(lambda: has_replicas(kube, 4))
    await until(lambda: kube.get_child(CHILD_KINDS["PodDisruptionBudget"], "team-a", "tiny"))
    assert one.process.returncode is None


async def test_what_is_deleted_while_a_watch_is_gone_leaves_the_cache_within_two_seconds(
    start: Start, kube: KubeClient
) -> None:
    one = await start("--tick", "60")
    await create_service(kube)
    await until(lambda: has_replicas(kube, 1))
    await until(lambda: one.rests)
    assert await one.cached() > 1

    one.proxy.hold = asyncio.Event()
    one.proxy.break_watches(error_event(410, "too old resource version"))
    await kube.request("DELETE", f"{SERVICES}/tiny")  # nothing here collects its children
    for kind in CHILD_KINDS.values():
        if kind.built_in:
            await delete_all(kube, kind)
    one.proxy.last_words = None
    one.proxy.hold.set()

    async def is_empty() -> bool:
        return await one.cached() == 0

    assert await until(is_empty) < 2.0
    assert one.process.returncode is None


async def test_an_error_within_a_watch_ends_the_process_with_a_clear_message_and_the_next_one_misses_nothing(
    elect: Start, kube: KubeClient
) -> None:
    first = await elect()
    await create_service(kube)
    await until(lambda: has_replicas(kube, 1))

    first.proxy.break_watches(error_event(500, "etcdserver: no leader"))
    await change_replicas(kube, 4)

    assert await first.ended() == 1
    assert "the operator ended, start it again: Error in the watch-stream" in first.log.read_text()
    assert "etcdserver: no leader" in first.log.read_text()
    second = await elect()
    took_s = await until(lambda: second.works)
    assert took_s < 10, "the lease was given back"
    await until(lambda: has_replicas(kube, 4))


@pytest.mark.parametrize("fault", [403, 500, 429, 0], ids=["forbidden", "server error", "asked to wait", "cut off"])
async def test_every_request_of_kopf_fails_once_and_nothing_is_lost(fault: int, start: Start, kube: KubeClient) -> None:
    await create_service(kube)

    one = await start("--tick", "60", fault=fault)

    await until(lambda: has_replicas(kube, 1))
    await until(lambda: one.proxy.watches >= WATCHED)
    await change_replicas(kube, 4)
    await until(lambda: has_replicas(kube, 4))
    await kube.request("DELETE", "/apis/policy/v1/namespaces/team-a/poddisruptionbudgets/tiny")
    await until(lambda: kube.get_child(CHILD_KINDS["PodDisruptionBudget"], "team-a", "tiny"))
    assert one.proxy.failed >= 2 * WATCHED, "each list and each watch"
    assert one.process.returncode is None


async def test_a_crd_that_comes_late_goes_and_comes_back_is_followed_each_time(start: Start, kube: KubeClient) -> None:
    definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    own = f"{definitions}/llmservices.serving.llmservice.io"
    await kube.request("DELETE", own)
    one = await start("--tick", "60")
    await until(lambda: one.proxy.watches >= WATCHED - 1)

    for replicas in (2, 3):
        await kube.request("POST", definitions, body=crd(), content_type="application/json")
        await until(lambda: is_served(kube))
        await create_service(kube)
        await until(lambda: has_replicas(kube, 1))
        await until(lambda: one.rests)
        await change_replicas(kube, replicas)
        assert await until(functools.partial(has_replicas, kube, replicas)) < 2, "by a watch"
        await kube.request("DELETE", own)
        await until(functools.partial(has_said, one, "serves no llmservices", replicas))
        await delete_all(kube, CHILD_KINDS["Deployment"])  # as the garbage collector would

    assert one.process.returncode is None


def has_said(one: Operator, what: str, times: int) -> bool:
    return one.log.read_text().count(what) >= times


async def is_served(kube: KubeClient) -> bool:
    try:
        await kube.list_all(SERVICES)
    except KubeError:
        return False
    return True


async def delete_all(kube: KubeClient, kind: ChildKind) -> None:
    root = f"/apis/{kind.api_version}" if kind.group else f"/api/{kind.api_version}"
    path = f"{root}/namespaces/team-a/{kind.plural}"
    for one in (await kube.list_all(path))[0]:
        await kube.request("DELETE", f"{path}/{one['metadata']['name']}")
