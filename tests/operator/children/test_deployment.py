from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from pydantic import BaseModel

from llmservice_operator.api.engine_spec import Engine
from llmservice_operator.api.pod_spec import MANAGED_FLAGS, MANAGED_MOUNTS
from llmservice_operator.api.resource import LLMService
from llmservice_operator.api.spec import LLMServiceSpec
from llmservice_operator.children.deployment import expected_deployment, server_args, startup_budget
from llmservice_operator.children.gateway_keys import gateway_key_args
from llmservice_operator.locations import Model, ModelLocation
from llmservice_operator.sizing import Sized, size
from llmservice_planner.sizing.gpu import find_gpu


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


def test_extra_args_can_hold_no_flag_that_the_operator_sets(service_of: Any, sized: Sized, model: Model) -> None:
    on_cpu = service_of(
        model={
            "uri": "hf://org/tiny",
            "quantization": "int8",
            "cache": {"claimName": "cache"},
            "configOverrides": {"rope_scaling": None},
        },
        engine={"prefixCaching": False, "swapSpaceGiB": 1, "maxLoras": 1, "loraExperts": True},
        lanes={"batchOrder": "sjf"},
    )
    on_gpu = service_of(resources={"gpu": {"product": "l4"}})
    sized_on_gpu = size(on_gpu.spec, model)
    assert isinstance(sized_on_gpu, Sized)
    self_sized = replace(sized, model=replace(model, figures_from="pod"))
    unbounded = service_of(engine={"maxNumSeqs": "auto", "sizing": {"expectedTokens": 100}})

    ways = [(on_cpu, sized), (on_gpu, sized_on_gpu), (unbounded, self_sized)]
    used = {arg for service, answer in ways for arg in server_args(service, answer) if arg.startswith("--")}
    used |= {arg for arg in gateway_key_args(on_cpu) if arg.startswith("--")}

    assert used == set(MANAGED_FLAGS)


def test_volume_mounts_can_have_no_path_that_the_operator_mounts(service_of: Any, sized: Sized, model: Model) -> None:
    service = service_of(model={"uri": "hf://org/tiny", "cache": {"claimName": "cache"}}, engine={"maxLoras": 1})
    found = replace(sized, model=replace(model, location=LOCATIONS["hf"]))

    spec = expected_deployment(service, found, 1, "img:1", signed=True)["spec"]["template"]["spec"]

    assert {mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]} == set(MANAGED_MOUNTS)


def test_prefix_caching_is_on_and_swap_space_zero_by_default(service_of: Any, sized: Sized) -> None:
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


def test_writable_volumes_have_a_size_limit(service_of: Any, sized: Sized) -> None:
    spec = pod_spec(service_of(), sized)

    volumes = {volume["name"]: volume["emptyDir"] for volume in spec["volumes"] if "emptyDir" in volume}
    assert volumes.keys() == {"tmp", "cache", "shm"}
    assert all(volume["sizeLimit"] for volume in volumes.values())
    assert volumes["shm"]["medium"] == "Memory"
    mounts = {mount["mountPath"]: mount["name"] for mount in spec["containers"][0]["volumeMounts"]}
    assert mounts == {"/tmp": "tmp", "/cache": "cache", "/dev/shm": "shm", "/srv/models/tiny": "models"}


def test_the_pod_template_of_the_spec_reaches_the_pods(service_of: Any, sized: Sized) -> None:
    secret = {"name": "certificates", "secret": {"secretName": "certificates"}}
    sidecar = {"name": "log-shipper", "image": "shipper:1"}
    template = {
        "image": "mirror.example/server:1",
        "extraArgs": ["--batch-share=0.2"],
        "envFrom": [{"configMapRef": {"name": "site"}}],
        "volumes": [secret],
        "volumeMounts": [{"name": "certificates", "mountPath": "/certificates", "readOnly": True}],
        "sidecars": [sidecar],
        "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}],
    }

    spec = pod_spec(service_of(podTemplate=template), sized)

    server, other = spec["containers"]
    assert other == sidecar
    assert (server["image"], server["args"][-1]) == ("mirror.example/server:1", "--batch-share=0.2")
    assert server["envFrom"] == template["envFrom"]
    assert server["volumeMounts"][-1] == template["volumeMounts"][0]
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


@pytest.mark.parametrize(("name", "requested"), [("nvidia.com/mig-3g.40gb", {"nvidia.com/mig-3g.40gb": "1"}), ("", {})])
def test_gpus_are_requested_by_the_name_that_the_spec_gives(
    name: str, requested: dict[str, str], service_of: Any, model: Model
) -> None:
    service = service_of(
        resources={"gpu": {"product": "h100-80gb", "memoryGiB": 40, "resourceName": name}},
        engine={},
        podTemplate={"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}]},
    )
    answer = size(service.spec, model)
    assert isinstance(answer, Sized)

    resources = pod_spec(service, answer)["containers"][0]["resources"]

    assert resources.get("limits", {}) == requested
    assert {one: number for one, number in resources["requests"].items() if "/" in one} == requested


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


BASE: dict[str, Any] = {
    "model": {"uri": "file:///tiny"},
    "resources": {"gpu": {"product": "l40s"}},
    "engine": {"maxModelLen": 8192, "maxNumSeqs": "auto"},
}
ENGINE_CHANGES: dict[str, dict[str, Any]] = {
    "maxModelLen": {"maxModelLen": 4096},
    "maxNumSeqs": {"maxNumSeqs": 3},
    "sizing.expectedTokens": {"sizing": {"expectedTokens": 2000}},
    "gpuMemoryUtilization": {"gpuMemoryUtilization": 0.8},
    "kvCacheDtype": {"kvCacheDtype": "float16"},
    "blockSize": {"blockSize": 32},
    "maxNumBatchedTokens": {"maxNumBatchedTokens": 512},
    "prefixCaching": {"prefixCaching": False},
    "swapSpaceGiB": {"swapSpaceGiB": 1},
    "maxLoras": {"maxLoras": 2},
    "maxLoraRank": {"maxLoras": 1, "maxLoraRank": 8},
    "loraExperts": {"maxLoras": 1, "loraExperts": True},
}
POET = {"name": "poet", "uri": "hf://org/poet"}
ROLLS: list[dict[str, Any]] = [
    {"model": {"uri": "file:///tiny", "servedName": "other"}},
    {"model": {"uri": "file:///tiny", "dtype": "float16"}},
    {"model": {"uri": "file:///tiny", "configOverrides": {"rope_scaling": {"factor": 2.0}}}},
    {"resources": {"gpu": {"product": "a100-40gb"}}},
    {"resources": {"gpu": {"product": "l40s"}, "requests": {"cpu": "2"}}},
    {"drainTimeout": "2m"},
    {"lanes": {"default": "batch"}},
    {"lanes": {"batchOrder": "sjf"}},
    {"workload": "batch"},
    {"scheduling": {"priorityClassName": "high"}},
    {"podTemplate": {"labels": {"team": "a"}}},
    {"adapters": [POET]},  # the first: slots and volumes
]
STAYS: list[dict[str, Any]] = [
    {"replicas": 5},
    {"autoscaling": {"maxReplicas": 4}},
    {"slo": {"ttftP99": "2s"}},
    {"rollout": {"maxSurge": 0, "maxUnavailable": 1}},
    {"monitoring": {"podMonitor": True}},
    {"networkPolicy": {"enabled": False}},
    {"networkPolicy": {"to": [{}]}},
    {"access": "direct"},  # while the gateway has no keys
    {"gateway": {"inferencePool": True}},
    {"routing": {"strategy": "leastLoad"}},
]


@pytest.fixture
def llama(model: Model) -> Model:
    """Of a size that an L40S holds with little to spare, so that every figure matters; one layer has experts."""
    shape = replace(
        model.shape,
        layers=32,
        hidden_size=4096,
        intermediate_size=14336,
        heads=32,
        kv_heads=8,
        head_dim=128,
        vocab_size=128256,
        max_position_embeddings=8192,
        dtype="bfloat16",
        num_experts=2,
        experts_per_token=1,
        moe_intermediate_size=14336,
        dense_layers=31,
    )
    return replace(model, shape=shape)


def template(model: Model, spec: dict[str, Any], **rest: Any) -> Any:
    metadata = {"name": "tiny", "namespace": "team-a", "uid": "u", **rest.pop("metadata", {})}
    service = LLMService.model_validate({"metadata": metadata, "spec": {**BASE, **spec}, **rest})
    answer = size(service.spec, model)
    assert isinstance(answer, Sized)
    return expected_deployment(service, answer, 1, "img:1")["spec"]["template"]


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every leaf of a model by its path in YAML."""
    for name, field in model.model_fields.items():
        path = prefix + (field.alias or name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from fields(field.annotation, f"{path}.")
        else:
            yield path


def test_every_field_of_the_engine_is_in_the_table() -> None:
    assert set(fields(Engine)) == ENGINE_CHANGES.keys()


@pytest.mark.parametrize("field", ENGINE_CHANGES)
def test_a_change_of_any_engine_field_replaces_the_pods(field: str, llama: Model) -> None:
    before = {"engine": dict(BASE["engine"])}
    after = {"engine": {**BASE["engine"], **ENGINE_CHANGES[field]}}
    assert template(llama, before) != template(llama, after)


@pytest.mark.parametrize("change", ROLLS, ids=str)
def test_changes_of_the_pod_template_replace_pods(change: dict[str, Any], llama: Model) -> None:
    assert template(llama, change) != template(llama, {})


@pytest.mark.parametrize("change", STAYS, ids=str)
def test_other_changes_do_not_replace_pods(change: dict[str, Any], llama: Model) -> None:
    assert template(llama, change) == template(llama, {})


def test_with_slots_a_change_of_the_adapters_replaces_no_pod(llama: Model) -> None:
    slots = {**BASE["engine"], "maxLoras": 2}
    assert template(llama, {"engine": slots, "adapters": [POET]}) == template(llama, {"engine": slots})
    changed = [{**POET, "uri": "hf://org/poet@v2"}, {"name": "bard", "uri": "s3://models/bard", "pinned": True}]
    assert template(llama, {"adapters": changed}) == template(llama, {"adapters": [POET]})


def test_the_tables_speak_of_every_part_of_the_spec() -> None:
    covered = {name for change in ROLLS + STAYS for name in change} | {"engine"}
    assert {field.alias or name for name, field in LLMServiceSpec.model_fields.items()} == covered


def test_labels_annotations_generation_and_status_of_the_service_leave_the_pods(llama: Model) -> None:
    metadata = {"labels": {"a": "b"}, "annotations": {"c": "d"}, "generation": 9, "resourceVersion": "7"}
    status = {"observedGeneration": 8, "replicas": 3, "readyReplicas": 2, "url": "http://x"}

    assert template(llama, {}, metadata=metadata, status=status) == template(llama, {})


def test_the_template_is_deterministic_and_does_not_modify_the_spec(llama: Model) -> None:
    before = copy.deepcopy(BASE)

    assert template(llama, {}) == template(llama, {})
    assert before == BASE


GIB = 2**30


@pytest.mark.parametrize(
    ("weights_gib", "downloads", "load_s", "progress_s"),
    [
        (0.01, False, 600, 1500),
        (14.96, False, 600, 1500),
        (131.4, False, 1651, 2551),
        (131.4, True, 1651, 13839),
    ],
)
def test_patience_grows_with_the_weights(weights_gib: float, downloads: bool, load_s: int, progress_s: int) -> None:
    budget = startup_budget(weights_gib * GIB, downloads=downloads)

    assert (budget.load_s, budget.progress_s) == (load_s, progress_s)


@pytest.mark.parametrize("weights_gib", [0, 1, 100, 1000])
@pytest.mark.parametrize("downloads", [False, True])
def test_a_rollout_is_never_called_stuck_while_a_pod_may_still_load(weights_gib: int, downloads: bool) -> None:
    budget = startup_budget(weights_gib * GIB, downloads=downloads)

    assert budget.progress_s > budget.load_s


VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image", "persistentVolumeClaim", "projected", "secret",
}  # fmt: skip
LOCATIONS = {
    "pvc": ModelLocation("pvc", "/models/llama", claim="weights"),
    "hf": ModelLocation("hf", "/models/name", fetch_uri="hf://org/name@v1"),
}


def violations(spec: dict[str, Any]) -> Iterator[str]:
    """What the `restricted` level objects to in a pod's spec."""
    for name in ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"):
        if spec.get(name):
            yield name
    for volume in spec.get("volumes", []):
        if kinds := volume.keys() - {"name"} - VOLUMES:
            yield f"volume {volume['name']} is a {kinds}"
    pod = spec.get("securityContext", {})
    for container in [*spec["containers"], *spec.get("initContainers", [])]:
        own, name = container.get("securityContext", {}), container["name"]
        context = {**pod, **own}
        if context.get("privileged") or context.get("procMount", "Default") != "Default":
            yield f"{name}: privileged"
        if own.get("allowPrivilegeEscalation") is not False:
            yield f"{name}: allowPrivilegeEscalation"
        if own.get("capabilities", {}).get("drop") != ["ALL"] or own["capabilities"].get("add"):
            yield f"{name}: capabilities"
        if context.get("runAsNonRoot") is not True or context.get("runAsUser") == 0:
            yield f"{name}: runs as root"
        if context.get("seccompProfile", {}).get("type") not in {"RuntimeDefault", "Localhost"}:
            yield f"{name}: seccomp"
        if any("hostPort" in port for port in container.get("ports", [])):
            yield f"{name}: hostPort"


@pytest.mark.parametrize("location", LOCATIONS.values(), ids=LOCATIONS)
@pytest.mark.parametrize("gpu", [None, "l4"])
def test_pods_meet_the_restricted_standard(
    location: ModelLocation, gpu: str | None, service_of: Any, sized: Sized
) -> None:
    service = service_of(resources={"gpu": {"product": "l4"}} if gpu else {"gpu": {"count": 0}})
    found = replace(sized, model=replace(sized.model, location=location), device=find_gpu(gpu) if gpu else sized.device)

    spec = expected_deployment(service, found, 1, "img:1")["spec"]["template"]["spec"]

    assert list(violations(spec)) == []
    assert spec["automountServiceAccountToken"] is False
    for container in [*spec["containers"], *spec.get("initContainers", [])]:
        assert container["securityContext"]["readOnlyRootFilesystem"] is True


@pytest.mark.parametrize(
    ("change", "objection"),
    [
        ({"hostNetwork": True}, "hostNetwork"),
        ({"volumes": [{"name": "v", "hostPath": {"path": "/"}}]}, "volume v"),
        ({"securityContext": {}}, "server: seccomp"),
    ],
)
def test_the_check_above_would_notice(change: dict[str, Any], objection: str, service_of: Any, sized: Sized) -> None:
    spec = expected_deployment(service_of(), sized, 1, "img:1")["spec"]["template"]["spec"] | change

    assert any(objection in one for one in violations(spec))
