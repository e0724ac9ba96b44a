"""The whole path: apply, ready, stream, overload, scale, edit, delete, nothing left.

The signals come from the pods; test_faults.py has a service that is scaled by Prometheus.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI

from harness.cluster import Cluster
from harness.kube import Kube, Object, is_ready, tiny_service
from harness.traffic import traffic
from harness.wait import wait_for

NAME = "tokens"
AUTOSCALING = {
    "minReplicas": 1,
    "maxReplicas": 3,
    "queueDepth": 2,
    "scaleUp": {"stabilization": "1s"},
    "scaleDown": {"stabilization": "10s"},
    "metrics": {"source": "pods", "window": "10s"},
}

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]


@pytest.fixture
def client(cluster: Cluster) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{cluster.gateway_url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_an_applied_manifest_becomes_ready_with_its_sizing_in_status(cluster: Cluster, kube: Kube) -> None:
    kube.create(tiny_service(NAME, cluster.model_uri, autoscaling=AUTOSCALING, slo={"ttftP99": "2s"}))
    kube.wait_condition(NAME, "Ready", "True", timeout_s=90)
    status = kube.get(NAME)["status"]
    assert status["sizing"]["maxNumSeqs"] == 4
    assert status["sizing"]["limitedBy"] == "maxNumSeqs"
    assert status["readyReplicas"] == 1
    arguments = kube.deployment(NAME)["spec"]["template"]["spec"]["containers"][0]["args"]  # type: ignore[index]
    assert arguments[arguments.index("--max-num-seqs") + 1] == "4"


def test_the_openai_client_streams_a_chat_through_the_gateway(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert chunks[-1].usage is not None
    assert 0 < chunks[-1].usage.completion_tokens <= 24


def test_the_openai_client_reads_a_response_through_the_gateway(client: OpenAI) -> None:
    events = list(client.responses.create(model=NAME, input="Hello", max_output_tokens=24, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    assert last.response.usage is not None
    assert 0 < last.response.usage.output_tokens <= 24


def test_what_was_measured_appears_beside_the_prediction(kube: Kube) -> None:
    def measured() -> Object | None:
        return kube.get(NAME)["status"]["sizing"].get("measured")  # type: ignore[no-any-return]

    sizing = wait_for(measured, 30, lambda: kube.get(NAME)["status"])
    assert abs(sizing["errorPercent"]) < 5


def test_overload_scales_up_and_idleness_scales_down_without_a_failed_request(cluster: Cluster, kube: Kube) -> None:
    with traffic(cluster.gateway_url, NAME, rate=40, output_tokens=60) as load:
        wait_for(
            lambda: kube.get(NAME)["status"].get("readyReplicas", 0) >= 2, 120, lambda: kube.get(NAME).get("status")
        )
    assert load.failures == []
    assert len(load.records) > 50
    decisions = kube.get(NAME)["status"]["autoscaling"]["decisions"]
    reasons = [reason.partition(":")[0] for decision in decisions for reason in decision["reasons"]]
    assert {"queue", "flight", "slots"} & {*reasons}, decisions
    with traffic(cluster.gateway_url, NAME, rate=2, output_tokens=8) as light:  # flows on while replicas go
        wait_for(lambda: kube.get(NAME)["status"]["replicas"] == 1, 120, lambda: kube.get(NAME).get("status"))
    assert light.failures == []


def test_an_edit_rolls_out_without_a_failed_request(cluster: Cluster, kube: Kube) -> None:
    before = {pod["metadata"]["name"] for pod in kube.pods(NAME)}
    with traffic(cluster.gateway_url, NAME, rate=5, output_tokens=16) as load:
        kube.patch(NAME, {"spec": {"engine": {"maxNumSeqs": 6}}})

        def rolled_out() -> bool:
            pods = kube.pods(NAME)
            return bool(pods) and not before & {pod["metadata"]["name"] for pod in pods} and all(map(is_ready, pods))

        wait_for(rolled_out, 180, lambda: kube.pods(NAME))  # under load, where a start takes several times as long
    assert load.failures == []
    assert kube.get(NAME)["status"]["sizing"]["maxNumSeqs"] == 6


def test_drift_on_an_owned_field_is_put_right(kube: Kube) -> None:
    kube.apps.patch_namespaced_deployment(NAME, kube.namespace, {"spec": {"progressDeadlineSeconds": 7}})

    def repaired() -> bool:
        spec = kube.deployment(NAME)["spec"]  # type: ignore[index]
        return spec["progressDeadlineSeconds"] != 7

    wait_for(repaired, 30)


def test_deletion_leaves_nothing(cluster: Cluster, kube: Kube) -> None:
    kube.delete(NAME)
    wait_for(lambda: kube.deployment(NAME) is None and not kube.pods(NAME), 90, lambda: kube.pods(NAME))
    services = kube.core.list_namespaced_service(kube.namespace).items
    accounts = kube.core.list_namespaced_service_account(kube.namespace).items
    assert NAME not in {each.metadata.name for each in (*services, *accounts)}
    if cluster.is_local:
        wait_for(lambda: not cluster.server_processes(), 30, cluster.server_processes)
