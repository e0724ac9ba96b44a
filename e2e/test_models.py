"""Models that are downloaded: a gated one from a hub, one from a store into a cache that three replicas share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from harness.cluster import Cluster, running_cluster
from harness.kube import Kube, Object, is_ready, tiny_service
from harness.stores.model_hub import ModelHub
from harness.stores.object_store import ObjectStore
from harness.wait import wait_for
from llmservice_operator.api import labels
from llmservice_server.backend.compile_cache import cpu_folder

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def hub() -> Iterator[ModelHub]:
    """Has no files before the cluster has made them."""
    with ModelHub({}).serving() as running:
        yield running


@pytest.fixture(scope="module")
def cluster(hub: ModelHub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    state_dir: Path = tmp_path_factory.mktemp("models")
    flags = ["--operator-arg=--hf-endpoint", f"--operator-arg={hub.url}", "--operator-arg=--tick=0.5"]
    with running_cluster(state_dir, *flags) as running:
        if not running.is_local:
            pytest.skip(
                "the hub and the store are on this machine's loopback: pods of another cluster can't reach them"
            )
        hub.files.update(_checkpoint(running))
        yield running


def _checkpoint(cluster: Cluster) -> dict[str, bytes]:
    folder = cluster.state_dir / "models" / "tiny-llama"
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def _secret(kube: Kube, name: str, data: dict[str, str]) -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": data}
    kube.core.create_namespaced_secret(kube.namespace, secret)
    usable = {labels.USABLE_SECRETS: "hub-access,bucket,stale-access"}
    kube.core.patch_namespace(kube.namespace, {"metadata": {"annotations": usable}})


def _answer(cluster: Cluster, model: str) -> str:
    body = {"model": model, "prompt": "Hello", "max_tokens": 8}
    response = httpx2.post(f"{cluster.gateway_url}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


class Watched:
    """Everything that a service's status said about its download, as a watch sees it."""

    def __init__(self, kube: Kube, name: str) -> None:
        self.fetches: list[Object] = []
        self.reasons: set[str] = set()
        self._kube, self._name = kube, name
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watched:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(0.2):
            status = self._kube.get(self._name).get("status", {})
            fetch = status.get("model", {}).get("fetch")
            if fetch and fetch not in self.fetches:
                self.fetches.append(fetch)
            self.reasons |= {one["reason"] for one in status.get("conditions", []) if one["type"] == "Ready"}


def test_a_gated_model_is_fetched_from_a_hub_with_its_progress_in_the_status_and_serves(
    cluster: Cluster, kube: Kube, hub: ModelHub
) -> None:
    name = "from-hub"
    _secret(kube, "hub-access", {"token": hub.token})
    hub.bytes_per_s = sum(map(len, hub.files.values())) / 5
    service = tiny_service(name, "hf://org/gated")
    service["spec"]["model"]["secretRef"] = {"name": "hub-access"}
    kube.create(service)
    with Watched(kube, name) as watched:
        kube.wait_condition(name, "Ready", "True", timeout_s=90)
    hub.bytes_per_s = None

    assert "FetchingModel" in watched.reasons
    percents = [fetch["percent"] for fetch in watched.fetches if "percent" in fetch]
    assert any(0 < percent < 100 for percent in percents), watched.fetches
    assert percents == sorted(percents)
    assert _answer(cluster, name)
    _is_sized_by_its_server(kube, name)
    (pod,) = kube.pods(name)
    assert hub.token not in str(pod)
    assert hub.token not in str(kube.get(name))


def _is_sized_by_its_server(kube: Kube, name: str) -> None:
    """The figures are in the status, and the pod that reported them is still the one that was started."""
    wait_for(lambda: kube.get(name)["status"].get("sizing"), 30, lambda: kube.get(name)["status"])
    status = kube.get(name)["status"]
    assert (status["model"]["figuresFrom"], status["sizing"]["source"]) == ("pod", "pod")
    assert status["model"]["shape"]["layers"] >= 1
    selector = f"app.kubernetes.io/instance={name}"
    assert len(kube.apps.list_namespaced_replica_set(kube.namespace, label_selector=selector).items) == 1


def test_replicas_that_share_a_cache_download_once(cluster: Cluster, kube: Kube, hub: ModelHub) -> None:
    name = "from-store"
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "model-cache"},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    kube.core.create_namespaced_persistent_volume_claim(kube.namespace, claim)
    _fill_with_kernels(cluster.state_dir / "claims" / kube.namespace / "model-cache" / "llms")
    with ObjectStore({f"llms/tiny/{file}": content for file, content in hub.files.items()}).serving() as store:
        store.bytes_per_s = len(hub.files[WEIGHTS]) / 3
        _secret(kube, "bucket", {"AWS_ACCESS_KEY_ID": "AKIDEXAMPLE", "AWS_SECRET_ACCESS_KEY": "s3-hush"})
        service = tiny_service(name, "s3://models/llms/tiny", replicas=2)
        service["spec"]["model"] |= {
            "s3": {"endpoint": store.url, "region": store.region, "credentialsSecretRef": {"name": "bucket"}},
            "cache": {"claimName": "model-cache", "subPath": "llms"},
        }
        kube.create(service)
        wait_for(
            lambda: [is_ready(pod) for pod in kube.pods(name)] == [True] * 2, 150, lambda: kube.get(name).get("status")
        )
        assert store.sent[f"llms/tiny/{WEIGHTS}"] == len(hub.files[WEIGHTS])
    assert _answer(cluster, name)
    assert all("s3-hush" not in str(pod) for pod in kube.pods(name))


def _fill_with_kernels(cache: Path) -> None:
    """With those of this machine: an empty folder would cost the time of compiling them."""
    folder = cache / ".compiled-kernels"
    folder.mkdir(parents=True)
    kernels = cpu_folder()
    assert kernels is not None
    kernels.mkdir(parents=True, exist_ok=True)
    (folder / "numba").symlink_to(kernels)


def test_a_token_that_is_refused_names_its_secret_and_a_right_one_heals_it(
    cluster: Cluster, kube: Kube, hub: ModelHub
) -> None:
    name = "wrong-token"
    _secret(kube, "stale-access", {"token": "hf_stale"})
    service = tiny_service(name, "hf://org/gated")
    service["spec"]["model"]["secretRef"] = {"name": "stale-access"}
    kube.create(service)

    def refusal() -> Object | None:
        condition = kube.condition(name, "Ready")
        return condition if condition.get("reason") == "ModelFetchFailed" else None

    message = wait_for(refusal, 60, lambda: kube.get(name).get("status"))["message"]
    assert "Secret stale-access" in message
    assert "hf_stale" not in message
    kube.core.patch_namespaced_secret("stale-access", kube.namespace, {"stringData": {"token": hub.token}})
    kube.wait_condition(name, "Ready", "True", timeout_s=120)
