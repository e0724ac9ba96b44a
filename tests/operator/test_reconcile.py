"""Whole passes against an API server over HTTP, with pods that answer /metrics on real sockets. Time is given."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from llmservice_operator.applier import Applier
from llmservice_operator.child import CHILD_KINDS
from llmservice_operator.kube_client import KubeClient, KubeError
from llmservice_operator.labels import DELETION_COST
from llmservice_operator.metrics import OperatorMetrics
from llmservice_operator.model_source import ModelReader
from llmservice_operator.object_cache import ObjectCache
from llmservice_operator.pod_model import PodModels
from llmservice_operator.reconcile import Reconciler
from llmservice_operator.resync import Resync
from llmservice_operator.signals import Signals
from llmservice_operator.signals_pods import PodSignals
from llmservice_operator.signals_prometheus import PrometheusSignals

NS = "/api/v1/namespaces/team-a"
APPS = "/apis/apps/v1/namespaces/team-a"
SERVICES = "/apis/serving.llmservice.io/v1alpha1/namespaces/team-a/llmservices"
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "torch_dtype": "float32",
}
AUTOSCALING = {
    "minReplicas": 1,
    "maxReplicas": 4,
    "queueDepth": 2,
    "scaleUp": {"stabilization": "0s"},
    "scaleDown": {"stabilization": "60s"},
}


@dataclass
class Pods:
    """What the service's pods say of themselves on a loopback port: in flight by IP; an IP that is absent is silent."""

    port: int
    in_flight: dict[str, tuple[int, int]] = field(default_factory=dict)
    finished: int = 0
    answered_s: float | None = None
    """Time to the first token of every finished request; None leaves the histogram out."""
    sizing: dict[str, Any] | None = None
    """What a server that sized itself tells."""
    progress: dict[str, Any] | None = None

    async def told(self, request: web.Request) -> web.Response:
        answer = self.sizing if request.path == "/sizing" else self.progress
        return web.Response(status=503) if answer is None else web.json_response(answer)

    async def metrics(self, request: web.Request) -> web.Response:
        if request.url.host not in self.in_flight:
            return web.Response(status=500)
        running, waiting = self.in_flight[request.url.host]
        lines = [f"llmservice_num_requests_running {running}", f"llmservice_num_requests_waiting {waiting}"]
        lines += [f"llmservice_request_success_total {self.finished}"]
        if self.answered_s is not None:
            bounds = (0.1, 1.0, 10.0)
            counts = [(bound, self.finished if self.answered_s <= bound else 0) for bound in bounds]
            lines += [f'llmservice_time_to_first_token_seconds_bucket{{le="{le}"}} {count}' for le, count in counts]
        lines += ['llmservice_kv_cache_blocks{state="free"} 1000', 'llmservice_memory_bytes{kind="weights"} 1e6', ""]
        return web.Response(text="\n".join(lines))


@dataclass
class World:
    """An API server, one operator, and a clock."""

    kube: KubeClient
    reconciler: Reconciler
    pods: Pods
    signals: Callable[[], Signals]
    """Of a process that has read none yet."""
    now: float = 1_700_000_000.0
    writes: list[str] = field(default_factory=list)
    """What the operator wrote so far: method and path."""

    def answered(self, method: str, path: str, _status: int, _seconds: float) -> None:
        if method != "GET":
            self.writes.append(f"{method} {path}")

    async def create_service(self, manifest: dict[str, Any]) -> None:
        await self.kube.request("POST", SERVICES, body=manifest, content_type="application/json")

    async def run_pass(self, after_s: float = 0.0) -> bool:
        """Everything that watches would have told of by now is in the cache."""
        self.now += after_s
        await Resync(self.kube, self.reconciler.cache).once()
        return await self.reconciler.run_pass("team-a", "tiny")

    async def service(self) -> dict[str, Any]:
        service = await self.kube.get_service("team-a", "tiny")
        assert service is not None
        return service

    async def status(self) -> dict[str, Any]:
        return (await self.service())["status"]  # type: ignore[no-any-return]

    async def condition(self, kind: str) -> dict[str, Any]:
        conditions = {one["type"]: one for one in (await self.status())["conditions"]}
        return conditions[kind]  # type: ignore[no-any-return]

    async def deployment(self) -> dict[str, Any] | None:
        return await self.kube.get_child(CHILD_KINDS["Deployment"], "team-a", "tiny")

    async def replicas(self) -> int:
        deployment = await self.deployment()
        assert deployment is not None
        return int(deployment["spec"]["replicas"])

    async def start_pod(self, name: str, ip: str, load: tuple[int, int] | None, *, ready: bool = True) -> None:
        """What the Deployment's controller and a node would do."""
        deployment = await self.deployment()
        assert deployment is not None
        template = deployment["spec"]["template"]
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, **template["metadata"]},
            "spec": template["spec"],
        }
        await self.kube.request("POST", f"{NS}/pods", body=pod, content_type="application/json")
        moment = datetime.fromtimestamp(self.now, tz=UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        condition = {"type": "Ready", "status": str(ready), "lastTransitionTime": moment}
        status = {"phase": "Running", "podIP": ip, "conditions": [condition]}
        await self.kube.request("PATCH", f"{NS}/pods/{name}/status", body={"status": status})
        seen = {"observedGeneration": deployment["metadata"]["generation"]}
        await self.kube.request("PATCH", f"{APPS}/deployments/tiny/status", body={"status": seen})
        if load is not None:
            self.pods.in_flight[ip] = load

    async def events(self) -> list[str]:
        return [event["reason"] for event in (await self.kube.request("GET", f"{NS}/events"))["items"]]

    def restarted(self) -> World:
        """The same world with an operator that remembers nothing."""
        old = self.reconciler
        cache = ObjectCache()
        fresh = Reconciler(
            old.client,
            cache,
            Applier(old.client, cache),
            old.read_model,
            self.signals(),
            old.pod_models,
            OperatorMetrics(),
            old.server_image,
            self.clock,
        )
        self.reconciler = fresh
        return self

    def clock(self) -> float:
        return self.now


@pytest.fixture
async def pods() -> AsyncIterator[Pods]:
    app = web.Application()
    state = Pods(0)
    app.router.add_get("/metrics", state.metrics)
    app.router.add_get("/{path:sizing|progress}", state.told)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", 0).start()
    state.port = runner.addresses[0][1]
    yield state
    await runner.cleanup()


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "models"


@pytest.fixture
async def world(kube: KubeClient, pods: Pods, models: Path) -> AsyncIterator[World]:
    async with aiohttp.ClientSession() as session:
        reader = ModelReader(session, models, "http://127.0.0.1:9", None)
        unreachable = PrometheusSignals(session, "http://127.0.0.1:9")
        signals = partial(_signals, session, pods.port, unreachable)
        cache, pod_models = ObjectCache(), PodModels(session, pods.port)
        applier = Applier(kube, cache)
        reconciler = Reconciler(kube, cache, applier, reader.read, signals(), pod_models, OperatorMetrics(), "img:1")
        world = World(kube, reconciler, pods, signals)
        kube.answered = world.answered
        reconciler.clock = world.clock
        yield world


def _signals(session: aiohttp.ClientSession, port: int, prometheus: PrometheusSignals) -> Signals:
    return Signals(PodSignals(session, port), prometheus)


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


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_pass_that_finds_all_well_asks_the_api_server_for_nothing(
    restarted: bool, world: World, manifest_of: Any
) -> None:
    await world.create_service(manifest_of())
    await world.run_pass()
    await world.start_pod("tiny-1", "127.0.0.1", (0, 0))
    await world.run_pass(after_s=5)
    await world.run_pass(after_s=20)  # by now the first figures of the load are noted
    if restarted:
        world.restarted()
    service, deployment, events = await world.service(), await world.deployment(), await world.events()
    await Resync(world.kube, world.reconciler.cache).once()
    requests: list[str] = []
    world.kube.answered = lambda method, path, *_: requests.append(f"{method} {path}")
    world.now += 61

    await world.reconciler.run_pass("team-a", "tiny")

    assert requests == []
    assert (await world.service(), await world.deployment(), await world.events()) == (service, deployment, events)


async def test_drift_on_an_owned_field_is_put_right_and_other_fields_stay(world: World, manifest_of: Any) -> None:
    await world.create_service(manifest_of(replicas=2))
    await world.run_pass()
    drift = {"metadata": {"annotations": {"team": "a"}}, "spec": {"replicas": 7}}
    await world.kube.request("PATCH", f"{APPS}/deployments/tiny", body=drift)

    await world.run_pass(after_s=1)

    deployment = await world.deployment()
    assert deployment is not None
    assert deployment["spec"]["replicas"] == 2
    assert deployment["metadata"]["annotations"]["team"] == "a"


async def test_drift_on_a_child_is_put_right(world: World, manifest_of: Any) -> None:
    await world.create_service(manifest_of())
    await world.run_pass()
    await world.kube.request("PATCH", f"{NS}/services/tiny", body={"spec": {"selector": {"app": "wrong"}}})

    await world.run_pass(after_s=1)

    selector = (await world.kube.request("GET", f"{NS}/services/tiny"))["spec"]["selector"]
    assert selector["app.kubernetes.io/instance"] == "tiny"


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
        ({"resources": {"requests": {"memory": "128Mi"}}}, "DoesNotFit"),
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


async def test_load_adds_replicas_and_idleness_removes_them_after_the_window(world: World, manifest_of: Any) -> None:
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


async def test_a_restarted_operator_keeps_the_replicas_and_the_wait(world: World, manifest_of: Any) -> None:
    await world.create_service(manifest_of(autoscaling=AUTOSCALING))
    await world.run_pass()
    await world.start_pod("tiny-1", "127.0.0.1", (8, 18))
    await world.run_pass(after_s=5)
    world.pods.in_flight["127.0.0.1"] = (0, 0)
    await world.run_pass(after_s=5)

    await world.restarted().run_pass(after_s=30)
    assert await world.replicas() == 3
    await world.restarted().run_pass(after_s=31)

    assert await world.replicas() == 1


async def test_silent_pods_hold_the_replicas(world: World, manifest_of: Any) -> None:
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


async def test_what_the_server_measured_stands_beside_the_prediction(world: World, manifest_of: Any) -> None:
    await world.create_service(manifest_of())
    await world.run_pass()
    await world.start_pod("tiny-1", "127.0.0.1", (0, 0))

    await world.run_pass(after_s=5)

    assert (await world.status())["sizing"]["measured"]["blocks"] == 1000
    assert (await world.condition("Ready"))["status"] == "True"


async def test_a_foreign_deployment_of_that_name_is_not_taken_over(world: World, manifest_of: Any) -> None:
    template = {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "x", "image": "y"}]}}
    spec = {"replicas": 5, "selector": {"matchLabels": {"a": "b"}}, "template": template}
    foreign = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "tiny"}, "spec": spec}
    await world.kube.request("POST", f"{APPS}/deployments", body=foreign, content_type="application/json")
    await world.create_service(manifest_of())

    await world.run_pass()

    assert await world.replicas() == 5
    assert (await world.condition("Ready"))["reason"] == "NameConflict"


MONITORING = pytest.mark.parametrize(
    ("field", "kind"), [("podMonitor", "PodMonitor"), ("prometheusRule", "PrometheusRule")]
)


@MONITORING
async def test_what_prometheus_reads_is_left_out_where_its_crd_is_missing(
    world: World, manifest_of: Any, field: str, kind: str
) -> None:
    await world.create_service(manifest_of(monitoring={field: True}))

    await world.run_pass()

    assert await world.replicas() == 1
    assert (await world.condition("SizingValid"))["status"] == "True"


@MONITORING
async def test_what_prometheus_reads_comes_and_goes_as_it_is_asked_for(
    world: World, manifest_of: Any, field: str, kind: str
) -> None:
    plural = CHILD_KINDS[kind].plural
    version = {
        "name": "v1",
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
    }
    names = {"kind": kind, "listKind": f"{kind}List", "plural": plural, "singular": kind.lower()}
    spec = {"group": "monitoring.coreos.com", "scope": "Namespaced", "names": names, "versions": [version]}
    definition = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.monitoring.coreos.com"},
        "spec": spec,
    }
    definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    await world.kube.request("POST", definitions, body=definition, content_type="application/json")
    await world.create_service(manifest_of(monitoring={field: True, "labels": {"release": "stack"}}))

    await world.run_pass()
    child = await world.kube.get_child(CHILD_KINDS[kind], "team-a", "tiny")
    assert child is not None
    assert child["metadata"]["labels"]["release"] == "stack"

    await world.kube.request("PATCH", f"{SERVICES}/tiny", body={"spec": {"monitoring": {field: False}}})
    await world.run_pass(after_s=1)
    assert await world.kube.get_child(CHILD_KINDS[kind], "team-a", "tiny") is None


async def test_a_service_that_is_gone_ends_its_passes(world: World) -> None:
    assert not await world.run_pass()


async def busy_service(world: World, manifest_of: Any, load: tuple[int, int], **autoscaling: Any) -> None:
    """One ready pod under load."""
    await world.create_service(manifest_of(autoscaling={**AUTOSCALING, **autoscaling}, slo={"ttftP99": "2s"}))
    await world.run_pass()
    await world.start_pod("tiny-1", "127.0.0.1", load)


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


async def test_a_restart_beside_live_traffic_writes_nothing_until_something_is_news(
    world: World, manifest_of: Any
) -> None:
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


@pytest.mark.parametrize("silent_s", [0, 5, 10])
async def test_a_restart_that_reaches_no_pod_at_first_says_nothing_of_it(
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


async def test_a_restarted_operator_knows_what_a_replica_can_do(world: World, manifest_of: Any) -> None:
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


async def test_lowering_max_replicas_below_what_runs_removes_the_rest_and_drains_the_least_busy(
    world: World, manifest_of: Any
) -> None:
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


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
async def test_a_clock_that_is_set_does_not_scale(jump_s: float, world: World, manifest_of: Any) -> None:
    await busy_service(world, manifest_of, (8, 18))
    await world.run_pass(after_s=5)
    world.pods.in_flight["127.0.0.1"] = (0, 0)
    await world.run_pass(after_s=5)
    assert await world.replicas() == 3

    await world.run_pass(after_s=jump_s)
    assert await world.replicas() == 3

    await world.run_pass(after_s=40)
    await world.run_pass(after_s=40)
    assert await world.replicas() == 1


async def test_an_autoscaler_of_the_clusters_rules_where_the_built_in_one_is_off(
    world: World, manifest_of: Any
) -> None:
    """What an HPA and KEDA do: read the scale, write it back whole."""
    await world.create_service(manifest_of(replicas=1))
    await world.run_pass()
    scale = await world.kube.request("GET", f"{SERVICES}/tiny/scale")
    assert scale["status"]["selector"] == "app.kubernetes.io/name=llmservice,app.kubernetes.io/instance=tiny"
    wanted = {**scale, "spec": {"replicas": 3}}

    await world.kube.request("PUT", f"{SERVICES}/tiny/scale", body=wanted, content_type="application/json")
    await world.run_pass(after_s=1)

    assert await world.replicas() == 3


async def test_with_the_built_in_autoscaler_a_written_scale_is_refused_and_says_why(
    world: World, manifest_of: Any
) -> None:
    await world.create_service(manifest_of(autoscaling=AUTOSCALING))

    with pytest.raises(KubeError, match="replicas and autoscaling are exclusive"):
        await world.kube.request("PATCH", f"{SERVICES}/tiny/scale", body={"spec": {"replicas": 3}})


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


async def test_a_servers_report_is_shown_and_restarts_nobody(world: World, manifest_of: Any) -> None:
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


async def test_a_restarted_operator_knows_the_shape_and_neither_sizes_nor_restarts_the_pods(
    world: World, manifest_of: Any
) -> None:
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


async def test_what_a_server_told_outlives_it(world: World, manifest_of: Any) -> None:
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


async def test_another_model_is_not_taken_for_the_one_that_still_runs(world: World, manifest_of: Any) -> None:
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


async def test_a_download_is_told_in_the_status_until_it_is_over(world: World, manifest_of: Any) -> None:
    source = {"uri": "s3://bucket/tiny", "s3": {"endpoint": "http://minio:9000"}}
    await world.create_service(manifest_of(model=source))
    await world.run_pass()
    await world.start_pod("tiny-1", "127.0.0.1", None, ready=False)
    fetch = {"name": "fetch", "image": "img:1", "imageID": "", "restartCount": 0}
    running = [{**fetch, "state": {"running": {}}, "ready": False}]
    await world.kube.request("PATCH", f"{NS}/pods/tiny-1/status", body={"status": {"initContainerStatuses": running}})
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

    done = [{**fetch, "state": {"terminated": {"exitCode": 0}}, "ready": True}]
    await world.kube.request("PATCH", f"{NS}/pods/tiny-1/status", body={"status": {"initContainerStatuses": done}})
    await world.run_pass(after_s=5)
    assert "fetch" not in (await world.status())["model"]
    assert (await world.condition("Ready"))["reason"] == "Starting"


async def test_an_edit_does_not_make_what_serves_unready_before_kubernetes_had_time_to_notice(
    world: World, manifest_of: Any
) -> None:
    await world.create_service(manifest_of())
    await world.run_pass()
    await world.start_pod("tiny-1", "127.0.0.1", (0, 0))
    await world.run_pass(after_s=5)
    await world.kube.request("PATCH", f"{SERVICES}/tiny", body={"spec": {"engine": {"maxNumSeqs": 3}}})

    await world.run_pass(after_s=1)
    ready = await world.condition("Ready")
    assert (ready["status"], ready["observedGeneration"]) == ("True", 1)
    assert (await world.status())["observedGeneration"] == 2

    await world.run_pass(after_s=11)
    ready = await world.condition("Ready")
    assert (ready["status"], ready["reason"], ready["observedGeneration"]) == ("False", "Updating", 2)


async def test_a_spec_that_an_older_crd_let_through_becomes_a_condition(world: World, manifest_of: Any) -> None:
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


async def test_nothing_is_remembered_of_a_service_that_is_gone(world: World, manifest_of: Any) -> None:
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
