"""LoRA adapters of a service that runs: loaded, routed, replaced by name and unloaded without a new pod."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openai import NotFoundError, OpenAI

from harness.cluster import Cluster
from harness.kube import Kube, tiny_service
from harness.traffic import traffic
from harness.wait import wait_for
from llmservice_server.tiny.adapter import write_tiny_adapter

NAME = "adapted"

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def adapters(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not cluster.is_local:
        pytest.skip("pods of this cluster do not see the adapters' folder")
    folder, base = tmp_path_factory.mktemp("adapters"), cluster.state_dir / "models" / "tiny-llama"
    write_tiny_adapter(folder / "poet", base, std=0.3)
    write_tiny_adapter(folder / "large", base, rank=32)
    return folder


def ask(cluster: Cluster, model: str) -> str:
    with OpenAI(base_url=f"{cluster.gateway_url}/v1", api_key="unused") as client:
        return client.completions.create(model=model, prompt="One day", max_tokens=12, temperature=0).choices[0].text


def listed(cluster: Cluster) -> dict[str, Any]:
    with OpenAI(base_url=f"{cluster.gateway_url}/v1", api_key="unused") as client:
        return {model.id: model.to_dict() for model in client.models.list()}


def test_an_adapter_of_a_running_service_answers_without_a_new_pod(
    cluster: Cluster, kube: Kube, adapters: Path
) -> None:
    engine = {"maxNumSeqs": 4, "maxNumBatchedTokens": 512, "maxLoras": 2}
    kube.create(tiny_service(NAME, cluster.model_uri, engine=engine))
    kube.wait_condition(NAME, "Ready", "True", timeout_s=90)
    (pod,) = kube.pods(NAME)
    own = ask(cluster, NAME)
    with traffic(cluster.gateway_url, NAME, rate=5, output_tokens=16) as load:
        kube.patch(NAME, {"spec": {"adapters": [{"name": "poet", "uri": f"file://{adapters}/poet"}]}})
        kube.wait_condition(NAME, "AdaptersReady", "True", timeout_s=60)
        wait_for(lambda: listed(cluster)["poet"]["ready"], 20, lambda: listed(cluster))
        assert ask(cluster, "poet") != own
    assert load.failures == []
    assert listed(cluster)["poet"]["parent"] == NAME
    (status,) = kube.get(NAME)["status"]["adapters"]
    assert (status["name"], status["pods"]) == ("poet", 1)
    (after,) = kube.pods(NAME)
    assert after["metadata"]["uid"] == pod["metadata"]["uid"]
    assert after["status"]["containerStatuses"][0]["restartCount"] == 0


def test_a_bad_adapter_becomes_a_condition_and_the_others_serve(cluster: Cluster, kube: Kube, adapters: Path) -> None:
    entries = [{"name": name, "uri": f"file://{adapters}/{name}"} for name in ("poet", "large", "nowhere")]
    kube.patch(NAME, {"spec": {"adapters": entries}})

    def failed() -> dict[str, Any] | None:
        condition = kube.condition(NAME, "AdaptersReady")
        if condition.get("reason") != "AdapterLoadFailed":
            return None
        return condition if all(name in condition["message"] for name in ("large", "nowhere")) else None

    message = wait_for(failed, 60, lambda: kube.get(NAME)["status"])["message"]
    assert "the adapter's rank is 32, expected at most --max-lora-rank 16: raise it" in message
    assert "nowhere is no folder" in message
    assert ask(cluster, "poet")
    assert kube.condition(NAME, "Ready")["status"] == "True"


def test_an_adapter_that_is_no_longer_listed_is_gone(cluster: Cluster, kube: Kube, adapters: Path) -> None:
    kube.patch(NAME, {"spec": {"adapters": []}})
    wait_for(lambda: "poet" not in listed(cluster), 20, lambda: listed(cluster))
    with pytest.raises(NotFoundError):
        ask(cluster, "poet")
    wait_for(lambda: not kube.condition(NAME, "AdaptersReady"), 20, lambda: kube.get(NAME)["status"])
    kube.delete(NAME)
