"""Models that only a pod can read, and their status."""

from __future__ import annotations

from typing import Any

from harness.world.one_service import AUTOSCALING, NS, SERVICES, World

ON_A_VOLUME = {"model": {"uri": "pvc://weights/tiny"}, "engine": {"maxModelLen": 512}}
SIZING = {
    "max_num_seqs": 5,
    "max_model_len": 512,
    "block_size": 16,
    "num_blocks": 1000,
    "memory_bytes": {"weights": 1000000, "kv_cache": 16 * 1001 * 512, "activations": 1000, "total": 10**9},
    "shape": {
        "layers": 2, "heads": 4, "kvHeads": 2, "hiddenSize": 64, "intermediateSize": 128, "vocabSize": 512,
        "dtype": "float32",
    },
}  # fmt: skip


async def test_a_model_that_only_a_pod_can_read_is_sized_by_its_server(world: World, manifest_of: Any) -> None:
    await world.create_service(manifest_of(**ON_A_VOLUME))
    await world.run_pass()

    deployment = await world.deployment()
    assert deployment is not None
    args = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    assert "--max-num-seqs" not in args
    assert args[args.index("--memory-limit") + 1] == str(2 * 2**30)
    condition = await world.condition("SizingValid")
    assert (condition["status"], condition["reason"]) == ("Unknown", "AwaitingPod")
    assert "sizing" not in await world.status()


async def test_a_servers_report_is_shown_and_restarts_no_pod(world: World, manifest_of: Any) -> None:
    await world.create_service(manifest_of(**ON_A_VOLUME, autoscaling=AUTOSCALING))
    await world.run_pass()
    before = await world.deployment()
    world.pods.sizing = SIZING
    await world.start_pod("tiny-1", "127.0.0.1", load=(0, 0))

    await world.run_pass(after_s=5)
    await world.run_pass(after_s=5)

    after, status = await world.deployment(), await world.status()
    assert before is not None
    assert after is not None
    assert after["spec"]["template"] == before["spec"]["template"]
    assert status["model"]["figuresFrom"] == "pod"
    assert status["model"]["shape"]["kvHeads"] == 2
    assert (status["sizing"]["source"], status["sizing"]["maxNumSeqs"]) == ("pod", 5)
    assert status["sizing"]["measured"]["blocks"] == 1000
    condition = await world.condition("SizingValid")
    assert (condition["status"], condition["reason"]) == ("True", "SizedByServer")


async def test_a_restarted_operator_keeps_the_shape_and_the_pods(world: World, manifest_of: Any) -> None:
    await world.create_service(manifest_of(**ON_A_VOLUME))
    await world.run_pass()
    world.pods.sizing = SIZING
    await world.start_pod("tiny-1", "127.0.0.1", load=(0, 0))
    await world.run_pass(after_s=5)
    await world.run_pass(after_s=5)
    deployment, status = await world.deployment(), await world.status()
    assert deployment is not None

    world.restarted()
    await world.run_pass(after_s=5)

    assert await world.deployment() == deployment
    now = await world.status()
    assert {key: now[key] for key in ("model", "sizing", "conditions")} == {
        key: status[key] for key in ("model", "sizing", "conditions")
    }


async def test_overrides_that_remove_a_key_are_remembered_as_they_are(world: World, manifest_of: Any) -> None:
    """A null in an object of the status would be taken for a removal, and written again by every pass."""
    model = {"uri": "pvc://weights/tiny", "configOverrides": {"rope_scaling": None}}
    await world.create_service(manifest_of(model=model, engine={"maxModelLen": 512}))
    await world.run_pass()
    world.writes.clear()

    await world.run_pass(after_s=5)

    assert (await world.status())["model"]["configOverrides"] == '{"rope_scaling": null}'
    assert world.writes == []


async def test_a_servers_report_is_kept_after_its_end(world: World, manifest_of: Any) -> None:
    await world.create_service(manifest_of(**ON_A_VOLUME))
    await world.run_pass()
    world.pods.sizing = SIZING
    await world.start_pod("tiny-1", "127.0.0.1", load=(0, 0))
    await world.run_pass(after_s=5)
    before = await world.status()
    await world.kube.request("DELETE", f"{NS}/pods/tiny-1", body={"gracePeriodSeconds": 0})

    world.restarted()
    await world.run_pass(after_s=5)

    after = await world.status()
    assert after["model"] == before["model"]
    assert after["sizing"]["maxNumSeqs"] == before["sizing"]["maxNumSeqs"] == 5
    assert (await world.condition("SizingValid"))["reason"] == "SizedByServer"


async def test_figures_of_the_running_model_are_not_used_for_another(world: World, manifest_of: Any) -> None:
    await world.create_service(manifest_of(**ON_A_VOLUME))
    await world.run_pass()
    world.pods.sizing = SIZING
    await world.start_pod("tiny-1", "127.0.0.1", load=(0, 0))
    await world.run_pass(after_s=5)
    await world.kube.request("PATCH", f"{SERVICES}/tiny", body={"spec": {"model": {"uri": "pvc://weights/other"}}})

    await world.run_pass(after_s=5)
    await world.run_pass(after_s=5)

    model = (await world.status())["model"]
    assert model == {"uri": "pvc://weights/other", "figuresFrom": "pod"}
    assert (await world.condition("SizingValid"))["reason"] == "AwaitingPod"


async def set_fetch(world: World, state: dict[str, Any], *, ready: bool = False) -> None:
    """The init container's status, as the kubelet writes it."""
    fetch = {"name": "fetch", "image": "img:1", "imageID": "", "restartCount": 0, "state": state, "ready": ready}
    await world.kube.request("PATCH", f"{NS}/pods/tiny-1/status", body={"status": {"initContainerStatuses": [fetch]}})


async def fetching_service(world: World, manifest_of: Any) -> None:
    """One pod, whose model is on its way."""
    source = {"uri": "s3://bucket/tiny", "s3": {"endpoint": "http://minio:9000"}}
    await world.create_service(manifest_of(model=source))
    await world.run_pass()
    await world.start_pod("tiny-1", "127.0.0.1", None, ready=False)
    await set_fetch(world, {"running": {}})


async def test_a_download_is_shown_in_the_status_until_it_ends(world: World, manifest_of: Any) -> None:
    await fetching_service(world, manifest_of)
    world.pods.progress = {"phase": "downloading", "done_bytes": 3 * 2**30, "total_bytes": 4 * 2**30}

    await world.run_pass(after_s=5)

    condition = await world.condition("Ready")
    assert (condition["reason"], condition["message"]) == (
        "FetchingModel",
        "1 pod fetches s3://bucket/tiny: 75 % of 4.00 GiB",
    )
    assert (await world.status())["model"]["fetch"] == {"pods": 1, "percent": 75, "totalGiB": 4.0}
    version = (await world.service())["metadata"]["resourceVersion"]
    world.pods.progress["done_bytes"] += 2**20
    await world.run_pass(after_s=5)
    assert (await world.service())["metadata"]["resourceVersion"] == version

    await set_fetch(world, {"terminated": {"exitCode": 0}}, ready=True)
    await world.run_pass(after_s=5)
    assert "fetch" not in (await world.status())["model"]
    assert (await world.condition("Ready"))["reason"] == "Starting"


async def test_a_download_is_written_in_steps_of_five_percent_with_one_event(world: World, manifest_of: Any) -> None:
    await fetching_service(world, manifest_of)
    reported, versions = [], set()
    for percent in range(101):
        world.pods.progress = {"phase": "downloading", "done_bytes": percent * 2**20, "total_bytes": 100 * 2**20}
        await world.run_pass(after_s=1)
        reported.append((await world.status())["model"]["fetch"]["percent"])
        versions.add((await world.service())["metadata"]["resourceVersion"])

    assert reported == [percent - percent % 5 for percent in range(101)]
    assert len(versions) == 21
    assert (await world.events()).count("FetchingModel") == 1
