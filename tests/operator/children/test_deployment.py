from __future__ import annotations

from typing import Any

import pytest

from llmservice_operator.children.deployment import expected_deployment, server_args
from llmservice_operator.models.source import Model
from llmservice_operator.sizing.sizing import Sized, size


def flags(args: list[str]) -> dict[str, str]:
    assert args[0] == "serve"
    return dict(zip(args[1::2], args[2::2], strict=True))


def pod_spec(service: Any, sized: Sized) -> dict[str, Any]:
    return expected_deployment(service, sized, 1, "img:1")["spec"]["template"]["spec"]  # type: ignore[no-any-return]


def test_the_sizing_becomes_the_servers_flags(service_of: Any, sized: Sized) -> None:
    assert flags(server_args(service_of(), sized)) == {
        "--model": "/srv/models/tiny",
        "--served-model-name": "tiny",
        "--port": "8000",
        "--metrics-port": "8001",
        "--default-lane": "interactive",
        "--dtype": "auto",
        "--max-model-len": "512",
        "--max-num-seqs": "8",
        "--max-num-batched-tokens": "2048",
        "--block-size": "16",
        "--kv-cache-dtype": "auto",
        "--drain-timeout": "60",
        "--kv-cache-memory": str(sized.plan.kv_pool_bytes),
        "--start-record": "/cache/start.json",
        "--threads": "1",
    }


def test_prefix_caching_is_on_unless_it_is_turned_off_and_swap_space_is_none_unless_given(
    service_of: Any, sized: Sized
) -> None:
    plain = server_args(service_of(), sized)
    assert not {"--no-prefix-caching", "--swap-space-gib"} & set(plain)
    engine = {"prefixCaching": False, "swapSpaceGiB": 1.5}
    assert set(server_args(service_of(engine=engine), sized)) - set(plain) == {
        "--no-prefix-caching",
        "--swap-space-gib",
        "1.5",
    }


def test_on_a_card_the_server_measures_its_own_pool(service_of: Any, model: Model) -> None:
    service = service_of(resources={"gpu": {"product": "l4"}}, engine={"gpuMemoryUtilization": 0.8})
    answer = size(service.spec, model)
    assert isinstance(answer, Sized)

    args = flags(server_args(service, answer))

    assert args["--gpu-memory-utilization"] == "0.8"
    assert not {"--kv-cache-memory", "--threads"} & set(args)
    assert pod_spec(service, answer)["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "1"}


def test_grace_is_longer_than_prestop_and_drain_together(service_of: Any, sized: Sized) -> None:
    spec = pod_spec(service_of(drainTimeout="2m"), sized)

    pause_s = spec["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert spec["terminationGracePeriodSeconds"] > pause_s + 120


def test_the_selector_never_changes_while_the_template_may(service_of: Any, sized: Sized) -> None:
    plain = expected_deployment(service_of(), sized, 1, "img:1")["spec"]
    other = expected_deployment(
        service_of(model={"uri": "file:///tiny", "servedName": "x"}, podTemplate={"labels": {"team": "a"}}),
        sized,
        1,
        "img:2",
    )["spec"]

    assert plain["selector"] == other["selector"]
    assert plain["template"] != other["template"]
    assert plain["selector"]["matchLabels"].items() <= other["template"]["metadata"]["labels"].items()


def test_the_users_labels_never_replace_the_operators(service_of: Any, sized: Sized) -> None:
    service = service_of(
        podTemplate={
            "labels": {"app.kubernetes.io/instance": "other", "team": "a"},
            "annotations": {"serving.llmservice.io/served-name": "other", "note": "b"},
        }
    )

    metadata = expected_deployment(service, sized, 1, "img:1")["spec"]["template"]["metadata"]

    assert metadata["labels"]["app.kubernetes.io/instance"] == "tiny"
    assert metadata["labels"]["team"] == "a"
    assert len(metadata["annotations"].pop("serving.llmservice.io/template")) == 10
    assert metadata["annotations"] == {
        "serving.llmservice.io/served-name": "tiny",
        "serving.llmservice.io/model": "file:///tiny",
        "note": "b",
    }


def test_the_users_environment_wins_over_the_operators(service_of: Any, sized: Sized) -> None:
    env = [{"name": "A", "value": "b"}, {"name": "HOME", "value": "/elsewhere"}]
    service = service_of(podTemplate={"env": env, "imagePullSecrets": [{"name": "pull"}]})

    spec = pod_spec(service, sized)

    assert spec["imagePullSecrets"] == [{"name": "pull"}]
    given = spec["containers"][0]["env"]
    assert len({variable["name"] for variable in given}) == len(given), "a name twice is refused by server-side apply"
    assert all(variable in given for variable in env)


def test_what_a_pod_may_write_to_has_a_size(service_of: Any, sized: Sized) -> None:
    spec = pod_spec(service_of(), sized)

    volumes = {volume["name"]: volume["emptyDir"] for volume in spec["volumes"] if "emptyDir" in volume}
    assert volumes.keys() == {"tmp", "cache", "shm"}
    assert all(volume["sizeLimit"] for volume in volumes.values())
    assert volumes["shm"]["medium"] == "Memory"
    mounts = {mount["mountPath"]: mount["name"] for mount in spec["containers"][0]["volumeMounts"]}
    assert mounts == {"/tmp": "tmp", "/cache": "cache", "/dev/shm": "shm", "/srv/models/tiny": "models"}


def test_what_the_pod_template_adds_reaches_the_pods(service_of: Any, sized: Sized) -> None:
    secret = {"name": "adapters", "secret": {"secretName": "adapters"}}
    sidecar = {"name": "log-shipper", "image": "shipper:1"}
    template = {
        "image": "mirror.example/server:1",
        "extraArgs": ["--batch-share=0.2"],
        "envFrom": [{"configMapRef": {"name": "site"}}],
        "volumes": [secret],
        "volumeMounts": [{"name": "adapters", "mountPath": "/adapters", "readOnly": True}],
        "sidecars": [sidecar],
        "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}],
    }

    spec = pod_spec(service_of(podTemplate=template), sized)

    server, other = spec["containers"]
    assert other == sidecar
    assert (server["image"], server["args"][-1]) == ("mirror.example/server:1", "--batch-share=0.2")
    assert server["envFrom"] == template["envFrom"]
    assert server["volumeMounts"][-1] == {"name": "adapters", "mountPath": "/adapters", "readOnly": True}
    assert spec["volumes"][-1] == secret
    assert spec["resourceClaims"] == template["resourceClaims"]
    assert server["resources"]["claims"] == [{"name": "gpu"}]


def test_cards_are_requested_and_limited_alike_and_bring_shared_memory(service_of: Any, model: Model) -> None:
    service = service_of(resources={"gpu": {"product": "l4"}}, engine={})
    answer = size(service.spec, model)
    assert isinstance(answer, Sized)

    spec = pod_spec(service, answer)

    resources = spec["containers"][0]["resources"]
    assert resources["requests"]["nvidia.com/gpu"] == resources["limits"]["nvidia.com/gpu"] == "1"
    (shm,) = [volume for volume in spec["volumes"] if volume["name"] == "shm"]
    assert shm["emptyDir"]["sizeLimit"] == "1Gi"


def test_a_load_that_hangs_is_ended_and_a_busy_server_is_not(service_of: Any, sized: Sized) -> None:
    deployment = expected_deployment(service_of(), sized, 1, "img:1")
    server = deployment["spec"]["template"]["spec"]["containers"][0]

    startup, liveness = server["startupProbe"], server["livenessProbe"]
    assert startup["httpGet"]["path"] == "/ready"
    assert startup["periodSeconds"] * startup["failureThreshold"] == 600
    assert liveness["httpGet"]["path"] == "/health"
    assert deployment["spec"]["progressDeadlineSeconds"] > 600


@pytest.mark.parametrize(("cpu", "limit", "threads"), [("500m", None, "1"), ("1500m", None, "2"), ("1", "4", "4")])
def test_threads_follow_the_cores(cpu: str, limit: str | None, threads: str, service_of: Any, sized: Sized) -> None:
    limits = {"limits": {"cpu": limit}} if limit else {}
    service = service_of(resources={"gpu": {"count": 0}, "requests": {"cpu": cpu}, **limits})

    assert flags(server_args(service, sized))["--threads"] == threads
