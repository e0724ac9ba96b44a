"""The whole of API, controllers, scheduler and node, over real sockets and with real processes.

With `KUBEBUILDER_ASSETS` set, the same against the real etcd and kube-apiserver.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector

from harness.wait import until
from llmservice_local.client import (
    CLAIMS,
    CONFIG_MAPS,
    DEPLOYMENTS,
    ENDPOINT_SLICES,
    ENDPOINTS,
    EVENTS,
    NAMESPACES,
    NODES,
    PODS,
    REPLICA_SETS,
    SERVICES,
    KubeClient,
    connect,
)
from llmservice_local.cluster import ClusterSettings, LocalCluster
from llmservice_local.errors import ApiError
from llmservice_local.objects import condition_of

pytestmark = pytest.mark.slow

SERVE = """
import http.server, os, signal, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = os.environ["ANSWER"].encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args): pass
server = http.server.ThreadingHTTPServer((os.environ["LLMSERVICE_HOST"], 8000), Handler)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("serving", os.environ["ANSWER"], flush=True)
server.serve_forever()
"""


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[LocalCluster]:
    settings = ClusterSettings(
        state_dir=tmp_path,
        gpus=2,
        cpu="8",
        memory="8Gi",
        operator=False,
        gateway=False,
        restart_backoff_s=0.5,
    )
    async with LocalCluster(settings) as running:
        yield running


@pytest.fixture
async def kube(cluster: LocalCluster) -> AsyncIterator[KubeClient]:
    async with connect(cluster.endpoint, "test") as client:
        yield client


def deployment(name: str = "web", replicas: int = 1, answer: str = "one", **container: Any) -> dict[str, Any]:
    server = {
        "name": "server",
        "image": "none",
        "command": ["python3", "-c", SERVE],
        "env": [{"name": "ANSWER", "value": answer}],
        "ports": [{"name": "http", "containerPort": 8000}],
        "readinessProbe": {"httpGet": {"path": "/", "port": "http"}, "periodSeconds": 1},
        **container,
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {"app": name}},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": {
                "metadata": {"labels": {"app": name}},
                "spec": {"terminationGracePeriodSeconds": 5, "containers": [server]},
            },
        },
    }


def pod(name: str, *command: str, **spec: Any) -> dict[str, Any]:
    container = {"name": "c", "image": "none", "command": list(command)}
    return {"metadata": {"name": name}, "spec": {"containers": [container], **spec}}


async def ready_pods(kube: KubeClient, app: str = "web") -> list[dict[str, Any]]:
    listed = await kube.list(PODS, "default", labelSelector=f"app={app}")
    return [found for found in listed["items"] if condition_of(found, "Ready").get("status") == "True"]


async def until_ready(kube: KubeClient, count: int) -> list[dict[str, Any]]:
    async def look() -> list[dict[str, Any]]:
        found = await ready_pods(kube)
        everything = (await kube.list(PODS, "default"))["items"]
        return found if len(found) == len(everything) == count else []

    found: list[dict[str, Any]] = await until(look)
    return found


async def until_gone(kube: KubeClient, name: str) -> None:
    async def look() -> bool:
        return all(found["metadata"]["name"] != name for found in (await kube.list(PODS, "default"))["items"])

    await until(look)


async def container_status(kube: KubeClient, name: str) -> dict[str, Any]:
    statuses = ((await kube.get(PODS, "default", name)).get("status") or {}).get("containerStatuses")
    return dict(statuses[0]) if statuses else {"state": {}, "restartCount": 0}


async def logs_of(cluster: LocalCluster, name: str, **query: str) -> str:
    connector = TCPConnector(ssl=cluster.endpoint.ssl_context())
    async with ClientSession(headers=cluster.endpoint.headers(), connector=connector) as session:
        url = cluster.api_url + PODS.path("default", name, "log")
        async with session.get(url, params=query) as response:
            return await response.text()


async def test_deployment_is_served_on_one_address_per_pod(cluster: LocalCluster, kube: KubeClient) -> None:
    service = {
        "metadata": {"name": "web"},
        "spec": {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": "http"}]},
    }
    await kube.create(SERVICES, "default", service)
    await kube.create(DEPLOYMENTS, "default", deployment(replicas=2))
    pods = await until_ready(kube, 2)
    addresses = {found["status"]["podIP"] for found in pods}
    assert len(addresses) == 2
    async with ClientSession() as session:
        for address in addresses:
            async with session.get(f"http://{address}:8000/") as response:
                assert await response.text() == "one"

    if cluster.settings.assets is not None:
        return  # a real API server takes no endpoints on loopback addresses

    async def endpoints() -> bool:
        subsets = (await kube.get(ENDPOINTS, "default", "web"))["subsets"]
        slices = (await kube.get(ENDPOINT_SLICES, "default", "web"))["endpoints"]
        ready = {entry["addresses"][0] for entry in slices if entry["conditions"]["ready"]}
        return bool(subsets) and {entry["ip"] for entry in subsets[0].get("addresses", [])} == addresses == ready

    await until(endpoints)


async def test_rollout_keeps_serving_and_removes_the_old_pods(cluster: LocalCluster, kube: KubeClient) -> None:
    created = await kube.create(DEPLOYMENTS, "default", deployment())
    await until_ready(kube, 1)
    answers: list[str] = []
    done = asyncio.Event()

    async def ask() -> None:
        """As a gateway does: any ready pod that is not on its way out."""
        async with ClientSession(timeout=ClientTimeout(total=5)) as session:
            while not done.is_set():
                backends = [found for found in await ready_pods(kube) if "deletionTimestamp" not in found["metadata"]]
                try:
                    async with session.get(f"http://{backends[0]['status']['podIP']}:8000/") as response:
                        answers.append(await response.text())
                except (ClientError, IndexError) as error:
                    answers.append(repr(error))
                await asyncio.sleep(0.01)

    asking = asyncio.create_task(ask())
    lifecycle = {"preStop": {"sleep": {"seconds": 1}}}
    new = deployment(answer="two", lifecycle=lifecycle)["spec"]["template"]
    await kube.merge(DEPLOYMENTS, created, {"spec": {"template": new}})

    async def settled() -> bool:
        found = await kube.get(DEPLOYMENTS, "default", "web")
        seen = found["status"]["observedGeneration"] == found["metadata"]["generation"]
        return seen and condition_of(found, "Progressing")["reason"] == "NewReplicaSetAvailable"

    await until(settled)
    done.set()
    await asking
    assert set(answers) == {"one", "two"}
    assert answers[-1] == "two"
    revisions = {
        found["metadata"]["annotations"]["deployment.kubernetes.io/revision"]: found["spec"]["replicas"]
        for found in (await kube.list(REPLICA_SETS, "default"))["items"]
    }
    assert revisions == {"1": 0, "2": 1}


async def test_cheapest_pod_goes_first_when_the_deployment_shrinks(cluster: LocalCluster, kube: KubeClient) -> None:
    created = await kube.create(DEPLOYMENTS, "default", deployment(replicas=3))
    pods = await until_ready(kube, 3)
    cheap = pods[1]["metadata"]["name"]
    cost = {"controller.kubernetes.io/pod-deletion-cost": "-10"}
    await kube.merge(PODS, pods[1], {"metadata": {"annotations": cost}})
    await kube.merge(DEPLOYMENTS, created, {"spec": {"replicas": 2}})
    left = await until_ready(kube, 2)
    assert cheap not in {found["metadata"]["name"] for found in left}


async def test_scarce_gpus_leave_a_pod_unschedulable_until_one_is_free(cluster: LocalCluster, kube: KubeClient) -> None:
    limits = {"limits": {"nvidia.com/gpu": "1"}}
    await kube.create(DEPLOYMENTS, "default", deployment(replicas=3, resources=limits))

    async def refused() -> str:
        for found in (await kube.list(PODS, "default"))["items"]:
            condition = condition_of(found, "PodScheduled")
            if condition.get("reason") == "Unschedulable":
                return str(condition["message"])
        return ""

    assert (await until(refused)).startswith("0/1 nodes are available: 1 Insufficient nvidia.com/gpu.")
    placed = (await until(lambda: ready_pods(kube)))[0]
    await kube.delete(PODS, placed)
    await until(lambda: _count(kube, "FailedScheduling"))


async def _count(kube: KubeClient, reason: str) -> int:
    return sum(event["reason"] == reason for event in (await kube.list(EVENTS, "default"))["items"])


async def test_crashing_container_backs_off_and_its_last_output_is_its_message(
    cluster: LocalCluster, kube: KubeClient
) -> None:
    body = pod("crash", "sh", "-c", "echo out of luck >&2; exit 3")
    body["spec"]["containers"][0]["terminationMessagePolicy"] = "FallbackToLogsOnError"
    await kube.create(PODS, "default", body)

    async def backing_off() -> dict[str, Any]:
        status = await container_status(kube, "crash")
        waiting = status["state"].get("waiting") or {}
        return status if waiting.get("reason") == "CrashLoopBackOff" and status["restartCount"] >= 2 else {}

    status = await until(backing_off)
    last = status["lastState"]["terminated"]
    assert (last["exitCode"], last["reason"], last["message"]) == (3, "Error", "out of luck\n")
    assert await logs_of(cluster, "crash") == "out of luck\n"
    assert await logs_of(cluster, "crash", previous="true") == "out of luck\n"


async def test_container_that_fails_its_liveness_probe_is_restarted(cluster: LocalCluster, kube: KubeClient) -> None:
    body = pod("sick", "sleep", "60")
    probe = {
        "exec": {"command": ["false"]},
        "periodSeconds": 1,
        "failureThreshold": 1,
        "terminationGracePeriodSeconds": 1,
    }
    body["spec"]["containers"][0]["livenessProbe"] = probe
    await kube.create(PODS, "default", body)

    async def restarted() -> bool:
        return bool((await container_status(kube, "sick"))["restartCount"])

    await until(restarted)
    assert await _count(kube, "Unhealthy")


async def test_init_containers_run_in_order_before_the_others(cluster: LocalCluster, kube: KubeClient) -> None:
    body = pod(
        "ordered",
        "sh", "-c", "cat $FILE",
        restartPolicy="Never",
        volumes=[{"name": "v", "emptyDir": {}}],
        initContainers=[
            {"name": name, "image": "none", "command": ["sh", "-c", f"echo {name} >> $FILE"]} for name in ("one", "two")
        ],
    )  # fmt: skip
    for container in [*body["spec"]["initContainers"], *body["spec"]["containers"]]:
        container["env"] = [{"name": "FILE", "value": "/work/file"}]
        container["volumeMounts"] = [{"name": "v", "mountPath": "/work"}]
    await kube.create(PODS, "default", body)

    async def succeeded() -> bool:
        return (await kube.get(PODS, "default", "ordered"))["status"]["phase"] == "Succeeded"

    await until(succeeded)
    assert await logs_of(cluster, "ordered", container="c") == "one\ntwo\n"


async def test_pods_share_a_claim_and_wait_for_a_missing_one(cluster: LocalCluster, kube: KubeClient) -> None:
    volume = {"name": "v", "persistentVolumeClaim": {"claimName": "shared"}}
    commands = {"writer": "echo kept > $FILE", "reader": "until cat $FILE; do sleep 0.1; done"}
    for name, command in commands.items():
        body = pod(name, "sh", "-c", command, restartPolicy="Never", volumes=[volume])
        (container,) = body["spec"]["containers"]
        container["env"] = [{"name": "FILE", "value": "/shared/file"}]
        container["volumeMounts"] = [{"name": "v", "mountPath": "/shared", "subPath": "models"}]
        await kube.create(PODS, "default", body)

    async def refused() -> bool:
        message = condition_of(await kube.get(PODS, "default", "reader"), "PodScheduled").get("message", "")
        return 'persistentvolumeclaim "shared" not found' in message

    await until(refused)
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    claim = await kube.create(CLAIMS, "default", {"metadata": {"name": "shared"}, "spec": spec})

    async def bound() -> bool:
        return ((await kube.get(CLAIMS, "default", "shared")).get("status") or {}).get("phase") == "Bound"

    async def succeeded() -> bool:
        phases = [(await kube.get(PODS, "default", name))["status"]["phase"] for name in commands]
        return phases == ["Succeeded"] * 2

    await until(bound)
    await until(succeeded)
    assert "kept" in await logs_of(cluster, "reader", container="c")
    for name in commands:
        await kube.delete(PODS, await kube.get(PODS, "default", name), grace_s=0)
    await kube.delete(CLAIMS, claim)

    async def gone() -> bool:
        return not (await kube.list(CLAIMS, "default"))["items"]

    await until(gone)


async def test_container_waits_for_its_config_map(cluster: LocalCluster, kube: KubeClient) -> None:
    body = pod("needy", "sh", "-c", "echo $A; sleep 60")
    reference = {"configMapKeyRef": {"name": "c", "key": "a"}}
    body["spec"]["containers"][0]["env"] = [{"name": "A", "valueFrom": reference}]
    await kube.create(PODS, "default", body)

    async def waiting() -> str:
        state = (await container_status(kube, "needy"))["state"].get("waiting") or {}
        return str(state.get("message", "")) if state.get("reason") == "CreateContainerConfigError" else ""

    assert await until(waiting) == 'configmap "c" not found'
    await kube.create(CONFIG_MAPS, "default", {"metadata": {"name": "c"}, "data": {"a": "found"}})

    async def running() -> bool:
        return "running" in (await container_status(kube, "needy"))["state"]

    await until(running)


async def test_pod_drains_before_it_is_removed(cluster: LocalCluster, kube: KubeClient) -> None:
    words = "trap 'sleep 0.5; exit 0' TERM; echo up; while :; do sleep 0.05; done"
    created = await kube.create(PODS, "default", pod("slow", "sh", "-c", words))

    async def running() -> bool:
        return "running" in (await container_status(kube, "slow"))["state"]

    await until(running)
    deleted = await kube.delete(PODS, created, grace_s=20)
    assert deleted is not None
    assert deleted["metadata"]["deletionGracePeriodSeconds"] == 20
    await until_gone(kube, "slow")
    with pytest.raises(ApiError, match="not found"):
        await kube.get(PODS, "default", "slow")


async def test_dependents_are_deleted_with_their_owner(cluster: LocalCluster, kube: KubeClient) -> None:
    created = await kube.create(DEPLOYMENTS, "default", deployment(replicas=2))
    await until_ready(kube, 2)
    await kube.delete(DEPLOYMENTS, created)

    async def empty() -> bool:
        return (
            not (await kube.list(REPLICA_SETS, "default"))["items"] and not (await kube.list(PODS, "default"))["items"]
        )

    await until(empty)


async def test_foreground_deletion_keeps_the_owner_until_its_dependents_are_gone(
    cluster: LocalCluster, kube: KubeClient
) -> None:
    created = await kube.create(DEPLOYMENTS, "default", deployment())
    await until_ready(kube, 1)
    marked = await kube.delete(DEPLOYMENTS, created, propagation="Foreground")
    assert marked is not None
    assert marked["metadata"]["finalizers"] == ["foregroundDeletion"]

    async def gone() -> bool:
        deployments = (await kube.list(DEPLOYMENTS, "default"))["items"]
        sets = (await kube.list(REPLICA_SETS, "default"))["items"]
        assert deployments or not sets, "the owner went before its dependents"
        return not deployments

    await until(gone)


async def test_orphans_outlive_their_owner(cluster: LocalCluster, kube: KubeClient) -> None:
    created = await kube.create(DEPLOYMENTS, "default", deployment())
    await until_ready(kube, 1)
    await kube.delete(DEPLOYMENTS, created, propagation="Orphan")

    async def gone() -> bool:
        return not (await kube.list(DEPLOYMENTS, "default"))["items"]

    await until(gone)
    (left,) = (await kube.list(REPLICA_SETS, "default"))["items"]
    assert "ownerReferences" not in left["metadata"]
    assert len(await ready_pods(kube)) == 1


async def test_orphans_are_adopted_by_the_next_deployment_of_their_name(
    cluster: LocalCluster, kube: KubeClient
) -> None:
    created = await kube.create(DEPLOYMENTS, "default", deployment())
    (before,) = await until_ready(kube, 1)
    await kube.delete(DEPLOYMENTS, created, propagation="Orphan")

    async def recreated() -> bool:
        try:
            await kube.create(DEPLOYMENTS, "default", deployment())
        except ApiError:  # the first one is still being deleted
            return False
        return True

    async def adopted() -> bool:
        status = (await kube.get(DEPLOYMENTS, "default", "web")).get("status") or {}
        return status.get("readyReplicas") == status.get("updatedReplicas") == 1

    await until(recreated)
    await until(adopted)
    (after,) = await until_ready(kube, 1)
    assert after["metadata"]["uid"] == before["metadata"]["uid"]


async def test_pod_that_loses_its_label_is_replaced_and_stays(cluster: LocalCluster, kube: KubeClient) -> None:
    await kube.create(DEPLOYMENTS, "default", deployment())
    (before,) = await until_ready(kube, 1)
    await kube.merge(PODS, before, {"metadata": {"labels": {"app": "examined"}}})
    (after,) = await until(lambda: ready_pods(kube))
    assert after["metadata"]["uid"] != before["metadata"]["uid"]
    (examined,) = await ready_pods(kube, "examined")
    assert "ownerReferences" not in examined["metadata"]


async def test_namespace_is_deleted_with_its_objects(cluster: LocalCluster, kube: KubeClient) -> None:
    namespace = await kube.create(NAMESPACES, None, {"metadata": {"name": "team"}})
    await kube.create(PODS, "team", pod("p", "sleep", "60", terminationGracePeriodSeconds=1))
    await kube.create(CONFIG_MAPS, "team", {"metadata": {"name": "c"}})
    await kube.delete(NAMESPACES, namespace)

    async def gone() -> bool:
        return all(found["metadata"]["name"] != "team" for found in (await kube.list(NAMESPACES))["items"])

    await until(gone)
    assert (await kube.list(PODS, "team"))["items"] == []


async def test_node_reports_its_capacity(cluster: LocalCluster, kube: KubeClient) -> None:
    async def registered() -> list[dict[str, Any]]:
        return list((await kube.list(NODES))["items"])

    (node,) = await until(registered)
    assert node["status"]["allocatable"]["nvidia.com/gpu"] == "2"
    assert condition_of(node, "Ready")["status"] == "True"
