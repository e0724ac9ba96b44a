from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest

from harness.world.jumping_loop import JumpingLoop
from llmservice_operator.cluster.kube_client import KubeError
from llmservice_operator.loops import AT_ONCE, ServiceLoops
from llmservice_operator.monitoring.metrics import OperatorMetrics

KEY = ("team-a", "tiny")
NEVER_S = 1000.0


class Passes:
    """Counts passes, and returns or raises the given outcomes."""

    def __init__(self) -> None:
        self.count = 0
        self.done = asyncio.Condition()
        self.outcomes: list[bool | Exception] = []

    async def run(self, namespace: str, name: str) -> bool:
        assert (namespace, name) == KEY
        async with self.done:
            self.count += 1
            self.done.notify_all()
        outcome = self.outcomes.pop(0) if self.outcomes else True
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def reach(self, count: int) -> None:
        async with asyncio.timeout(5), self.done:
            await self.done.wait_for(lambda: self.count >= count)


@pytest.fixture
async def passes() -> Passes:
    return Passes()


@pytest.fixture
async def loops(passes: Passes) -> AsyncIterator[ServiceLoops]:
    loops = ServiceLoops(passes.run, NEVER_S, OperatorMetrics())
    loops.open([])
    yield loops
    await loops.stop_all()


async def test_a_started_loop_runs_a_pass_at_once_and_after_each_wake(loops: ServiceLoops, passes: Passes) -> None:
    loops.start(KEY)
    await passes.reach(1)
    loops.wake(KEY)
    await passes.reach(2)


async def test_the_tick_starts_a_pass_without_an_event(passes: Passes) -> None:
    loops = ServiceLoops(passes.run, 0.01, OperatorMetrics())
    loops.open([KEY])
    await passes.reach(3)
    await loops.stop_all()


async def test_a_pass_that_never_ends_is_unhealthy() -> None:
    """Its timeout ends every other: what swallows the cancellation is left to the kubelet."""
    began, release, now = asyncio.Event(), asyncio.Event(), [0.0]

    async def hang(*_: str) -> bool:
        began.set()
        return await release.wait()

    loops = ServiceLoops(hang, 60.0, OperatorMetrics(), lambda: now[0])
    loops.open([KEY])
    await began.wait()
    for now[0], healthy in ((59.0, True), (179.0, True), (181.0, False)):
        assert loops.healthy() is healthy
    release.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert loops.healthy()
    await loops.stop_all()


async def test_a_pass_that_fails_is_repeated(passes: Passes) -> None:
    metrics = OperatorMetrics()
    passes.outcomes = [KubeError(500, "etcd is slow"), ValueError("our own fault"), True]
    loops = ServiceLoops(passes.run, 0.01, metrics)
    loops.open([KEY])
    await passes.reach(3)
    assert loops.healthy()
    await loops.stop_all()

    for reason in (b"server_error", b"internal"):
        series = b'llmservice_operator_pass_failures_total{name="tiny",namespace="team-a",reason="%s"} 1.0' % reason
        assert series in metrics.exposition()


def test_the_pause_after_a_failure_grows_and_is_never_shorter_than_the_api_server_asks() -> None:
    begun: list[float] = []
    outcomes = [KubeError(500, "slow"), KubeError(429, "busy", retry_after_s=90.0), KubeError(500, "slow")]

    async def run_pass(namespace: str, name: str) -> bool:
        assert (namespace, name) == KEY
        begun.append(asyncio.get_running_loop().time())
        if outcomes:
            raise outcomes.pop(0)
        return False

    async def run() -> None:
        loops = ServiceLoops(run_pass, 5.0, OperatorMetrics())
        loops.open([KEY])
        await asyncio.sleep(10)
        loops.wake(KEY)  # cuts no pause short
        while len(loops):
            await asyncio.sleep(1)

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(run())

    assert [later - earlier for earlier, later in pairwise(begun)] == [10.0, 90.0, 40.0]


async def test_the_loop_of_a_deleted_service_ends_and_can_be_started_again(loops: ServiceLoops, passes: Passes) -> None:
    passes.outcomes = [False]
    loops.start(KEY)
    await passes.reach(1)
    await asyncio.sleep(0)
    loops.wake(KEY)
    loops.start(KEY)
    await passes.reach(2)


async def test_a_child_of_an_unknown_service_wakes_no_loop(loops: ServiceLoops, passes: Passes) -> None:
    loops.wake(("team-a", "stranger"))
    await asyncio.sleep(0)

    assert passes.count == 0


async def test_no_pass_runs_before_open_nor_after_stop(passes: Passes) -> None:
    loops = ServiceLoops(passes.run, NEVER_S, OperatorMetrics())
    loops.start(KEY)
    await asyncio.sleep(0)
    assert passes.count == 0

    loops.open([KEY])
    await passes.reach(1)
    await loops.stop_all()
    loops.start(KEY)
    await asyncio.sleep(0)

    assert passes.count == 1
    assert len(loops) == 0


async def test_a_thousand_services_do_not_run_all_at_once() -> None:
    running = most = done = 0

    async def run_pass(namespace: str, name: str) -> bool:
        nonlocal running, most, done
        running += 1
        most = max(most, running)
        for _ in range(100):  # iterations of the event loop: in each another pass begins
            await asyncio.sleep(0)
        running -= 1
        done += 1
        return bool(namespace and name)

    loops = ServiceLoops(run_pass, NEVER_S, OperatorMetrics())
    loops.open([("team-a", f"model-{number}") for number in range(1000)])
    async with asyncio.timeout(10):
        while done < 1000:
            await asyncio.sleep(0)
    await loops.stop_all()

    assert 1 < most <= 100


async def test_an_edit_during_the_start_waits_for_few_other_passes() -> None:
    seen: list[str] = []
    edited = asyncio.Event()

    async def run_pass(namespace: str, name: str) -> bool:
        seen.append(name)
        if name == "model-999":
            edited.set()
        for _ in range(100):
            await asyncio.sleep(0)
        return bool(namespace)

    loops = ServiceLoops(run_pass, NEVER_S, OperatorMetrics())
    loops.open([("team-a", f"model-{number}") for number in range(1000)])
    async with asyncio.timeout(10):
        while not seen:
            await asyncio.sleep(0)
        loops.start(("team-a", "model-999"))
        await edited.wait()
    await loops.stop_all()

    assert seen.index("model-999") <= 3


async def test_an_edit_overtakes_routine_passes() -> None:
    seen: list[str] = []
    first_begun, go_on = asyncio.Event(), asyncio.Event()

    async def run_pass(namespace: str, name: str) -> bool:
        seen.append(name)
        if len(seen) == AT_ONCE:
            first_begun.set()
        await go_on.wait()
        return bool(namespace)

    loops = ServiceLoops(run_pass, NEVER_S, OperatorMetrics())
    loops.open([("team-a", f"model-{number}") for number in range(200)])
    async with asyncio.timeout(10):
        await first_begun.wait()
        loops.wake(("team-a", "model-150"))
        loops.start(("team-a", "model-199"))
        loops.start(("team-a", "new"))
        await asyncio.sleep(0)
        go_on.set()
        while len(seen) < 201:
            await asyncio.sleep(0)
    await loops.stop_all()

    assert seen[AT_ONCE : AT_ONCE + 4] == ["model-199", "new", "model-150", f"model-{AT_ONCE}"]
