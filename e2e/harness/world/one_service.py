"""Passes over one service, `tiny`, against an API server over HTTP. Time is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from harness.world.talking_pods import TalkingPods
from harness.world.whole_cache import fill
from llmservice_operator.api.kinds import CHILD_KINDS
from llmservice_operator.cluster.applier import Applier
from llmservice_operator.cluster.kube_client import KubeClient
from llmservice_operator.cluster.object_cache import ObjectCache
from llmservice_operator.monitoring.metrics import OperatorMetrics
from llmservice_operator.reconcile import Reconciler
from llmservice_operator.signals.held import HeldRequests
from llmservice_operator.signals.sources import Signals

NS = "/api/v1/namespaces/team-a"
APPS = "/apis/apps/v1/namespaces/team-a"
SERVICES = "/apis/serving.llmservice.io/v1alpha1/namespaces/team-a/llmservices"
AUTOSCALING = {
    "minReplicas": 1,
    "maxReplicas": 4,
    "queueDepth": 2,
    "scaleUp": {"stabilization": "0s"},
    "scaleDown": {"stabilization": "60s"},
}


@dataclass
class World:
    """An API server, one operator, and a clock."""

    kube: KubeClient
    reconciler: Reconciler
    pods: TalkingPods
    signals: Callable[[], Signals]
    """Of a process that has read none yet."""
    now: float = 1_700_000_000.0
    set_by_s: float = 0.0
    """How far the operator's clock was set ahead of the time since."""
    booted_s: float = 1_699_999_000.0
    """Where the monotonic clock of the operator's machine begins."""
    writes: list[str] = field(default_factory=list)
    """What the operator wrote so far: method and path."""

    def answered(self, method: str, path: str, _status: int, _seconds: float) -> None:
        if method != "GET":
            self.writes.append(f"{method} {path}")

    async def create_service(self, manifest: dict[str, Any]) -> None:
        await self.kube.request("POST", SERVICES, body=manifest, content_type="application/json")

    async def run_pass(self, after_s: float = 0.0) -> bool:
        """Everything that watches would have reported by now is in the cache."""
        self.now += after_s
        await fill(self.kube, self.reconciler.cache)
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
        (server,) = template["spec"]["containers"]
        server["ports"] = [{"name": "metrics", "containerPort": self.pods.port}]
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
        before = (deployment.get("status") or {}).get("readyReplicas", 0)
        seen = {"observedGeneration": deployment["metadata"]["generation"], "readyReplicas": before + ready}
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
            old.grants,
            HeldRequests(old.held.session, old.held.list_gateways, clock=self.monotonic),
            self.clock,
            monotonic=self.monotonic,
        )
        self.booted_s = self.now - 100.0
        self.reconciler = fresh
        return self

    def clock(self) -> float:
        return self.now + self.set_by_s

    def monotonic(self) -> float:
        return self.now - self.booted_s


async def busy_service(world: World, manifest_of: Any, load: tuple[int, int], **autoscaling: Any) -> None:
    """One ready pod under load."""
    await world.create_service(manifest_of(autoscaling={**AUTOSCALING, **autoscaling}, slo={"ttftP99": "2s"}))
    await world.run_pass()
    await world.start_pod("tiny-1", "127.0.0.1", load)
