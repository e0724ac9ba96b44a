"""Builders of what the operator works on: a service, a model, a sizing, pods."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from llmservice_local.api.serve import serve_api
from llmservice_local.client import Endpoint
from llmservice_operator.api.crd import crd
from llmservice_operator.api.resource import LLMService
from llmservice_operator.cluster.kube_client import KubeClient
from llmservice_operator.locations import Model, ModelLocation
from llmservice_operator.pods.pod import Pod
from llmservice_operator.sizing import Sized, size
from llmservice_planner.model.shape import ModelShape

ServiceOf = Callable[..., LLMService]
PodNamed = Callable[..., Pod]

SPEC: dict[str, Any] = {
    "model": {"uri": "file:///tiny"},
    "resources": {"gpu": {"count": 0}, "requests": {"cpu": "500m", "memory": "2Gi"}},
    "engine": {"maxNumSeqs": 8, "maxModelLen": 512},
}


@pytest.fixture
def manifest_of() -> Callable[..., dict[str, Any]]:
    """A manifest as the API returns it: `manifest_of(autoscaling={…})` sets fields of the spec."""

    def build(name: str = "tiny", **spec: Any) -> dict[str, Any]:
        metadata = {"name": name, "namespace": "team-a", "uid": f"uid-of-{name}", "generation": 1}
        return {
            "apiVersion": "serving.llmservice.io/v1alpha1",
            "kind": "LLMService",
            "metadata": metadata,
            "spec": {**SPEC, **spec},
        }

    return build


@pytest.fixture
def service_of(manifest_of: Callable[..., dict[str, Any]]) -> ServiceOf:
    return lambda **spec: LLMService.model_validate(manifest_of(**spec))


@pytest.fixture
def model() -> Model:
    """A small Llama in a local folder."""
    shape = ModelShape(
        layers=2,
        hidden_size=64,
        intermediate_size=128,
        heads=4,
        kv_heads=2,
        head_dim=16,
        vocab_size=512,
        max_position_embeddings=2048,
        dtype="float32",
    )
    return Model(ModelLocation("file", "/srv/models/tiny"), shape)


@pytest.fixture
def encoder() -> Model:
    """A small BERT in a local folder."""
    shape = ModelShape.from_config({"model_type": "bert", "num_hidden_layers": 2})
    return Model(ModelLocation("file", "/srv/models/bert"), shape)


@pytest.fixture
def sized(service_of: ServiceOf, model: Model) -> Sized:
    answer = size(service_of().spec, model)
    assert isinstance(answer, Sized)
    return answer


@pytest.fixture
def pod_named() -> PodNamed:
    def build(name: str = "tiny-1", *, ready: bool = True, **fields: Any) -> Pod:
        return Pod(
            **{"name": name, "uid": name, "ip": "10.0.0.1", "created_s": 0.0, "ready": ready, "terminating": False}
            | fields
        )

    return build


@pytest.fixture
async def api_url() -> AsyncIterator[str]:
    """An emulated Kubernetes API on a free port."""
    async with serve_api() as api:
        yield api.url


@pytest.fixture
def kubeconfig(api_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kubeconfig of the emulated API, which the environment names."""
    path = tmp_path / "kubeconfig"
    Endpoint(api_url).write_kubeconfig(path)
    monkeypatch.setenv("KUBECONFIG", str(path))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    return path


@cache
def definition() -> dict[str, Any]:
    """The CRD; deriving it takes longer than most tests."""
    return crd()


@pytest.fixture
async def kube(kubeconfig: Path) -> AsyncIterator[KubeClient]:
    """The operator's client, connected to an API server that has the CRD and the namespace team-a."""
    client = await KubeClient.connect()
    await create(client, "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition())
    await create(
        client, "/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team-a"}}
    )
    yield client
    await client.close()


async def create(client: KubeClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    return await client.request("POST", path, body=body, content_type="application/json")
