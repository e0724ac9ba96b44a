"""How passes scale a service."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from harness.world.one_service import APPS, AUTOSCALING, NS, SERVICES, World, busy_service
from llmservice_operator.api.labels import DELETION_COST
from llmservice_operator.cluster.kube_client import APPLY, KubeError
from llmservice_operator.signals.sources import PodSignals, Signals


async def test_load_adds_replicas_and_idle_ones_are_removed_after_the_window(world: World, manifest_of: Any) -> None:
    await world.create_service(manifest_of(autoscaling=AUTOSCALING))
    await world.run_pass()
    await world.start_pod("tiny-1", "127.0.0.1", (8, 18))

    await world.run_pass(after_s=5)
    assert await world.replicas() == 3
    decision = (await world.status())["autoscaling"]["decisions"][0]
    assert decision["replicas"] == 3
    assert any("18 waiting" in reason for reason in decision["reasons"])
    assert "ScaledUp" in await world.events()

    for name, ip in (("tiny-2", "127.0.0.2"), ("tiny-3", "127.0.0.3")):
        await world.start_pod(name, ip, (1, 0))
    world.pods.in_flight["127.0.0.1"] = (0, 0)
    await world.run_pass(after_s=5)
    assert await world.replicas() == 3
    await world.run_pass(after_s=61)

    assert await world.replicas() == 1
    costs = {
        pod["metadata"]["name"]: pod["metadata"]
        .get("annotations", {})
        .get("controller.kubernetes.io/pod-deletion-cost")
        for pod in (await world.kube.list_all(f"{NS}/pods"))[0]
    }
    assert costs == {"tiny-1": "0", "tiny-2": "1", "tiny-3": "1"}


async def test_a_deployment_that_someone_deleted_is_no_scaling_while_the_spec_does_not_fit(
    world: World, manifest_of: Any
) -> None:
    await world.create_service(manifest_of(replicas=2))
    await world.run_pass()
    await world.kube.request("PATCH", f"{SERVICES}/tiny", body={"spec": {"engine": {"maxModelLen": 9_000_000}}})
    await world.kube.request("DELETE", f"{APPS}/deployments/tiny")

    await world.run_pass()

    assert (await world.condition("SizingValid"))["status"] == "False"
    assert "ScaledDown" not in await world.events()


async def test_replicas_are_held_while_pods_do_not_answer(world: World, manifest_of: Any) -> None:
    await world.create_service(manifest_of(autoscaling=AUTOSCALING))
    await world.run_pass()
    await world.start_pod("tiny-1", "127.0.0.1", (8, 18))
    await world.run_pass(after_s=5)
    world.pods.in_flight.clear()

    for _ in range(5):
        await world.run_pass(after_s=60)

    assert await world.replicas() == 3
    condition = await world.condition("ScalingActive")
    assert (condition["status"], condition["reason"]) == ("False", "NoMetrics")


async def test_prometheus_alone_does_not_fall_back_to_the_pods(world: World, manifest_of: Any) -> None:
    autoscaling = {**AUTOSCALING, "metrics": {"source": "prometheus"}}
    await world.create_service(manifest_of(autoscaling=autoscaling))
    await world.run_pass()
    await world.start_pod("tiny-1", "127.0.0.1", (8, 18))

    await world.run_pass(after_s=5)

    assert await world.replicas() == 1
    assert (await world.condition("ScalingActive"))["reason"] == "NoMetrics"


async def test_prometheus_alone_without_a_url_of_one_says_what_to_set(world: World, manifest_of: Any) -> None:
    await world.create_service(manifest_of(autoscaling={**AUTOSCALING, "metrics": {"source": "prometheus"}}))
    await world.run_pass()
    await world.start_pod("tiny-1", "127.0.0.1", (8, 18))

    async with aiohttp.ClientSession() as session:
        world.reconciler.signals = Signals(PodSignals(session), None)
        await world.run_pass(after_s=5)

    assert await world.replicas() == 1
    condition = await world.condition("ScalingActive")
    assert condition["reason"] == "NoMetrics"
    assert "set the chart's operator.prometheusUrl" in condition["message"]


async def test_lowering_max_replicas_removes_the_least_busy_pods(world: World, manifest_of: Any) -> None:
    await busy_service(world, manifest_of, (8, 18))
    await world.run_pass(after_s=5)
    assert await world.replicas() == 3
    await world.start_pod("tiny-2", "127.0.0.2", (5, 0))
    await world.kube.request("PATCH", f"{SERVICES}/tiny", body={"spec": {"autoscaling": {"maxReplicas": 1}}})

    await world.run_pass(after_s=1)

    assert await world.replicas() == 1
    pods = {pod["metadata"]["name"]: pod for pod in await world.kube.list_pods("team-a", "")}
    costs = {name: pod["metadata"]["annotations"][DELETION_COST] for name, pod in pods.items()}
    assert costs == {"tiny-1": "26", "tiny-2": "5"}
    decision = (await world.status())["autoscaling"]["decisions"][0]
    assert "bounds: 1 to 1 -> 1" in decision["reasons"]


@pytest.mark.parametrize("jump_s", [-3600.0, -110.0, 110.0, 3600.0])
async def test_a_clock_that_is_set_does_not_scale(jump_s: float, world: World, manifest_of: Any) -> None:
    await busy_service(world, manifest_of, (8, 18))
    await world.run_pass(after_s=5)
    world.pods.in_flight["127.0.0.1"] = (0, 0)
    await world.run_pass(after_s=5)
    assert await world.replicas() == 3

    world.set_by_s = jump_s
    await world.run_pass(after_s=5)
    assert await world.replicas() == 3
    await world.run_pass(after_s=45)
    assert await world.replicas() == 3

    await world.run_pass(after_s=10)
    assert await world.replicas() == 1


async def test_another_autoscaler_sets_the_scale_without_the_built_in_one(world: World, manifest_of: Any) -> None:
    """What an HPA and KEDA do: read the scale, write it back whole."""
    await world.create_service(manifest_of(replicas=1))
    await world.run_pass()
    scale = await world.kube.request("GET", f"{SERVICES}/tiny/scale")
    assert scale["status"]["selector"] == "app.kubernetes.io/name=llmservice,app.kubernetes.io/instance=tiny"
    wanted = {**scale, "spec": {"replicas": 3}}

    await world.kube.request("PUT", f"{SERVICES}/tiny/scale", body=wanted, content_type="application/json")
    await world.run_pass(after_s=1)

    assert await world.replicas() == 3


async def test_a_service_that_was_scaled_is_given_to_the_built_in_autoscaler(world: World, manifest_of: Any) -> None:
    """By a GitOps tool's manifest without replicas: the number of another manager stays, and is ignored."""
    await world.create_service(manifest_of())
    await world.kube.request("PATCH", f"{SERVICES}/tiny/scale", body={"spec": {"replicas": 3}})
    await world.run_pass()
    manifest = manifest_of(autoscaling=AUTOSCALING)
    manifest["metadata"] = {"name": "tiny"}
    query = {"fieldManager": "argocd-controller", "force": "true"}
    await world.kube.request("PATCH", f"{SERVICES}/tiny", body=manifest, content_type=APPLY, query=query)
    for number in range(3):
        await world.start_pod(f"tiny-{number}", f"127.0.0.{number + 1}", (0, 0))

    for _ in range(30):
        await world.run_pass(after_s=5)

    assert (await world.service())["spec"]["replicas"] == 3
    assert await world.replicas() == 1


async def test_a_written_scale_is_refused_with_the_built_in_autoscaler(world: World, manifest_of: Any) -> None:
    await world.create_service(manifest_of(autoscaling=AUTOSCALING))

    with pytest.raises(KubeError, match="replicas is ignored where autoscaling is set"):
        await world.kube.request("PATCH", f"{SERVICES}/tiny/scale", body={"spec": {"replicas": 3}})
