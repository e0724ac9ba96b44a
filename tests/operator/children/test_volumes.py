from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmservice_operator.children.deployment import expected_deployment
from llmservice_operator.children.volumes import adapter_environment
from llmservice_operator.locations import Model, locate
from llmservice_operator.sizing import Sized, size

GIB = 2**30


@pytest.fixture
def pod_of(service_of: Any, model: Model) -> Any:
    """The pod of a service with this `spec.model`."""

    def build(
        *,
        weights_file_bytes: int | None = None,
        hub: str | None = None,
        env: Any = (),
        resources: Any = None,
        **fields: Any,
    ) -> dict[str, Any]:
        given = {} if resources is None else {"resources": resources}
        service = service_of(model=fields, podTemplate={"env": list(env)}, **given)
        location = locate(service.spec.model, None, hub)
        sized = size(service.spec, replace(model, location=location, weights_file_bytes=weights_file_bytes))
        assert isinstance(sized, Sized)
        spec: dict[str, Any] = expected_deployment(service, sized, 1, "img:1")["spec"]["template"]["spec"]
        return spec

    return build


def _environment(container: dict[str, Any]) -> dict[str, Any]:
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in container.get("env", [])}


def _models(spec: dict[str, Any]) -> dict[str, Any]:
    (volume,) = (one for one in spec["volumes"] if one["name"] == "models")
    return {key: value for key, value in volume.items() if key != "name"}


def _mount(container: dict[str, Any]) -> dict[str, Any]:
    mount, *kernels = (one for one in container["volumeMounts"] if one["name"] == "models")
    assert [one["mountPath"] for one in kernels] in ([], ["/compiled-kernels"])
    return dict(mount)


def test_a_gated_model_is_downloaded_with_a_token_that_the_server_never_sees(pod_of: Any) -> None:
    spec = pod_of(uri="hf://org/name", revision="v1", secretRef={"name": "hf"}, hub="http://mirror")

    (fetch,), (server,) = spec["initContainers"], spec["containers"]
    assert fetch["args"] == ["fetch", "hf://org/name@v1", "/models/name", "--progress-port", "8000"]
    assert {name: _environment(fetch)[name] for name in ("HF_ENDPOINT", "LLMSERVICE_SECRET", "HF_TOKEN")} == {
        "HF_ENDPOINT": "http://mirror",
        "LLMSERVICE_SECRET": "hf",
        "HF_TOKEN": {"secretKeyRef": {"name": "hf", "key": "token"}},
    }
    assert not {"LLMSERVICE_SECRET", "HF_TOKEN"} & set(_environment(server))
    assert _models(spec) == {"emptyDir": {}}
    assert (_mount(fetch)["readOnly"], _mount(server)["readOnly"]) == (False, True)


def test_an_s3_model_is_downloaded_with_credentials_by_reference_only(pod_of: Any) -> None:
    s3 = {"endpoint": "http://minio:9000", "region": "eu-1", "credentialsSecretRef": {"name": "bucket"}}
    spec = pod_of(uri="s3://models/tiny", s3=s3)

    (fetch,) = spec["initContainers"]
    given = _environment(fetch)
    assert (given["AWS_ENDPOINT_URL"], given["AWS_REGION"]) == ("http://minio:9000", "eu-1")
    assert given["AWS_SECRET_ACCESS_KEY"] == {"secretKeyRef": {"name": "bucket", "key": "AWS_SECRET_ACCESS_KEY"}}
    assert given["AWS_SESSION_TOKEN"]["secretKeyRef"]["optional"] is True
    assert not any(name.startswith("AWS") for name in _environment(spec["containers"][0]))


def test_a_shared_cache_is_written_by_the_download_and_read_by_the_server(pod_of: Any) -> None:
    spec = pod_of(uri="hf://org/name", cache={"claimName": "cache", "subPath": "llms"})

    (fetch,), (server,) = spec["initContainers"], spec["containers"]
    assert fetch["args"][1:3] == ["hf://org/name", "/models/hf/org/name@main"]
    assert fetch["args"][-3:] == ["--shared", "--compile-cache", "/models/.compiled-kernels"]
    assert server["args"][server["args"].index("--model") + 1] == "/models/hf/org/name@main"
    assert _models(spec) == {"persistentVolumeClaim": {"claimName": "cache"}}
    assert _mount(fetch) == {"name": "models", "mountPath": "/models", "readOnly": False, "subPath": "llms"}
    assert _mount(server) == {"name": "models", "mountPath": "/models", "readOnly": True, "subPath": "llms"}


@pytest.mark.parametrize(
    ("cache", "folder"),
    [
        ({"claimName": "cache"}, ".compiled-kernels"),
        ({"claimName": "cache", "subPath": "llms"}, "llms/.compiled-kernels"),
    ],
)
def test_the_server_keeps_compiled_kernels_in_a_folder_of_the_shared_cache(
    pod_of: Any, cache: dict[str, Any], folder: str
) -> None:
    (server,) = pod_of(uri="hf://org/name", cache=cache)["containers"]
    mount = {"name": "models", "mountPath": "/compiled-kernels", "subPath": folder}
    assert mount in server["volumeMounts"]
    assert server["args"][server["args"].index("--compile-cache") + 1] == "/compiled-kernels"


def test_a_pod_without_a_shared_cache_has_no_folder_for_compiled_kernels(pod_of: Any) -> None:
    (server,) = pod_of(uri="hf://org/name")["containers"]
    assert "--compile-cache" not in server["args"]
    assert "/compiled-kernels" not in [mount["mountPath"] for mount in server["volumeMounts"]]


def test_a_download_takes_the_proxy_that_the_pod_is_given_and_nothing_else_of_its_environment(pod_of: Any) -> None:
    env = [{"name": "https_proxy", "value": "http://proxy:3128"}, {"name": "SECRET", "value": "no"}]
    (fetch,) = pod_of(uri="hf://org/name", env=env)["initContainers"]

    assert _environment(fetch)["https_proxy"] == "http://proxy:3128"
    assert "SECRET" not in _environment(fetch)


def test_the_download_has_the_limits_of_the_server_without_its_gpu(pod_of: Any) -> None:
    """So that a quota of limits admits the pod, and equal requests and limits make it Guaranteed."""
    amounts = {"cpu": "2", "memory": "16Gi"}
    resources = {"gpu": {"product": "l40s"}, "requests": amounts, "limits": amounts}

    spec = pod_of(uri="hf://org/name", resources=resources)

    assert spec["initContainers"][0]["resources"] == {"requests": amounts, "limits": amounts}
    assert spec["containers"][0]["resources"]["limits"] == {**amounts, "nvidia.com/gpu": "1"}


def test_disk_space_is_requested_where_the_size_is_known(pod_of: Any) -> None:
    spec = pod_of(uri="hf://org/name", weights_file_bytes=10 * GIB)

    assert _models(spec) == {"emptyDir": {"sizeLimit": "12288Mi"}}
    assert spec["initContainers"][0]["resources"]["requests"]["ephemeral-storage"] == "12288Mi"
    shared = pod_of(uri="hf://org/name", weights_file_bytes=10 * GIB, cache={"claimName": "cache"})
    assert "ephemeral-storage" not in shared["initContainers"][0]["resources"]["requests"]


@pytest.mark.parametrize(
    ("uri", "volume"),
    [
        ("pvc://weights/llama", {"persistentVolumeClaim": {"claimName": "weights", "readOnly": True}}),
        ("oci://ghcr.io/org/m:1", {"image": {"reference": "ghcr.io/org/m:1", "pullPolicy": "IfNotPresent"}}),
    ],
)
def test_claims_and_images_are_mounted_read_only_and_nothing_is_downloaded(
    pod_of: Any, uri: str, volume: dict[str, Any]
) -> None:
    spec = pod_of(uri=uri)

    assert _models(spec) == volume
    assert _mount(spec["containers"][0])["readOnly"] is True
    assert "initContainers" not in spec


def test_a_file_model_is_mounted_from_the_node_read_only(service_of: Any, sized: Sized) -> None:
    """Where the operator allows file://; `sized` is of such a model."""
    spec = expected_deployment(service_of(), sized, 1, "img:1")["spec"]["template"]["spec"]

    (server,) = spec["containers"]
    assert _models(spec) == {"hostPath": {"path": "/srv/models/tiny", "type": "Directory"}}
    assert _mount(server) == {"name": "models", "mountPath": "/srv/models/tiny", "readOnly": True}
    assert server["args"][server["args"].index("--model") + 1] == "/srv/models/tiny"


@pytest.mark.parametrize(
    ("model", "store"),
    [
        ({"uri": "hf://org/name", "secretRef": {"name": "hf"}}, {}),
        ({"uri": "pvc://claim/m"}, {}),
        ({"uri": "oci://registry.example.com/m"}, {}),
        ({"uri": "file:///m"}, {}),
        (
            {"uri": "s3://bucket/m", "s3": {"endpoint": "http://minio", "credentialsSecretRef": {"name": "b"}}},
            {"AWS_ENDPOINT_URL": "http://minio"},
        ),
    ],
)
def test_adapters_come_from_the_mirror_wherever_the_model_is_from(
    service_of: Any, model: dict[str, Any], store: dict[str, str], tmp_path: Path
) -> None:
    service = service_of(model=model, engine={"maxLoras": 1})
    env = adapter_environment(service, locate(service.spec.model, tmp_path, "http://mirror"))
    assert _environment({"env": env}) == {"HF_ENDPOINT": "http://mirror"} | store
