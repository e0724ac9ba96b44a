"""`maxNumSeqs` in passes over a service whose pods measure fewer blocks than were predicted."""

from __future__ import annotations

from typing import Any

from harness.world.one_service import NS, SERVICES, World


def _num_seqs(deployment: dict[str, Any] | None) -> int:
    assert deployment is not None
    args = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    return int(args[args.index("--max-num-seqs") + 1])


async def _measuring_service(world: World, manifest_of: Any) -> None:
    """Its pod measures 1,000 blocks, of many thousand that were predicted."""
    engine = {"maxModelLen": 512, "maxNumSeqs": "auto"}
    await world.create_service(manifest_of(resources={"gpu": {"product": "l4"}}, engine=engine))
    await world.run_pass()
    await world.start_pod("tiny-1", "127.0.0.1", (0, 0))
    await world.run_pass(after_s=5)


async def _edit(world: World, **spec: Any) -> None:
    await world.kube.request("PATCH", f"{SERVICES}/tiny", body={"spec": spec})


async def test_measured_blocks_correct_max_num_seqs_only_when_the_user_replaces_the_pods(
    world: World, manifest_of: Any
) -> None:
    await _measuring_service(world, manifest_of)
    first = await world.deployment()
    await _edit(world, slo={"ttftP99": "3s"})  # replaces no pod
    await world.run_pass(after_s=5)
    unchanged, sizing = await world.deployment(), (await world.status())["sizing"]
    assert first is not None
    assert unchanged is not None
    assert unchanged["spec"]["template"] == first["spec"]["template"]
    assert (sizing["maxNumSeqs"], "measured:" in sizing["explanation"]) == (_num_seqs(first), False)
    assert 0 < sizing["maxNumSeqsMeasured"] < sizing["maxNumSeqs"]

    await _edit(world, podTemplate={"image": "img:2"})
    await world.run_pass(after_s=5)
    second, after = await world.deployment(), (await world.status())["sizing"]
    assert _num_seqs(second) == sizing["maxNumSeqsMeasured"] == after["maxNumSeqs"]
    assert after["limitedBy"] == "kvMemory"
    assert "as pods measured 1,000 KV blocks" in after["explanation"]
    assert "measured" not in after  # the pods that measured are of the earlier template

    writes = len(world.writes)
    await world.run_pass(after_s=5)
    await world.restarted().run_pass(after_s=5)
    assert not [write for write in world.writes[writes:] if "deployments" in write]
    assert (await world.status())["sizing"]["maxNumSeqs"] == after["maxNumSeqs"]


async def test_after_a_corrected_rollout_pods_are_not_replaced_again(world: World, manifest_of: Any) -> None:
    await _measuring_service(world, manifest_of)
    await _edit(world, podTemplate={"image": "img:2"})
    await world.run_pass(after_s=5)
    corrected = await world.deployment()
    await world.kube.request("DELETE", f"{NS}/pods/tiny-1")
    await world.start_pod("tiny-2", "127.0.0.1", (0, 0))
    await world.run_pass(after_s=5)
    started = await world.deployment()
    assert corrected is not None
    assert started is not None
    assert started["spec"]["template"] == corrected["spec"]["template"]
    assert (await world.status())["sizing"]["maxNumSeqsMeasured"] == _num_seqs(corrected)
    await _edit(world, podTemplate={"image": "img:3"})
    await world.run_pass(after_s=5)
    assert _num_seqs(await world.deployment()) == _num_seqs(corrected)

    await _edit(world, engine={"gpuMemoryUtilization": 0.8})  # the blocks were measured at 0.9
    await world.run_pass(after_s=5)
    assert _num_seqs(await world.deployment()) > _num_seqs(corrected)


async def test_a_service_at_zero_is_corrected_with_what_its_last_pods_measured(world: World, manifest_of: Any) -> None:
    await _measuring_service(world, manifest_of)
    would_be = (await world.status())["sizing"]["maxNumSeqsMeasured"]
    await world.kube.request("DELETE", f"{NS}/pods/tiny-1")
    await world.run_pass(after_s=5)
    await _edit(world, podTemplate={"image": "img:2"})
    await world.run_pass(after_s=5)
    assert _num_seqs(await world.deployment()) == would_be
