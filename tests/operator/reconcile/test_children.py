"""Children that passes apply."""

from __future__ import annotations

from typing import Any

import pytest

from harness.definitions import ANYTHING, definition
from harness.world.one_service import APPS, NS, SERVICES, World
from harness.world.whole_cache import fill
from llmservice_operator.api.kinds import CHILD_KINDS


async def test_a_service_gets_its_children_and_a_status(world: World, manifest_of: Any) -> None:
    await world.create_service(manifest_of(replicas=2))

    assert await world.run_pass()

    assert await world.replicas() == 2
    assert await world.kube.request("GET", f"{NS}/services/tiny")
    assert await world.kube.request("GET", f"{NS}/serviceaccounts/tiny")
    status = await world.status()
    assert status["sizing"]["maxNumSeqs"] == 8
    assert status["url"] == "http://tiny.team-a.svc:8000/v1"
    assert (await world.condition("SizingValid"))["status"] == "True"
    assert (await world.condition("Ready"))["reason"] == "Starting"


async def test_a_service_of_a_namespace_that_is_not_all_listed_is_left_alone(world: World, manifest_of: Any) -> None:
    await world.create_service(manifest_of())
    world.reconciler.cache.unread = {("Pod", "team-a")}
    assert await world.run_pass()
    assert await world.deployment() is None

    world.reconciler.cache.unread.clear()
    assert await world.run_pass()
    assert await world.deployment() is not None


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_pass_without_changes_sends_no_request(restarted: bool, world: World, manifest_of: Any) -> None:
    await world.create_service(manifest_of())
    await world.run_pass()
    await world.start_pod("tiny-1", "127.0.0.1", (0, 0))
    await world.run_pass(after_s=5)
    await world.run_pass(after_s=20)  # by now the first figures of the load are noted
    if restarted:
        world.restarted()
    service, deployment, events = await world.service(), await world.deployment(), await world.events()
    await fill(world.kube, world.reconciler.cache)
    requests: list[str] = []
    world.kube.answered = lambda method, path, *_: requests.append(f"{method} {path}")
    world.now += 61

    await world.reconciler.run_pass("team-a", "tiny")

    assert requests == []
    assert (await world.service(), await world.deployment(), await world.events()) == (service, deployment, events)


async def test_no_pod_is_created_before_its_secret_is_granted(world: World, manifest_of: Any) -> None:
    await world.create_service(manifest_of(podTemplate={"envFrom": [{"secretRef": {"name": "db"}}]}))

    await world.run_pass()

    assert await world.deployment() is None
    ready, stalled = await world.condition("Ready"), await world.condition("Stalled")
    assert (ready["status"], ready["reason"]) == ("False", "SecretNotAllowed")
    assert (stalled["status"], stalled["reason"]) == ("True", "SecretNotAllowed")
    assert "spec.podTemplate.envFrom[0].secretRef names the Secret db" in ready["message"]
    granted = {"metadata": {"annotations": {"serving.llmservice.io/usable-secrets": "db"}}}
    await world.kube.request("PATCH", NS, body=granted)

    await world.run_pass(after_s=5)

    assert (await world.condition("Ready"))["reason"] == "Starting"
    assert await world.replicas() == 1


async def test_an_edit_that_names_a_secret_leaves_running_pods_alone(world: World, manifest_of: Any) -> None:
    await world.create_service(manifest_of())
    await world.run_pass()
    await world.start_pod("tiny-1", "127.0.0.1", (0, 0))
    await world.run_pass(after_s=5)
    before = await world.deployment()
    edit = {"spec": {"podTemplate": {"envFrom": [{"secretRef": {"name": "db"}}]}}}
    await world.kube.request("PATCH", f"{SERVICES}/tiny", body=edit)

    await world.run_pass(after_s=5)

    assert await world.deployment() == before
    ready = await world.condition("Ready")
    assert (ready["status"], ready["reason"]) == ("False", "ServingEarlierSpec")
    assert "SecretNotAllowed" in ready["message"]


async def test_an_edit_reaches_the_pods(world: World, manifest_of: Any) -> None:
    await world.create_service(manifest_of())
    await world.run_pass()
    await world.kube.request("PATCH", f"{SERVICES}/tiny", body={"spec": {"engine": {"maxNumSeqs": 3}}})

    await world.run_pass(after_s=1)

    deployment = await world.deployment()
    assert deployment is not None
    args = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    assert args[args.index("--max-num-seqs") + 1] == "3"
    assert (await world.status())["observedGeneration"] == 2


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"model": {"uri": "s3://Bucket/model"}}, "InvalidURI"),
        ({"model": {"uri": "file:///absent"}}, "ModelNotFound"),
        ({"model": {"uri": "hf://org/name"}}, "ModelUnreachable"),
        ({"resources": {"gpu": {"product": "h9000"}}}, "UnknownGPU"),
        ({"resources": {"requests": {"memory": "520Mi"}}}, "DoesNotFit"),
    ],
)
async def test_no_pod_is_started_for_a_spec_that_cannot_work(
    spec: dict[str, Any], reason: str, world: World, manifest_of: Any
) -> None:
    await world.create_service(manifest_of(**spec))

    await world.run_pass()

    assert await world.deployment() is None
    assert (await world.condition("SizingValid"))["reason"] == reason
    assert (await world.condition("Ready"))["status"] == "False"
    assert reason in await world.events()


async def test_a_spec_that_no_pod_can_be_made_of_is_reported_and_logged(
    world: World, manifest_of: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a version whose CRD types less."""

    def fail(*_: Any) -> None:
        raise AttributeError("'list' object has no attribute 'get'")

    monkeypatch.setattr("llmservice_operator.reconcile.expected_children", fail)
    await world.create_service(manifest_of())

    assert await world.run_pass()

    ready, stalled = await world.condition("Ready"), await world.condition("Stalled")
    assert (ready["status"], ready["reason"]) == ("False", "InvalidSpec")
    assert "no pod can be made of the spec (AttributeError: 'list' object" in ready["message"]
    assert (stalled["status"], stalled["reason"]) == ("True", "InvalidSpec")
    assert "Traceback" in caplog.text


async def test_a_bad_edit_leaves_the_running_pods_alone(world: World, manifest_of: Any) -> None:
    await world.create_service(manifest_of())
    await world.run_pass()
    await world.start_pod("tiny-1", "127.0.0.1", (0, 0))
    before = await world.deployment()
    await world.kube.request("PATCH", f"{SERVICES}/tiny", body={"spec": {"engine": {"maxModelLen": 9_000_000}}})

    await world.run_pass(after_s=1)

    assert await world.deployment() == before
    assert (await world.condition("SizingValid"))["status"] == "False"
    assert (await world.condition("Ready"))["reason"] == "ServingEarlierSpec"
    assert (await world.status())["sizing"]["maxModelLen"] == 512


async def test_a_foreign_deployment_of_that_name_is_not_taken_over(world: World, manifest_of: Any) -> None:
    template = {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "x", "image": "y"}]}}
    spec = {"replicas": 5, "selector": {"matchLabels": {"a": "b"}}, "template": template}
    foreign = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "tiny"}, "spec": spec}
    await world.kube.request("POST", f"{APPS}/deployments", body=foreign, content_type="application/json")
    await world.create_service(manifest_of())

    await world.run_pass()

    assert await world.replicas() == 5
    assert (await world.condition("Ready"))["reason"] == "NameConflict"


_PORT = {"type": "object", "required": ["number"], "properties": {"number": {"type": "integer"}}}
POOL: dict[str, Any] = {
    "type": "object",
    "required": ["selector", "targetPorts", "endpointPickerRef"],
    "properties": {
        "selector": {
            "type": "object",
            "required": ["matchLabels"],
            "properties": {"matchLabels": {"type": "object", "additionalProperties": {"type": "string"}}},
        },
        "targetPorts": {"type": "array", "minItems": 1, "maxItems": 8, "items": _PORT},
        "endpointPickerRef": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "group": {"type": "string", "default": ""},
                "kind": {"type": "string", "default": "Service"},
                "name": {"type": "string"},
                "port": _PORT,
                "failureMode": {"type": "string", "default": "FailClose", "enum": ["FailOpen", "FailClose"]},
            },
            "x-kubernetes-validations": [{"rule": "self.kind != 'Service' || has(self.port)", "message": "port?"}],
        },
    },
}
"""`spec` of an InferencePool v1, without its patterns."""


async def install(world: World, kind: str) -> None:
    """A CRD that accepts everything, of an InferencePool what its own accepts."""
    pool = {"type": "object", "properties": {"spec": POOL, "status": ANYTHING}}
    body = definition(CHILD_KINDS[kind].group, kind, pool if kind == "InferencePool" else ANYTHING)
    definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    await world.kube.request("POST", definitions, body=body, content_type="application/json")


async def test_an_inference_pool_waits_for_its_crd_and_says_so(world: World, manifest_of: Any) -> None:
    await world.create_service(manifest_of(access="direct", gateway={"inferencePool": True}))
    await world.run_pass()
    missing = await world.condition("InferencePoolReady")
    assert (missing["status"], missing["reason"]) == ("False", "CRDNotInstalled")
    assert await world.replicas() == 1
    world.writes.clear()
    await world.run_pass(after_s=5)
    assert world.writes == []

    await install(world, "InferencePool")
    await world.run_pass(after_s=5)
    await world.run_pass(after_s=5)

    created = await world.condition("InferencePoolReady")
    assert (created["status"], created["reason"]) == ("True", "Created")
    pool = await world.kube.get_child(CHILD_KINDS["InferencePool"], "team-a", "tiny")
    assert pool is not None
    assert pool["metadata"]["ownerReferences"][0]["kind"] == "LLMService"
    assert pool["spec"]["endpointPickerRef"]["port"] == {"number": 9002}


async def test_what_a_gateway_says_about_the_pool_is_reported_and_the_pool_goes_with_the_spec(
    world: World, manifest_of: Any
) -> None:
    await install(world, "InferencePool")
    await world.create_service(manifest_of(access="direct", gateway={"inferencePool": True}))
    await world.run_pass()
    path = CHILD_KINDS["InferencePool"].path("team-a", "tiny")
    refused = {"type": "ResolvedRefs", "status": "False", "reason": "InvalidExtensionRef", "message": "no tiny-epp"}
    parents = [{"parentRef": {"name": "inference"}, "conditions": [refused]}]
    await world.kube.request("PATCH", f"{path}/status", body={"status": {"parents": parents}})

    await world.run_pass(after_s=5)

    condition = await world.condition("InferencePoolReady")
    assert (condition["status"], condition["reason"]) == ("False", "RefusedByGateway")
    assert "no tiny-epp" in condition["message"]

    await world.kube.request("PATCH", f"{SERVICES}/tiny", body={"spec": {"gateway": {"inferencePool": False}}})
    await world.run_pass(after_s=1)
    assert await world.kube.get_child(CHILD_KINDS["InferencePool"], "team-a", "tiny") is None
    assert "InferencePoolReady" not in {one["type"] for one in (await world.status())["conditions"]}


MONITORING = pytest.mark.parametrize(
    ("field", "kind"), [("podMonitor", "PodMonitor"), ("prometheusRule", "PrometheusRule")]
)


@MONITORING
async def test_monitoring_children_are_left_out_without_their_crd(
    world: World, manifest_of: Any, field: str, kind: str
) -> None:
    await world.create_service(manifest_of(monitoring={field: True}))

    await world.run_pass()

    assert await world.replicas() == 1
    assert (await world.condition("SizingValid"))["status"] == "True"


@MONITORING
async def test_monitoring_children_are_created_and_removed_with_the_spec(
    world: World, manifest_of: Any, field: str, kind: str
) -> None:
    await install(world, kind)
    await world.create_service(manifest_of(monitoring={field: True, "labels": {"release": "stack"}}))

    await world.run_pass()
    child = await world.kube.get_child(CHILD_KINDS[kind], "team-a", "tiny")
    assert child is not None
    assert child["metadata"]["labels"]["release"] == "stack"

    await world.kube.request("PATCH", f"{SERVICES}/tiny", body={"spec": {"monitoring": {field: False}}})
    await world.run_pass(after_s=1)
    assert await world.kube.get_child(CHILD_KINDS[kind], "team-a", "tiny") is None


async def test_a_rotation_of_the_gateways_keys_reaches_the_config_map_alone(world: World, manifest_of: Any) -> None:
    keys: list[str | None] = [None]
    world.reconciler.public_keys = lambda: keys[0]
    await world.create_service(manifest_of())
    await world.run_pass()
    keys[0] = "first"
    await world.run_pass()
    deployment = await world.deployment()
    assert "--gateway-keys" in deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    condition = await world.condition("GatewayOnly")
    assert (condition["status"], condition["reason"]) == ("True", "SignedRequests")

    keys[0] = "second"
    await world.run_pass()

    found = await world.kube.request("GET", f"{NS}/configmaps/tiny-keys")
    assert found["data"] == {"public-keys.pem": "second"}
    assert (await world.deployment())["metadata"]["generation"] == deployment["metadata"]["generation"]


async def test_direct_access_is_stated_where_the_gateway_has_keys(world: World, manifest_of: Any) -> None:
    await world.create_service(manifest_of(access="direct"))
    await world.run_pass()
    assert not [one for one in (await world.status())["conditions"] if one["type"] == "GatewayOnly"]

    world.reconciler.public_keys = lambda: "keys"
    await world.run_pass()

    condition = await world.condition("GatewayOnly")
    assert (condition["status"], condition["reason"]) == ("False", "DirectAccess")
    assert "limits of its keys do not apply" in condition["message"]
