"""Two tenants in one cluster: what one tries against the other, or against the platform, is refused in words."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import pytest
import yaml

from harness.cluster import Cluster, running_cluster
from harness.kube import Kube, Object, tiny_service
from harness.wait import wait_for
from llmservice_operator.api import labels

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

OURS, THEIRS = "team-a", "team-b"
SECRET_ENV = {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "db", "key": "password"}}}
REDIRECTIONS = ("PYTHONPATH", "LD_PRELOAD", "HTTPS_PROXY", "SSL_CERT_FILE", "OTEL_EXPORTER_OTLP_ENDPOINT")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Without the webhook, which only says earlier what a pass decides; e2e/test_admission.py has it."""
    values = {"admission": {"enabled": False}}
    with running_cluster(tmp_path_factory.mktemp("tenants"), "--operator-arg=--tick=0.5", values=values) as running:
        if not running.is_local:
            pytest.skip("makes namespaces and annotates them, which is not ours to do elsewhere")
        for namespace in (OURS, THEIRS):
            metadata = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
            running.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(metadata))
        victim = Kube(running, OURS)
        service = tiny_service("llama", running.model_uri, replicas=1, lanes={"default": "batch"})
        victim.create(service)
        victim.wait_condition("llama", "Ready", "True", timeout_s=90)
        yield running


@pytest.fixture
def kube(cluster: Cluster) -> Kube:
    """The attacker's."""
    return Kube(cluster, THEIRS)


def ask(cluster: Cluster, model: str, **more: object) -> httpx2.Response:
    body = {"model": model, "prompt": "Hello", "max_tokens": 4, **more}
    return httpx2.post(f"{cluster.gateway_url}/v1/completions", json=body, timeout=60)


def owner_of(cluster: Cluster, model: str) -> str:
    namespace: str = httpx2.get(f"{cluster.gateway_url}/v1/models/{model}", timeout=10).json()["namespace"]
    return namespace


def answered(kube: Kube, name: str) -> float:
    """Requests that the service's only pod has finished, as it counts them itself."""
    (pod,) = kube.pods(name)
    text = httpx2.get(f"http://{pod['status']['podIP']}:8001/metrics", timeout=10).text
    found = (line for line in text.splitlines() if line.startswith("llmservice_request_success_total"))
    return sum(float(line.rpartition(" ")[2]) for line in found)


def refused(kube: Kube, name: str, service: Object, reason: str) -> str:
    """The message of Ready, once it has the reason; no pod was made."""
    kube.create(service)

    def found() -> str | None:
        condition = kube.condition(name, "Ready")
        return str(condition["message"]) if condition.get("reason") == reason else None

    message: str = wait_for(found, 30, lambda: kube.get(name).get("status"))
    assert kube.deployment(name) is None
    assert kube.pods(name) == []
    return message


def test_neither_the_bare_nor_the_qualified_name_of_a_model_can_be_taken_over(cluster: Cluster, kube: Kube) -> None:
    for name, served_name in (("same", "llama"), ("qualified", "team-a/llama")):
        service = tiny_service(name, cluster.model_uri, replicas=1)
        service["spec"]["model"]["servedName"] = served_name
        kube.create(service)
    for name in ("same", "qualified"):
        kube.wait_condition(name, "Ready", "True", timeout_s=90)
        kube.wait_condition(name, "NameTaken", "True", timeout_s=30)

    before = answered(Kube(cluster, OURS), "llama")
    for model in ("llama", "team-a/llama", "team-a/llama"):
        assert ask(cluster, model).status_code == 200
        assert owner_of(cluster, model) == OURS
    assert answered(Kube(cluster, OURS), "llama") == before + 3
    assert [answered(kube, name) for name in ("same", "qualified")] == [0, 0]
    assert ask(cluster, "team-b/llama").status_code == ask(cluster, "team-b/team-a/llama").status_code == 200
    assert [answered(kube, name) for name in ("same", "qualified")] == [1, 1]
    same, qualified = (kube.condition(name, "NameTaken")["message"] for name in ("same", "qualified"))
    assert "looks for llama in the namespace team-a, for the name belongs to an older service there" in same
    assert "clients reach this service as team-b/llama" in same
    assert "looks for team-a/llama in the namespace team-a, for the name means that namespace" in qualified
    for name in ("same", "qualified"):
        kube.delete(name)


@pytest.mark.parametrize(
    ("place", "template"),
    [
        ("env[0].valueFrom.secretKeyRef", {"env": [SECRET_ENV]}),
        ("envFrom[0].secretRef", {"envFrom": [{"secretRef": {"name": "db"}}]}),
        ("volumes[0].secret", {"volumes": [{"name": "v", "secret": {"secretName": "db"}}]}),
        ("sidecars[0].env[0].valueFrom.secretKeyRef", {"sidecars": [{"name": "x", "image": "i", "env": [SECRET_ENV]}]}),
    ],
)
def test_a_secret_reaches_no_pod_before_the_namespace_lists_it(
    place: str, template: Object, cluster: Cluster, kube: Kube
) -> None:
    message = refused(
        kube, "reader", tiny_service("reader", cluster.model_uri, podTemplate=template), "SecretNotAllowed"
    )

    assert message.startswith(
        f"spec.podTemplate.{place} names the Secret db, which LLMServices of the namespace team-b"
    )
    assert f"kubectl annotate namespace team-b --overwrite {labels.USABLE_SECRETS}=db" in message
    kube.delete("reader")


def test_a_listed_secret_is_handed_to_the_pod(cluster: Cluster, kube: Kube) -> None:
    service = tiny_service("granted", cluster.model_uri, replicas=1, podTemplate={"env": [SECRET_ENV]})
    message = refused(kube, "granted", service, "SecretNotAllowed")
    secret = {"metadata": {"name": "db"}, "stringData": {"password": "hush"}}
    kube.core.create_namespaced_secret(THEIRS, secret)

    cluster.kubectl(*message.partition(": kubectl ")[2].split())

    kube.wait_condition("granted", "Ready", "True", timeout_s=90)
    assert "hush" not in str(kube.get("granted"))
    kube.delete("granted")


def test_variables_that_redirect_the_server_are_refused(cluster: Cluster, kube: Kube) -> None:
    env = [{"name": name, "value": "http://mine.example"} for name in REDIRECTIONS]
    service = tiny_service("redirected", cluster.model_uri, podTemplate={"env": env})

    message = refused(kube, "redirected", service, "EnvNotAllowed")

    assert f"sets {', '.join(REDIRECTIONS)}, which decides what code the server runs or whom it talks to" in message
    assert "operator.allowedEnv" in message
    kube.delete("redirected")


def test_a_client_sees_no_metrics_where_it_sends_requests(cluster: Cluster) -> None:
    (pod,) = Kube(cluster, OURS).pods("llama")

    for url in (cluster.gateway_url, f"http://{pod['status']['podIP']}:8000"):
        answer = httpx2.get(f"{url}/metrics", timeout=10)
        assert answer.status_code == 404
        assert "/metrics" in answer.json()["error"]["message"]


@pytest.mark.parametrize("way", ["body", "header"])
def test_a_client_gets_no_better_lane_than_the_service_s_own(way: str, cluster: Cluster) -> None:
    body = {"model": "llama", "prompt": "Hello", "max_tokens": 4} | (
        {"priority": "interactive"} if way == "body" else {}
    )
    headers = {"x-llmservice-lane": "interactive"} if way == "header" else {}

    answer = httpx2.post(f"{cluster.gateway_url}/v1/completions", json=body, headers=headers, timeout=60)

    assert answer.status_code == 403
    assert "interactive" in answer.json()["error"]["message"]
    assert ask(cluster, "llama", priority="batch").status_code == 200


def test_the_pods_policy_lets_in_the_platform_and_out_to_dns_alone(cluster: Cluster) -> None:
    """The local node enforces no policies: this is what a network plugin would enforce."""
    found = cluster.kubectl("get", "networkpolicy", "llama", "-n", OURS, "-o", "yaml").stdout
    spec = yaml.safe_load(found)["spec"]

    assert sorted(spec["policyTypes"]) == ["Egress", "Ingress"]
    assert {port["port"] for rule in spec["egress"] for port in rule["ports"]} == {53, 5353}, "the model is a file"
    assert all(rule["from"] for rule in spec["ingress"])
