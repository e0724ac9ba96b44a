"""Operator processes: leader election, and that no event is lost, whatever happens to the watches."""

from __future__ import annotations

import asyncio
import functools
import json
import re
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.world.operator_process import (
    OperatorProcess,
    change_replicas,
    create_service,
    has_replicas,
    operator_processes,
    until,
)
from harness.world.proxy import ApiProxy, serve_proxy
from llmservice_local.client import Endpoint
from llmservice_operator.api.crd import crd
from llmservice_operator.api.kinds import CHILD_KINDS, FOLLOWED, LLMSERVICES, Kind
from llmservice_operator.cluster.kube_client import KubeClient, KubeError
from llmservice_operator.framework.operator import gateways
from llmservice_operator.settings import OperatorSettings

pytestmark = pytest.mark.slow

LEASE = "/apis/coordination.k8s.io/v1/namespaces/team-a/leases/llmservice-operator"
BUDGET = CHILD_KINDS["PodDisruptionBudget"]
WATCHED = sum(one.kind.built_in or one.kind.name == "LLMService" for one in FOLLOWED)


@dataclass
class Operator(OperatorProcess):
    """With a proxy of its own to the API server."""

    proxy: ApiProxy

    @property
    def is_idle(self) -> bool:
        """Whether it has written all changes: the next tick is seconds away."""
        return not self.proxy.writes_since(time.monotonic() - 0.5)

    async def cached(self) -> float:
        """Objects in its cache."""
        found = re.search(r"^llmservice_operator_cached_objects (\S+)", await self.metrics(), re.MULTILINE)
        assert found is not None
        return float(found[1])


Start = Callable[..., Awaitable[Operator]]


@pytest.fixture
async def start(api_url: str, kube: KubeClient, tmp_path: Path) -> AsyncIterator[Start]:
    """Starts an operator; a `fault` is the answer to the first request of each list and watch."""
    assert kube
    async with AsyncExitStack() as stack:
        processes = await stack.enter_async_context(operator_processes(tmp_path))

        async def run(*flags: str, fault: int | None = None) -> Operator:
            proxy = await stack.enter_async_context(serve_proxy(api_url))
            proxy.fault = fault
            kubeconfig = tmp_path / f"kubeconfig-{proxy.url.rpartition(':')[2]}"
            Endpoint(proxy.url).write_kubeconfig(kubeconfig)
            started = await processes(kubeconfig, *flags)
            return Operator(started.process, started.log, started.health_port, proxy)

        yield run


@pytest.fixture
def elect(start: Start) -> Start:
    """Starts an operator that takes part in the leader election."""
    return lambda: start("--leader-elect", "--lease-namespace", "team-a")


@pytest.fixture
async def leader(elect: Start, kube: KubeClient) -> Operator:
    """An operator that leads, and has applied the service with one replica."""
    first = await elect()
    await until(lambda: first.leads)
    await create_service(kube)
    await until(lambda: has_replicas(kube, 1))
    return first


@pytest.fixture
async def standby(leader: Operator, elect: Start) -> Operator:
    """A second operator, which waits for the lease."""
    assert leader
    second = await elect()
    await until(lambda: second.has_logged("waiting: "))
    return second


@pytest.fixture
async def alone(start: Start, kube: KubeClient) -> Operator:
    """An operator without leader election, which has applied the service; its next tick is a minute away."""
    one = await start("--tick", "60")
    await create_service(kube)
    await until(lambda: has_replicas(kube, 1))
    await until(lambda: one.proxy.watches >= WATCHED)
    return one


async def test_a_standby_writes_nothing_and_leads_at_once_when_the_leader_stops(
    leader: Operator, standby: Operator, kube: KubeClient
) -> None:
    assert standby.proxy.writes == []

    leader.process.send_signal(signal.SIGTERM)
    took_s = await until(lambda: standby.leads)

    assert took_s < 5.0
    assert await leader.ended() == 0
    await change_replicas(kube, 2)
    await until(lambda: has_replicas(kube, 2))
    assert standby.proxy.writes


@pytest.mark.usefixtures("standby")
async def test_a_standby_leads_within_twenty_seconds_after_a_crash(leader: Operator, kube: KubeClient) -> None:
    leader.process.kill()
    await change_replicas(kube, 3)
    took_s = await until(lambda: has_replicas(kube, 3))

    assert took_s < 20.0


async def test_a_leader_that_was_suspended_writes_nothing_afterwards(
    leader: Operator, standby: Operator, kube: KubeClient
) -> None:
    await until(lambda: leader.is_idle)  # the fence can't stop a request that is being sent

    leader.process.send_signal(signal.SIGSTOP)
    await until(lambda: standby.leads)
    await change_replicas(kube, 2)
    await until(lambda: has_replicas(kube, 2))
    resumed_s = time.monotonic()
    leader.process.send_signal(signal.SIGCONT)  # it has a changed spec and a changed Deployment to process

    assert await leader.ended() == 1
    assert leader.proxy.writes_since(resumed_s) == []
    assert leader.has_logged("no longer the leader")
    assert standby.process.returncode is None


async def test_a_leader_that_lost_the_lease_ends(leader: Operator, kube: KubeClient) -> None:
    await kube.request("PATCH", LEASE, body={"spec": {"holderIdentity": "another"}})

    assert await leader.ended() == 1
    assert leader.has_logged("another holds the lease")


async def test_a_silent_watch_is_begun_anew_and_misses_nothing(start: Start, kube: KubeClient) -> None:
    one = await start("--watch-silence", "2", "--tick", "60")
    await create_service(kube)
    await until(lambda: has_replicas(kube, 1))
    await until(lambda: one.proxy.watches >= 8)
    one.proxy.silence_watches()

    await change_replicas(kube, 4)

    await until(lambda: has_replicas(kube, 4))
    assert one.process.returncode is None


async def test_a_watch_with_bookmarks_alone_is_kept_and_continued_from_them(start: Start, kube: KubeClient) -> None:
    await create_service(kube)
    one = await start("--watch-silence", "6", "--tick", "60")
    one.proxy.bookmark = "7654321"
    await until(lambda: has_replicas(kube, 1))

    await until(lambda: one.proxy.bookmarks >= 40 * WATCHED)  # five a second
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
async def test_watches_that_end_are_begun_anew_and_miss_nothing(
    last_words: bytes, alone: Operator, kube: KubeClient
) -> None:
    alone.proxy.break_watches(last_words)
    await change_replicas(kube, 4)
    await kube.request("DELETE", BUDGET.path("team-a", "tiny"))
    begun = alone.proxy.watches
    await until(lambda: alone.proxy.watches >= begun + 2 * WATCHED)
    alone.proxy.last_words = None

    await until(lambda: has_replicas(kube, 4))
    await until(lambda: kube.get_child(BUDGET, "team-a", "tiny"))
    assert alone.process.returncode is None


async def test_objects_that_are_deleted_without_a_watch_leave_the_cache_within_two_seconds(
    alone: Operator, kube: KubeClient
) -> None:
    await until(lambda: alone.is_idle)
    assert await alone.cached() > 1

    alone.proxy.hold = asyncio.Event()
    alone.proxy.break_watches(error_event(410, "too old resource version"))
    await kube.request("DELETE", LLMSERVICES.path("team-a", "tiny"))
    await collect_garbage(kube)
    alone.proxy.last_words = None
    alone.proxy.hold.set()

    async def is_empty() -> bool:
        await collect_garbage(kube)  # a tick may have come before the operator knew
        return await alone.cached() == 0

    assert await until(is_empty) < 2.0
    assert alone.process.returncode is None


async def test_an_error_event_in_a_watch_ends_the_process_and_the_next_one_misses_nothing(
    leader: Operator, elect: Start, kube: KubeClient
) -> None:
    leader.proxy.break_watches(error_event(500, "etcdserver: no leader"))
    await change_replicas(kube, 4)

    assert await leader.ended() == 1
    assert leader.has_logged("the operator ended, start it again: Error in the watch-stream")
    assert leader.has_logged("etcdserver: no leader")
    lease = await kube.request("GET", LEASE)
    assert not lease["spec"]["holderIdentity"], "the lease was released"
    await elect()
    await until(lambda: has_replicas(kube, 4))


@pytest.mark.parametrize("fault", [403, 500, 429, 0], ids=["forbidden", "server error", "asked to wait", "cut off"])
async def test_no_event_is_lost_where_every_request_of_kopf_fails_once(
    fault: int, start: Start, kube: KubeClient
) -> None:
    await create_service(kube)

    one = await start("--tick", "60", fault=fault)

    await until(lambda: has_replicas(kube, 1))
    await until(lambda: one.proxy.watches >= WATCHED)
    await change_replicas(kube, 4)
    await until(lambda: has_replicas(kube, 4))
    await kube.request("DELETE", BUDGET.path("team-a", "tiny"))
    await until(lambda: kube.get_child(BUDGET, "team-a", "tiny"))
    assert one.proxy.failed >= 2 * WATCHED, "each list and each watch"
    assert one.process.returncode is None


async def test_a_crd_that_is_installed_deleted_and_installed_again_is_watched_each_time(
    start: Start, kube: KubeClient
) -> None:
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
        await until(lambda: one.is_idle)
        await change_replicas(kube, replicas)
        assert await until(functools.partial(has_replicas, kube, replicas)) < 2, "by a watch"
        await kube.request("DELETE", own)
        await until(functools.partial(one.has_logged, "does not serve llmservices", replicas))
        await delete_all(kube, CHILD_KINDS["Deployment"])  # as the garbage collector would

    assert one.process.returncode is None


async def is_served(kube: KubeClient) -> bool:
    try:
        await kube.list_all(LLMSERVICES.path())
    except KubeError:
        return False
    return True


async def collect_garbage(kube: KubeClient) -> None:
    """What a cluster does when a service is deleted."""
    for kind in CHILD_KINDS.values():
        if kind.built_in:
            await delete_all(kube, kind)


async def delete_all(kube: KubeClient, kind: Kind) -> None:
    path = kind.path("team-a")
    for one in (await kube.list_all(path))[0]:
        await kube.request("DELETE", f"{path}/{one['metadata']['name']}")


async def test_the_gateways_are_those_of_the_chart_in_the_operator_s_own_namespace(kube: KubeClient) -> None:
    ours = {"app.kubernetes.io/part-of": "llmservice", "app.kubernetes.io/component": "gateway"}
    servers = {"app.kubernetes.io/name": "llmservice", "app.kubernetes.io/component": "server"}
    ports = [{"name": "http", "containerPort": 8080}, {"name": "metrics", "containerPort": 8001}]
    for name, tags, ip in (
        ("gateway-1", ours, "10.0.0.1"),
        ("gateway-2", ours, "10.0.0.2"),
        ("tiny-1", servers, "::1"),
    ):
        spec = {"containers": [{"name": "gateway", "image": "img:1", "ports": ports}]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": tags}, "spec": spec}
        path = "/api/v1/namespaces/team-a/pods"
        await kube.request("POST", path, body=pod, content_type="application/json")
        await kube.request("PATCH", f"{path}/{name}/status", body={"status": {"podIP": ip}})
    named = OperatorSettings(gateway_urls=("http://127.0.0.1:9001",), own_namespace="team-a")

    assert await gateways(kube, named) == ["http://127.0.0.1:9001", "http://10.0.0.1:8001", "http://10.0.0.2:8001"]
    assert await gateways(kube, OperatorSettings(own_namespace="team-b")) == []
    assert await gateways(kube, OperatorSettings(gateway_urls=("http://x:1",))) == ["http://x:1"]
