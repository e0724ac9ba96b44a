"""How the checkpoint comes into a pod: the init container that downloads it, and the volume that it lies on."""

from __future__ import annotations

from collections.abc import Sequence

from llmservice_operator.api.model_spec import ModelSource
from llmservice_operator.api.spec import Manifest
from llmservice_operator.models.location import MODELS_MOUNT, ModelLocation
from llmservice_operator.models.source import Model

FETCH_CONTAINER = "fetch"
_GIB = 2**30
_MIB = 2**20
_AWS_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_OPTIONAL = "AWS_SESSION_TOKEN"
_WAY_OUT = frozenset({"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR"})


def fetch_container(source: ModelSource, model: Model, port: int, env: Sequence[Manifest] = ()) -> Manifest | None:
    """What of the init container is about the model; None where nothing is downloaded.

    Of the pod's `env` it takes over the way out of the cluster: proxies and certificates.
    It answers /progress on the pod's own port, which nobody else listens on yet. Secrets reach this container alone.
    """
    location = model.location
    if location.fetch_uri is None:
        return None
    args = ["fetch", location.fetch_uri, location.path, "--progress-port", str(port)]
    return {
        "name": FETCH_CONTAINER,
        "command": ["llmservice"],
        "args": [*args, "--shared"] if source.cache else args,
        "env": [*(one for one in env if one["name"].upper() in _WAY_OUT), *_environment(source, location)],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def model_volumes(source: ModelSource, model: Model) -> list[Manifest]:
    """The volume called `models`."""
    location = model.location
    if location.kind == "file":
        return [{"name": "models", "hostPath": {"path": location.path, "type": "Directory"}}]
    if location.claim is not None:
        return [{"name": "models", "persistentVolumeClaim": {"claimName": location.claim, "readOnly": True}}]
    if location.image is not None:
        return [{"name": "models", "image": {"reference": location.image, "pullPolicy": "IfNotPresent"}}]
    if source.cache is not None:
        return [{"name": "models", "persistentVolumeClaim": {"claimName": source.cache.claim_name}}]
    return [{"name": "models", "emptyDir": _size_limit(model)}]


def model_mounts(source: ModelSource, model: Model, *, read_only: bool) -> list[Manifest]:
    if model.location.kind == "file":
        return [{"name": "models", "mountPath": model.location.path, "readOnly": True}]
    mount = {"name": "models", "mountPath": MODELS_MOUNT, "readOnly": read_only}
    sub_path = source.cache.sub_path if source.cache else None
    return [mount | ({"subPath": sub_path} if sub_path else {})]


def storage_request(source: ModelSource, model: Model) -> Manifest:
    """Room on the node's own disk that the download needs, where it is known: no pod starts where it can't fit."""
    if source.cache is not None or model.location.fetch_uri is None or model.weights_file_bytes is None:
        return {}
    return {"ephemeral-storage": _room(model.weights_file_bytes)}


def _size_limit(model: Model) -> Manifest:
    return {} if model.weights_file_bytes is None else {"sizeLimit": _room(model.weights_file_bytes)}


def _room(weights_file_bytes: int) -> str:
    """A tenth and a GiB beside the weights, for tokenizer and configurations."""
    return f"{-(-(weights_file_bytes * 11 // 10 + _GIB) // _MIB)}Mi"


def _environment(source: ModelSource, location: ModelLocation) -> list[Manifest]:
    if location.kind == "s3":
        return _s3_environment(source)
    env: list[Manifest] = []
    if location.hf_endpoint is not None:
        env.append({"name": "HF_ENDPOINT", "value": location.hf_endpoint})
    if secret := source.secret_ref:
        reference = {"secretKeyRef": {"name": secret.name, "key": "token"}}
        env += [{"name": "LLMSERVICE_SECRET", "value": secret.name}, {"name": "HF_TOKEN", "valueFrom": reference}]
    return env


def _s3_environment(source: ModelSource) -> list[Manifest]:
    s3 = source.s3
    if s3 is None:
        return []
    given = {"AWS_ENDPOINT_URL": s3.endpoint, "AWS_REGION": s3.region}
    env: list[Manifest] = [{"name": name, "value": value} for name, value in given.items() if value]
    if secret := s3.credentials_secret_ref:
        env.append({"name": "LLMSERVICE_SECRET", "value": secret.name})
        for key in _AWS_KEYS:
            reference = {"name": secret.name, "key": key} | ({"optional": True} if key == _OPTIONAL else {})
            env.append({"name": key, "valueFrom": {"secretKeyRef": reference}})
    return env
