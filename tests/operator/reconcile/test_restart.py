"""The first passes of a restarted operator."""

from __future__ import annotations

import time
from typing import Any

import pytest

from harness.world.one_service import AUTOSCALING, World, busy_service


async def test_a_restarted_operator_resumes_replicas_and_begins_stabilisation_anew(
    world: World, manifest_of: Any
) -> None:
    """Time in which no operator saw the load says nothing for fewer replicas."""
    await world.create_service(manifest_of(autoscaling=AUTOSCALING))
    await world.run_pass()
    await world.start_pod("tiny-1", "127.0.0.1", (8, 18))
    await world.run_pass(after_s=5)
    world.pods.in_flight["127.0.0.1"] = (0, 0)
    await world.run_pass(after_s=5)

    world = world.restarted()
    await world.run_pass(after_s=600)
    assert await world.replicas() == 3
    await world.run_pass(after_s=30)
    assert await world.replicas() == 3
    await world.run_pass(after_s=31)

    assert await world.replicas() == 1


async def test_a_restart_during_traffic_writes_nothing_without_changes(world: World, manifest_of: Any) -> None:
    await busy_service(world, manifest_of, (8, 18))
    world.pods.answered_s = 0.5

    async def traffic(after_s: float, *, restart: bool = False) -> str:
        """Finish six requests in five seconds, and pass; the version of the service after it."""
        world.pods.finished += round(after_s * 1.2)
        await (world.restarted() if restart else world).run_pass(after_s=after_s)
        return str((await world.service())["metadata"]["resourceVersion"])

    for _ in range(16):
        await traffic(5)
    status = await world.status()
    signals = {signal["name"]: signal["value"] for signal in status["autoscaling"]["signals"]}
    assert signals["arrivals"] == 1.2
    assert signals["ttftP99"] is not None
    settled = (await world.service())["metadata"]["resourceVersion"]
    world.writes.clear()

    assert {await traffic(5, restart=True)} | {await traffic(5) for _ in range(20)} == {settled}
    assert world.writes == []


async def test_a_start_that_the_status_has_is_not_measured_again(world: World, manifest_of: Any) -> None:
    world.now = time.time() + 60.0  # the API server's clock says when a pod is created: it takes a minute to start
    world.booted_s = world.now - 1000.0
    await busy_service(world, manifest_of, (0, 0))
    for _ in range(4):
        await world.run_pass(after_s=20)
    before = await world.service()
    assert before["status"]["autoscaling"]["startupSeconds"] > 50

    await world.restarted().run_pass(after_s=5)
    await world.run_pass(after_s=20)
    assert await world.service() == before


@pytest.mark.parametrize("silent_s", [0, 5, 10])
async def test_a_restart_that_reaches_no_pod_at_first_writes_nothing(
    silent_s: float, world: World, manifest_of: Any
) -> None:
    await busy_service(world, manifest_of, (4, 0))
    for _ in range(4):
        await world.run_pass(after_s=20)
    before = await world.service()

    world.pods.in_flight.clear()
    await world.restarted().run_pass(after_s=5)
    await world.run_pass(after_s=silent_s)
    assert await world.service() == before

    await world.run_pass(after_s=15)
    assert (await world.condition("ScalingActive"))["reason"] == "NoMetrics"


async def test_a_restart_in_an_overload_adds_replicas_at_once(world: World, manifest_of: Any) -> None:
    await busy_service(world, manifest_of, (4, 0))
    await world.run_pass(after_s=20)
    world.pods.in_flight["127.0.0.1"] = (8, 18)

    await world.restarted().run_pass(after_s=5)

    assert await world.replicas() == 3
    assert (await world.status())["autoscaling"]["decisions"][0]["replicas"] == 3


async def test_a_restarted_operator_resumes_the_capacity(world: World, manifest_of: Any) -> None:
    await busy_service(world, manifest_of, (8, 18))
    for finished in (0, 30, 60):
        world.pods.finished = finished
        await world.run_pass(after_s=20)
    capacity = (await world.status())["autoscaling"]["capacity"]["requestsPerSecond"]
    assert capacity == 1.5

    world.pods.in_flight["127.0.0.1"] = (1, 0)
    await world.restarted().run_pass(after_s=1)
    await world.run_pass(after_s=1)

    assert (await world.status())["autoscaling"]["capacity"]["requestsPerSecond"] == 1.5
    signals = {signal["name"]: signal for signal in (await world.status())["autoscaling"]["signals"]}
    assert signals["arrivals"]["target"] == 1.2
