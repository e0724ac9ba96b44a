"""Passes over a service that is scaled to zero and back."""

from __future__ import annotations

from typing import Any

import pytest

from harness.world.one_service import AUTOSCALING, NS, World
from llmservice_operator.status.conditions import rfc3339 as stamp

SLEEPY = {**AUTOSCALING, "minReplicas": 0, "idleTimeout": "60s"}
KEY = ("team-a", "tiny")


async def reads(world: World, held: int) -> None:
    """What the reader of the gateways does each second."""
    world.pods.held_requests = {"team-a/tiny": held} if held else {}
    await world.reconciler.held.read()


async def pass_for(world: World, seconds: int) -> None:
    for _ in range(0, seconds, 5):
        await world.run_pass(after_s=5)


async def test_an_idle_service_goes_to_zero_and_held_requests_wake_it(world: World, manifest_of: Any) -> None:
    await world.create_service(manifest_of(autoscaling={**SLEEPY, "maxReplicas": 8}))
    await world.run_pass()
    assert await world.replicas() == 0, "a new one has no request yet"
    await reads(world, 0)
    await world.run_pass(after_s=5)
    ready, scaling = await world.condition("Ready"), await world.condition("ScalingActive")
    assert (ready["status"], ready["reason"]) == ("False", "ScaledToZero")
    assert (scaling["status"], scaling["reason"]) == ("True", "FollowingLoad")
    assert (await world.condition("Stalled"))["status"] == "False"

    await reads(world, 50)
    await world.run_pass(after_s=1)
    assert await world.replicas() == 4, "5 replicas hold them, 4 may be added at once"
    assert (await world.condition("Ready"))["reason"] == "Starting"
    await reads(world, 500)
    await world.run_pass(after_s=1)
    assert await world.replicas() == 4
    assert KEY not in world.reconciler.held.at_zero

    await world.start_pod("tiny-1", "127.0.0.1", (1, 0))
    await pass_for(world, 90)
    assert await world.replicas() == 1
    world.pods.in_flight["127.0.0.1"] = (0, 0)
    world.pods.finished += 1
    await pass_for(world, 60)
    assert await world.replicas() == 1
    await pass_for(world, 10)
    assert await world.replicas() == 0
    decision = (await world.status())["autoscaling"]["decisions"][0]
    assert "idle: no request for 60s -> 0" in decision["reasons"]


async def test_a_day_without_gpu_hours_left_is_no_zero_that_a_request_ends(world: World, manifest_of: Any) -> None:
    """At 22:13 UTC: one hour has to be left of 1.1, so that a replica runs for six minutes."""
    budget = {**SLEEPY, "maxGPUHoursPerDay": 1.1}
    await world.create_service(manifest_of(resources={"gpu": {"product": "l4"}}, autoscaling=budget))
    await world.run_pass()
    await reads(world, 1)
    await world.run_pass(after_s=1)
    await world.start_pod("tiny-1", "127.0.0.1", (1, 0))
    await world.run_pass(after_s=5)
    assert await world.replicas() == 1
    await world.run_pass(after_s=400)
    assert await world.replicas() == 0
    await world.kube.request("DELETE", f"{NS}/pods/tiny-1")

    await reads(world, 1)
    await world.run_pass(after_s=5)
    ready = await world.condition("Ready")
    assert (await world.replicas(), ready["status"], ready["reason"]) == (0, "False", "LimitedByCost")

    await world.run_pass(after_s=7000)
    assert (await world.condition("Ready"))["reason"] == "ScaledToZero"
    await reads(world, 1)
    await world.run_pass(after_s=1)
    assert await world.replicas() == 1


async def test_requests_that_a_gateway_still_holds_beside_a_full_pod_count(world: World, manifest_of: Any) -> None:
    await world.create_service(manifest_of(autoscaling=SLEEPY))
    await world.run_pass()
    await reads(world, 1)
    await world.run_pass(after_s=1)
    assert await world.replicas() == 1
    await world.start_pod("tiny-1", "127.0.0.1", (8, 0))

    await reads(world, 42)
    await world.run_pass(after_s=1)

    assert await world.replicas() == 4
    decision = (await world.status())["autoscaling"]["decisions"][0]
    assert "queue: 42 waiting, 8 running" in decision["reasons"][0]
    assert KEY in world.reconciler.held.starting

    await reads(world, 0)
    await world.run_pass(after_s=1)
    assert world.reconciler.held.starting == set()


@pytest.mark.parametrize("restarted", [False, True])
async def test_the_status_says_what_the_first_request_waited_for(
    restarted: bool, world: World, manifest_of: Any
) -> None:
    await world.create_service(manifest_of(autoscaling=SLEEPY))
    await world.run_pass()
    await reads(world, 1)  # which has been waiting for 2 s
    await world.run_pass(after_s=1)
    if restarted:
        world = world.restarted()
        await world.run_pass(after_s=1)
    began = world.now
    world.pods.sizing = {"compile_s": 7.5}
    world.now += 60
    await world.start_pod("tiny-1", "127.0.0.1", (1, 0))
    whole = {"image": "img:1", "imageID": "", "ready": True, "restartCount": 0}
    fetched = {"terminated": {"startedAt": stamp(began + 10), "exitCode": 0}}
    fetch = {**whole, "name": "fetch", "state": fetched}
    server = {**whole, "name": "server", "state": {"running": {"startedAt": stamp(began + 35)}}}
    status = {"initContainerStatuses": [fetch], "containerStatuses": [server]}
    await world.kube.request("PATCH", f"{NS}/pods/tiny-1/status", body={"status": status})

    await world.run_pass(after_s=1)
    await world.run_pass(after_s=5)

    waited_s = 1 if restarted else 2  # a restarted operator knows when it was decided
    assert (await world.status())["autoscaling"]["lastColdStart"] == {
        "readyAt": stamp(began + 60),
        "seconds": 60.0 + waited_s,
        "scheduling": 10.0 + waited_s,
        "fetching": 25.0,
        "loading": 17.5,
        "compiling": 7.5,
    }
    count = 'llmservice_operator_cold_start_seconds_count{phase="compiling"} 1.0'
    assert count in world.reconciler.metrics.exposition().decode()


async def test_requests_between_two_scrapes_keep_the_last_replica(world: World, manifest_of: Any) -> None:
    await world.create_service(manifest_of(autoscaling=SLEEPY))
    await world.run_pass()
    await reads(world, 1)
    await world.run_pass(after_s=1)
    await world.start_pod("tiny-1", "127.0.0.1", (0, 0))

    for _ in range(10):
        await pass_for(world, 30)
        world.pods.finished += 1

    assert await world.replicas() == 1


async def test_another_leader_neither_shrinks_early_nor_wakes_what_sleeps(world: World, manifest_of: Any) -> None:
    await world.create_service(manifest_of(autoscaling=SLEEPY))
    await world.run_pass()
    await reads(world, 1)
    await world.run_pass(after_s=1)
    await world.start_pod("tiny-1", "127.0.0.1", (0, 0))
    await pass_for(world, 55)

    world = world.restarted()
    await pass_for(world, 60)
    assert await world.replicas() == 1, "what nobody measured is not idle"
    await pass_for(world, 10)
    assert await world.replicas() == 0

    world = world.restarted()
    await world.run_pass(after_s=5)
    assert await world.replicas() == 0
    assert KEY in world.reconciler.held.at_zero


async def test_the_condition_says_when_no_gateway_could_wake_it(world: World, manifest_of: Any) -> None:
    await world.create_service(manifest_of(autoscaling=SLEEPY))
    await world.run_pass()
    world.pods.held_requests = None
    await world.reconciler.held.read()
    await world.run_pass(after_s=6)

    scaling = await world.condition("ScalingActive")
    assert (scaling["status"], scaling["reason"]) == ("False", "NoGateway")
    assert "NoGateway" in await world.events()
    assert await world.replicas() == 0


async def test_a_service_that_is_set_to_zero_by_hand_is_not_woken(world: World, manifest_of: Any) -> None:
    await world.create_service(manifest_of(replicas=0))
    await world.run_pass()
    await reads(world, 5)
    await world.run_pass(after_s=1)

    assert await world.replicas() == 0
    ready = await world.condition("Ready")
    assert (ready["status"], ready["reason"]) == ("True", "NoReplicas")
    assert world.reconciler.held.at_zero == set()


async def test_a_service_that_is_deleted_is_no_longer_read_for(world: World, manifest_of: Any) -> None:
    await world.create_service(manifest_of(autoscaling=SLEEPY))
    await world.run_pass()
    assert KEY in world.reconciler.held.at_zero

    world.reconciler.forget(*KEY)

    assert world.reconciler.held.at_zero == set()
