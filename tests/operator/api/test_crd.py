"""The generated CRD: current, structural, explained, and refusing what can't work."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.stores.model_hub import LLAMA_3_8B
from llmservice_local.api.registry import Registry, WriteOptions
from llmservice_local.errors import ApiError
from llmservice_operator.api.crd import FILE_NAME, crd, crd_yaml
from llmservice_operator.api.resource import LLMService
from llmservice_operator.cluster.kube_client import KubeClient
from llmservice_operator.crd_command import CRD_FOLDERS
from llmservice_operator.locations import Model, ModelLocation
from llmservice_operator.sizing import Sized, size
from llmservice_planner.capacity.plan import MOST_REPLICAS
from llmservice_planner.capacity.replica import UTILISATION
from llmservice_planner.command import main
from llmservice_planner.model.shape import ModelShape

ROOT = Path(__file__).parents[3]
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
POET = {"name": "poet", "uri": "hf://org/poet"}
SERVICES = "/apis/serving.llmservice.io/v1alpha1/namespaces/team-a/llmservices"
EXAMPLES = [
    pytest.param(document, id=path.stem)
    for path in sorted([*(ROOT / "examples").glob("*.yaml"), *(ROOT / "docs" / "examples").glob("*.yaml")])
    for document in yaml.safe_load_all(path.read_text())
    if document["kind"] == "LLMService"
]


def schema() -> dict[str, Any]:
    return crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]  # type: ignore[no-any-return]


def nodes(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema below `node`, with its path."""
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    if "items" in node:
        yield from nodes(node["items"], f"{path}[]")


def gpu(resource_name: str) -> dict[str, Any]:
    return {"resources": {"gpu": {"product": "h100-80gb", "resourceName": resource_name}}}


async def create(client: KubeClient, manifest: dict[str, Any]) -> dict[str, Any]:
    query = {"fieldValidation": "Strict"}
    return await client.request("POST", SERVICES, body=manifest, content_type="application/json", query=query)


@pytest.fixture(scope="module")
def registry() -> Registry:
    """What an API server has behind its HTTP; nothing is left of what it refuses."""
    registry = Registry()
    definitions = registry.kinds.find("apiextensions.k8s.io", "v1", "customresourcedefinitions")
    registry.create(definitions, "", crd(), WriteOptions())
    registry.create(registry.kinds.find("", "v1", "namespaces"), "", {"metadata": {"name": "team-a"}}, WriteOptions())
    return registry


def put(registry: Registry, manifest: dict[str, Any]) -> None:
    services = registry.kinds.find("serving.llmservice.io", "v1alpha1", "llmservices")
    registry.create(services, "team-a", manifest, WriteOptions(field_validation="Strict"))


@pytest.mark.parametrize("folder", CRD_FOLDERS, ids=str)
def test_the_committed_file_is_current(folder: Path) -> None:
    assert (ROOT / folder / FILE_NAME).read_text() == crd_yaml(), "run `make crds` and commit the result"


def test_every_field_of_spec_and_status_is_explained() -> None:
    unexplained = [
        path
        for path, node in nodes(schema())
        if path and not path.endswith("[]") and path != ".metadata" and not node.get("description")
    ]
    assert unexplained == []


def test_the_schema_is_structural_and_bounded() -> None:
    for path, node in nodes(schema()):
        assert not {"$ref", "anyOf", "oneOf", "const", "title", "$defs"} & set(node), path
        assert "type" in node or node.get("x-kubernetes-int-or-string"), path
        if node.get("type") == "array":
            assert "maxItems" in node, path
        if node.get("type") == "string" and path.startswith(".spec"):
            assert "maxLength" in node or "enum" in node, path


@pytest.mark.parametrize("example", EXAMPLES)
async def test_every_example_is_accepted(example: dict[str, Any], kube: KubeClient) -> None:
    created = await create(kube, example)

    assert LLMService.model_validate(created).spec.engine.block_size == 16


async def test_manifest_of_a_plan_is_accepted(kube: KubeClient, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))
    traffic = ["--rate", "20", "--prompt-tokens", "p50=512,p99=2048", "--output-tokens", "150"]
    promise = ["--ttft-p99", "1.5s", "--itl-p99", "50ms"]
    engine = ["--block-size", "32", "--max-loras", "2", "--kv-dtype", "float16", "--max-num-seqs", "64"]
    fixed = ["--dtype", "float16", "--max-num-batched-tokens", "1024"]
    for number, more in enumerate(([], promise, [*promise, *engine], fixed)):
        command = ["plan", "--model", str(tmp_path), *traffic, *more, "--gpu", "h100", "-o", "manifest"]
        assert main(command) == 0
        manifest = yaml.safe_load(capsys.readouterr().out)
        manifest["metadata"]["name"] = f"plan-{number}"
        spec = LLMService.model_validate(await create(kube, manifest)).spec

        sized = size(spec, Model(ModelLocation("file", str(tmp_path)), ModelShape.from_folder(tmp_path)))
        assert isinstance(sized, Sized), sized


async def test_manifest_of_the_largest_plan_is_accepted(kube: KubeClient, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))
    command = ["plan", "--model", str(tmp_path), "--gpu", "h100", "--prompt-tokens", "512", "--output-tokens", "150"]
    assert main([*command, "--rate", "1", "-o", "json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)["candidates"]
    most = MOST_REPLICAS * UTILISATION * one["max_requests_per_s_per_replica"]
    assert main([*command, "--rate", str(0.9999 * most), "-o", "manifest"]) == 0
    manifest = yaml.safe_load(capsys.readouterr().out)
    manifest["metadata"]["name"] = "largest"
    created = await create(kube, manifest)
    assert created["spec"]["autoscaling"]["maxReplicas"] == MOST_REPLICAS
    assert main([*command, "--rate", str(1.01 * most), "-o", "manifest"]) == 2


async def test_defaults_are_filled_in_by_the_api_server(kube: KubeClient, manifest_of: Any) -> None:
    manifest = manifest_of(autoscaling={"maxReplicas": 3}, engine={})
    del manifest["spec"]["resources"]

    spec = (await create(kube, manifest))["spec"]

    assert spec["engine"]["maxNumSeqs"] == "auto"
    assert spec["engine"]["sizing"] == {}
    assert spec["autoscaling"]["minReplicas"] == 1
    assert "stabilization" not in spec["autoscaling"]["scaleDown"]
    assert spec["autoscaling"]["scaleDown"]["stepPercent"] == 100
    assert spec["autoscaling"]["scaleUp"]["stepReplicas"] == 4
    assert spec["rollout"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert spec["resources"]["requests"] == {"cpu": "1", "memory": "4Gi"}
    assert spec["replicas"] == 1


@pytest.mark.parametrize(
    ("change", "path", "says"),
    [
        ({"autoscaling": {"minReplicas": 4, "maxReplicas": 2}}, "spec.autoscaling", "minReplicas must not be above"),
        (
            {"autoscaling": {"maxReplicas": 2, "schedule": [{"start": "08:00", "end": "18:00", "minReplicas": 3}]}},
            "spec.autoscaling",
            "schedule: minReplicas must not be above maxReplicas",
        ),
        (
            {"autoscaling": {"maxReplicas": 2, "schedule": [{"start": "08:00", "end": "08:00", "minReplicas": 2}]}},
            "spec.autoscaling.schedule[0]",
            "start and end must differ",
        ),
        (
            {
                "resources": {"gpu": {"product": "l4"}},
                "autoscaling": {"minReplicas": 2, "maxReplicas": 4, "maxGPUHoursPerDay": 40},
            },
            "spec.autoscaling",
            "maxGPUHoursPerDay must be at least 24 for each of minReplicas",
        ),
        (
            {
                "resources": {"gpu": {"product": "l4"}},
                "autoscaling": {"minReplicas": 0, "maxReplicas": 4, "maxGPUHoursPerDay": 1},
            },
            "spec",
            "maxGPUHoursPerDay must be above resources.gpu.count",
        ),
        (
            {"autoscaling": {"maxReplicas": 4, "maxGPUHoursPerDay": 40}},
            "spec",
            "autoscaling.maxGPUHoursPerDay needs resources.gpu",
        ),
        (
            {"autoscaling": {"idleTimeout": "5m", "maxReplicas": 2}},
            "spec.autoscaling",
            "idleTimeout needs minReplicas: 0",
        ),
        ({"gateway": {"inferencePool": True}}, "spec", "gateway.inferencePool needs access: direct"),
        (
            {
                "access": "direct",
                "gateway": {"inferencePool": True},
                "autoscaling": {"minReplicas": 0, "maxReplicas": 2},
            },
            "spec",
            "gateway.inferencePool needs autoscaling.minReplicas of at least 1",
        ),
        ({"gateway": {"endpointPicker": {"name": "x"}}}, "spec.gateway", "endpointPicker needs inferencePool: true"),
        ({"autoscaling": {"maxReplicas": 4}, "replicas": 2}, "spec", "set autoscaling.minReplicas instead"),
        ({"model": {"uri": "ftp://x/y"}}, "spec.model", "uri must be"),
        ({"model": {"uri": "oci://image"}}, "spec.model", "uri must be"),
        ({"model": {"uri": "pvc://c/a", "revision": "v1"}}, "spec.model", "revision is for hf://"),
        ({"model": {"uri": "hf://o/a@v1", "revision": "v2"}}, "spec.model", "revision is for hf://"),
        ({"model": {"uri": "hf://o/a", "revision": "$(x)"}}, "spec.model.revision", "$(x)"),
        ({"model": {"uri": "s3://b/a", "secretRef": {"name": "s"}}}, "spec.model", "s3.credentialsSecretRef"),
        ({"model": {"uri": "hf://o/a", "s3": {"region": "eu-1"}}}, "spec.model", "s3 is for s3://"),
        ({"model": {"uri": "pvc://c/a", "cache": {"claimName": "c"}}}, "spec.model", "cache is for models"),
        ({"model": {"uri": "hf://o/a", "cache": {}}}, "spec.model.cache.claimName", "Required"),
        (
            {"model": {"uri": "hf://o/a", "cache": {"claimName": "c", "subPath": "../up"}}},
            "spec.model.cache.subPath",
            "../up",
        ),
        (
            {"engine": {"maxModelLen": 100, "sizing": {"expectedTokens": 200}}},
            "spec.engine",
            "must not be above maxModelLen",
        ),
        ({"podTemplate": {"extraArgs": ["--port=1"]}}, "spec.podTemplate", "a flag that the operator sets"),
        ({"podTemplate": {"extraArgs": ["--metrics-port", "1"]}}, "spec.podTemplate", "a flag that the operator sets"),
        ({"engine": {"maxLoras": 0}, "adapters": [POET]}, "spec", "adapters need engine.maxLoras of at least 1"),
        ({"adapters": [POET, POET]}, "spec.adapters[1]", "Duplicate"),
        ({"adapters": [{"name": "poet", "uri": "pvc://claim/poet"}]}, "spec.adapters[0]", "uri must be hf://"),
        ({"adapters": [{"name": "a poet", "uri": "hf://org/poet"}]}, "spec.adapters[0].name", "a poet"),
        (
            {"model": {"uri": "hf://o/a", "servedName": "poet"}, "adapters": [POET]},
            "spec",
            "adapters can't have the model's own name",
        ),
        ({"lanes": {"default": "urgent"}}, "spec.lanes.default", "Unsupported value"),
        ({"lanes": {"batchOrder": "lifo"}}, "spec.lanes.batchOrder", "Unsupported value"),
        ({"workload": "images"}, "spec.workload", "Unsupported value"),
        ({"scheduling": {"affinity": {"nodeAffinity": "gpu"}}}, "spec.scheduling.affinity.nodeAffinity", "object"),
        ({"scheduling": {"affinity": {"nodeAffinity": {REQUIRED: []}}}}, f"nodeAffinity.{REQUIRED}", "object"),
        (
            {"scheduling": {"affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": {}}}}}},
            f"nodeAffinity.{REQUIRED}.nodeSelectorTerms",
            "array",
        ),
        (
            {
                "scheduling": {
                    "affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": ["a"]}]}}}
                }
            },
            f"nodeAffinity.{REQUIRED}.nodeSelectorTerms[0].matchExpressions[0]",
            "object",
        ),
        ({"podTemplate": {"sidecars": [{"name": "server", "image": "x"}]}}, "spec.podTemplate", "server and fetch are"),
        ({"podTemplate": {"volumes": [{"name": "tmp", "emptyDir": {}}]}}, "spec.podTemplate", "models, tmp, cache"),
        (
            {"podTemplate": {"volumeMounts": [{"name": "v", "mountPath": "/tmp"}]}},
            "spec.podTemplate",
            "each of volumeMounts needs a mountPath, and /models, /tmp",
        ),
        (
            {"podTemplate": {"env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]}},
            "spec.podTemplate.env[1]",
            "Duplicate",
        ),
        ({"podTemplate": {"volumes": [{"name": "Bad_Name"}]}}, "spec.podTemplate.volumes[0].name", "Bad_Name"),
        ({"podTemplate": {"disruptionBudget": {}}}, "spec.podTemplate.disruptionBudget", "maxUnavailable or minAvail"),
        ({"podTemplate": {"resourceClaims": [{"name": "a"}]}}, "spec.podTemplate.resourceClaims[0]", "not both"),
        ({"resources": {"gpu": {"count": 1}}}, "spec.resources", "gpu.product is needed"),
        (gpu("nvidia.com/mig-1g.10gb"), "spec.resources.gpu", "memoryGiB is needed where resourceName is a MIG"),
        (gpu(""), "spec", "podTemplate.resourceClaims must have the GPU"),
        (gpu("nvidia"), "spec.resources.gpu.resourceName", "nvidia"),
        ({"resources": {"gpu": {"count": 2, "product": "l4"}}}, "spec.resources", "needs tensor parallelism"),
        ({"resources": {"limits": {"memory": "1Gi"}}}, "spec.resources", "requests.memory must not be above limits"),
        ({"resources": {"limits": {"cpu": "900m"}}}, "spec.resources", "requests.cpu must not be above limits.cpu"),
        ({"resources": {"requests": {"memory": "9Mi"}}}, "spec.resources", "requests.memory must be at least 512Mi"),
        ({"monitoring": {"interval": "7.5s"}}, "spec.monitoring.interval", "7.5s"),
        ({"monitoring": {"interval": ""}}, "spec.monitoring.interval", "at least 1 chars"),
        ({"rollout": {"maxSurge": 0, "maxUnavailable": 0}}, "spec.rollout", "can't both be 0"),
        ({"rollout": {"maxSurge": "0%", "maxUnavailable": "00%"}}, "spec.rollout", "can't both be 0"),
        ({"engine": {"prefixCache": True}}, "prefixCache", "unknown field"),
    ],
)
def test_a_bad_manifest_is_refused_with_path_and_reason(
    change: dict[str, Any], path: str, says: str, registry: Registry, manifest_of: Any
) -> None:
    with pytest.raises(ApiError) as refused:
        put(registry, manifest_of(**change))

    assert refused.value.code in {400, 422}
    assert path in str(refused.value)
    assert says in str(refused.value)


@pytest.mark.parametrize("rollout", [{"maxSurge": "25%"}, {"maxSurge": 0, "maxUnavailable": "10%"}], ids=str)
async def test_a_rollout_in_percent_is_accepted(rollout: dict[str, Any], kube: KubeClient, manifest_of: Any) -> None:
    created = await create(kube, manifest_of(rollout=rollout))

    assert created["spec"]["rollout"] == {"maxSurge": 1, "maxUnavailable": 0} | rollout


@pytest.mark.parametrize("name", ["a" * 53, "with.dot"])
def test_a_name_that_no_service_could_have_is_refused(name: str, registry: Registry, manifest_of: Any) -> None:
    with pytest.raises(ApiError, match="name must"):
        put(registry, manifest_of(name))


async def test_kubectl_scale_writes_spec_replicas(kube: KubeClient, manifest_of: Any) -> None:
    await create(kube, manifest_of(replicas=1))

    await kube.request("PATCH", f"{SERVICES}/tiny/scale", body={"spec": {"replicas": 3}})

    service = await kube.get_service("team-a", "tiny")
    assert service is not None
    assert service["spec"]["replicas"] == 3


def test_generating_leaves_no_trace_between_calls() -> None:
    first = deepcopy(crd())
    assert crd() == first
