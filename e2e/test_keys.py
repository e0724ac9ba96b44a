"""API keys from a Secret to a pod that takes only what the gateway has signed, and a rotation that replaces no pod."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from harness.cluster import LLMSERVICE, Cluster, running_cluster
from harness.kube import Kube, tiny_service
from harness.release import NAMESPACE
from harness.wait import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

SIGNED, OPEN = "signed", "open-door"


@pytest.fixture(scope="module")
def signing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the fields of the signing key's Secret, as its mounts in gateway and operator."""
    folder = tmp_path_factory.mktemp("signing")
    secret = subprocess.run([LLMSERVICE, "signing-key"], capture_output=True, check=True, text=True, timeout=60).stdout
    (folder / "secret.yaml").write_text(secret)
    _mount(folder)
    return folder


def _mount(folder: Path) -> None:
    for name, text in yaml.safe_load((folder / "secret.yaml").read_text())["stringData"].items():
        new = folder / "new"
        new.write_text(text)
        new.replace(folder / name)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, signing: Path) -> Iterator[Cluster]:
    keys = {"enabled": True, "signingSecretName": "signing"}
    gateway = {"replicas": 1, "keys": keys, "extraArgs": [f"--signing-keys={signing}/signing-keys.yaml"]}
    operator = {"replicas": 1, "extraArgs": [f"--gateway-public-keys={signing}/public-keys.pem"]}
    values = {"gateway": gateway, "operator": operator}
    with running_cluster(tmp_path_factory.mktemp("keys"), values=values) as running:
        if not running.is_local:
            pytest.skip("whether a cluster that is not ours requires keys is its owner's decision")
        yield running


@pytest.fixture(scope="module")
def kube(cluster: Cluster) -> Kube:
    kube = Kube(cluster)
    kube.create(tiny_service(SIGNED, cluster.model_uri, replicas=1))
    kube.create(tiny_service(OPEN, cluster.model_uri, replicas=1, access="direct"))
    for name in (SIGNED, OPEN):
        kube.wait_condition(name, "Ready", "True", timeout_s=90)
    return kube


def _key(cluster: Cluster, name: str, *flags: str) -> str:
    command = [LLMSERVICE, "api-key", name, "-n", NAMESPACE, *flags]
    made = subprocess.run(command, capture_output=True, check=True, text=True, timeout=60)
    cluster.kubectl("apply", "-f", "-", stdin=made.stdout)
    return made.stderr.split()[-1]


def _client(url: str, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def _ask(client: openai.OpenAI, model: str = SIGNED) -> Any:
    return client.completions.create(model=model, prompt="Hello", max_tokens=4)


def _answers(client: openai.OpenAI, model: str = SIGNED) -> bool:
    try:
        return bool(_ask(client, model).choices)
    except openai.AuthenticationError:
        return False


def _pod_url(kube: Kube, name: str) -> str:
    (pod,) = kube.pods(name)
    return f"http://{pod['status']['podIP']}:8000"


def test_a_key_opens_the_way_to_its_models_until_it_is_revoked(cluster: Cluster, kube: Kube) -> None:
    key = _key(cluster, "alice", "--model", SIGNED)
    with _client(cluster.gateway_url, key) as client, _client(cluster.gateway_url, "sk-wrong") as stranger:
        wait_for(lambda: _answers(client), 30, lambda: "the key was not taken")
        assert [model.id for model in client.models.list().data] == [SIGNED]
        with pytest.raises(openai.PermissionDeniedError, match="may not use the model"):
            _ask(client, OPEN)
        with pytest.raises(openai.AuthenticationError, match="Incorrect API key"):
            _ask(stranger)
        cluster.kubectl("delete", "secret", "alice", "-n", NAMESPACE)
        wait_for(lambda: not _answers(client), 30, lambda: "the key was still taken")


def test_a_pod_is_no_way_around_the_gateway_unless_its_service_wants_it(cluster: Cluster, kube: Kube) -> None:
    key = _key(cluster, "bob")
    with (
        _client(_pod_url(kube, SIGNED), key) as client,
        pytest.raises(openai.AuthenticationError, match="of the gateway alone"),
    ):
        _ask(client)
    with _client(_pod_url(kube, OPEN), "unused") as client:
        assert _ask(client, OPEN).choices
    assert kube.condition(SIGNED, "GatewayOnly")["status"] == "True"
    assert kube.condition(OPEN, "GatewayOnly")["reason"] == "DirectAccess"


def test_a_rotation_of_the_signing_key_replaces_no_pod_and_fails_no_request(
    cluster: Cluster, kube: Kube, signing: Path
) -> None:
    before = [pod["metadata"]["uid"] for pod in kube.pods(SIGNED)]
    key = _key(cluster, "carol")
    with _client(cluster.gateway_url, key) as client:
        wait_for(lambda: _answers(client), 30, lambda: "the key was not taken")
        present = (signing / "secret.yaml").read_text()
        rotated = subprocess.run(
            [LLMSERVICE, "signing-key", "--rotate", "--after", "20"],
            input=present, capture_output=True, check=True, text=True, timeout=60,
        ).stdout  # fmt: skip
        (signing / "secret.yaml").write_text(rotated)
        _mount(signing)
        both = yaml.safe_load(rotated)["stringData"]["public-keys.pem"]

        def published() -> bool:
            found = json.loads(cluster.kubectl("get", "configmap", f"{SIGNED}-keys", "-o", "json").stdout)
            return bool(found["data"]["public-keys.pem"] == both)

        wait_for(published, 15, lambda: "the new public key is not in the ConfigMap")
        (_, new) = yaml.safe_load(yaml.safe_load(rotated)["stringData"]["signing-keys.yaml"])
        signs_s = datetime.fromisoformat(new["notBefore"]).timestamp()
        wait_for(lambda: bool(_ask(client).choices) and time.time() > signs_s + 1, 40)
    assert [pod["metadata"]["uid"] for pod in kube.pods(SIGNED)] == before
