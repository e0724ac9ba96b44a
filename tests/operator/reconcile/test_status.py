"""The status that passes write."""

from __future__ import annotations

from typing import Any

from harness.world.one_service import SERVICES, World, busy_service


async def test_measured_blocks_are_shown_beside_the_prediction(world: World, manifest_of: Any) -> None:
    await world.create_service(manifest_of())
    await world.run_pass()
    await world.start_pod("tiny-1", "127.0.0.1", (0, 0))

    await world.run_pass(after_s=5)

    assert (await world.status())["sizing"]["measured"]["blocks"] == 1000
    assert (await world.condition("Ready"))["status"] == "True"


SLOW = {"kind": "decode", "sequences": 1, "steps": 500, "seconds": 500.0}  # a second each
SUMS = {"num_seqs": 500, "context_tokens": 50_000, "prompt_tokens": 0, "prompt_chunks": 0, "attention_pairs": 0}


async def test_predictions_that_are_off_are_shown_and_counted_and_replace_no_pod(
    world: World, manifest_of: Any
) -> None:
    await world.create_service(manifest_of(resources={"gpu": {"product": "l4"}}, engine={"maxModelLen": 512}))
    await world.run_pass()
    before = await world.deployment()
    world.pods.sizing = {"steps": [SLOW | SUMS]}
    await world.start_pod("tiny-1", "127.0.0.1", (0, 0))

    await world.run_pass(after_s=5)
    await world.run_pass(after_s=5)

    sizing, after = (await world.status())["sizing"], await world.deployment()
    found = {each["quantity"]: each for each in sizing["predictions"]}
    assert found["itl"]["measured"] == 1.0
    assert found["itl"]["errorPercent"] < -95
    assert found["blocks"]["measured"] == 1000
    assert found["blocks"]["errorPercent"] > 100
    assert sizing["maxNumSeqsMeasured"] < sizing["maxNumSeqs"]
    exposed = world.reconciler.metrics.exposition().decode()
    assert 'prediction_error_ratio{name="tiny",namespace="team-a",quantity="itl"} -0.9' in exposed
    assert before is not None
    assert after is not None
    assert after["spec"]["template"] == before["spec"]["template"]


async def test_a_pass_over_a_deleted_service_returns_false(world: World) -> None:
    assert not await world.run_pass()


async def test_the_status_shows_what_is_scaled_on_with_thresholds_and_promql(world: World, manifest_of: Any) -> None:
    await busy_service(world, manifest_of, (4, 0))

    await world.run_pass(after_s=20)

    signals = {signal["name"]: signal for signal in (await world.status())["autoscaling"]["signals"]}
    assert (signals["utilization"]["value"], signals["utilization"]["target"]) == (0.5, 0.8)
    assert signals["ttftP99"]["target"] == 2
    assert 'namespace="team-a"' in signals["queue"]["query"]


async def test_live_traffic_writes_no_status_in_every_pass(world: World, manifest_of: Any) -> None:
    await busy_service(world, manifest_of, (4, 0))
    await world.run_pass(after_s=20)
    versions = set()
    for running in (1, 5, 2, 4, 3, 6):
        world.pods.in_flight["127.0.0.1"] = (running, 0)
        await world.run_pass(after_s=2)
        versions.add((await world.service())["metadata"]["resourceVersion"])

    assert len(versions) == 1


async def test_an_edit_keeps_ready_until_kubernetes_had_time_to_observe_it(world: World, manifest_of: Any) -> None:
    await world.create_service(manifest_of())
    await world.run_pass()
    await world.start_pod("tiny-1", "127.0.0.1", (0, 0))
    await world.run_pass(after_s=5)
    await world.kube.request("PATCH", f"{SERVICES}/tiny", body={"spec": {"rollout": {"maxSurge": 3}}})

    await world.run_pass(after_s=1)
    ready = await world.condition("Ready")
    assert (ready["status"], ready["observedGeneration"]) == ("True", 1)
    assert (await world.status())["observedGeneration"] == 2

    await world.run_pass(after_s=11)
    ready = await world.condition("Ready")
    assert (ready["status"], ready["reason"], ready["observedGeneration"]) == ("False", "Updating", 2)


async def test_slo_feasible_is_about_the_present_targets(world: World, manifest_of: Any) -> None:
    await world.create_service(manifest_of(slo={}))
    await world.run_pass()
    assert (await world.condition("SLOFeasible"))["reason"] == "NoTTFTTarget"

    await world.kube.request("PATCH", f"{SERVICES}/tiny", body={"spec": {"slo": {"ttftP99": "2s"}}})
    await world.run_pass(after_s=1)

    feasible = await world.condition("SLOFeasible")
    assert (feasible["status"], feasible["reason"]) == ("Unknown", "NoTraffic")


async def test_a_service_with_pods_of_an_earlier_spec_is_not_ready(world: World, manifest_of: Any) -> None:
    await world.create_service(manifest_of())
    await world.run_pass()
    await world.start_pod("tiny-1", "127.0.0.1", (0, 0))
    await world.run_pass(after_s=5)
    assert (await world.condition("Ready"))["status"] == "True"

    await world.kube.request("PATCH", f"{SERVICES}/tiny", body={"spec": {"engine": {"maxNumSeqs": 3}}})
    await world.run_pass(after_s=1)

    ready = await world.condition("Ready")
    assert (ready["status"], ready["reason"], ready["observedGeneration"]) == ("False", "RollingOut", 2)
    assert ready["message"] == "0 of 1 replicas serve the present spec, 1 an earlier one"
    assert (await world.condition("Stalled"))["status"] == "False"


async def test_a_spec_of_an_older_crd_is_reported_as_a_condition(world: World, manifest_of: Any) -> None:
    await world.create_service(manifest_of())
    await world.run_pass()
    before = await world.deployment()
    stored = await world.service()
    stored["spec"]["drainTimeout"] = "soon"
    stored["metadata"]["resourceVersion"] = str(int(stored["metadata"]["resourceVersion"]) + 1)
    world.reconciler.cache.put("LLMService", stored)

    assert await world.reconciler.run_pass("team-a", "tiny")

    ready = await world.condition("Ready")
    assert (ready["status"], ready["reason"]) == ("False", "InvalidSpec")
    assert "spec.drainTimeout: String should match pattern" in ready["message"]
    assert await world.deployment() == before
    assert (await world.status())["sizing"]["maxNumSeqs"] == 8
    exposed = world.reconciler.metrics.exposition().decode()
    assert 'condition{name="tiny",namespace="team-a",type="Ready"} 0.0' in exposed
    assert 'sizing_problem{name="tiny",namespace="team-a",reason="InvalidSpec"} 1.0' in exposed


async def test_a_condition_that_ended_is_no_metric_any_more(world: World, manifest_of: Any) -> None:
    await world.create_service(manifest_of(adapters=[{"name": "poet", "uri": "hf://org/poet"}]))
    await world.run_pass()
    series = 'condition{name="tiny",namespace="team-a",type="AdaptersReady"}'
    assert series in world.reconciler.metrics.exposition().decode()

    await world.kube.request("PATCH", f"{SERVICES}/tiny", body={"spec": {"adapters": None}})
    await world.run_pass(after_s=1)

    assert series not in world.reconciler.metrics.exposition().decode()


async def test_a_deleted_service_leaves_no_state(world: World, manifest_of: Any) -> None:
    await world.create_service(manifest_of())
    await world.run_pass()
    await world.start_pod("tiny-1", "127.0.0.1", (0, 0))
    await world.run_pass(after_s=5)
    reconciler = world.reconciler
    assert b'name="tiny"' in reconciler.metrics.exposition()

    await world.kube.request("DELETE", f"{SERVICES}/tiny")
    assert not await world.run_pass(after_s=5)

    assert len(reconciler.applier) == 0
    assert reconciler._memories == {}
    assert b'name="tiny"' not in reconciler.metrics.exposition()
    assert reconciler.cache.services() == []
