"""The volumes of a pod: scratch space, the checkpoint, and the init container that downloads it."""

from __future__ import annotations

from collections.abc import Sequence

from llmservice_operator.api.model_spec import ModelSource
from llmservice_operator.api.resource import LLMService
from llmservice_operator.api.spec import Manifest
from llmservice_operator.locations import MODELS_MOUNT, Model, ModelLocation
from llmservice_operator.sizing import Sized
from llmservice_planner.sizing.gpu import GPU

FETCH_CONTAINER = "fetch"
KERNELS_MOUNT = "/compiled-kernels"
_KERNELS = ".compiled-kernels"
"""A folder of the cache's volume, which the download makes. No model's folder begins with a dot."""
_GIB = 2**30
_MIB = 2**20
_AWS_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_OPTIONAL = "AWS_SESSION_TOKEN"
_STORES = frozenset({"HF_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_REGION"})
_EGRESS_ENV = frozenset({"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR"})


def fetch_container(source: ModelSource, model: Model, port: int, env: Sequence[Manifest] = ()) -> Manifest | None:
    """The init container without image and resources; None where nothing is downloaded.

    Proxies and certificates of the pod's `env` apply to it. It serves /progress on the server's port, which is still
    free. The model's Secrets are given to this container alone.
    """
    location = model.location
    if location.fetch_uri is None:
        return None
    args = ["fetch", location.fetch_uri, location.path, "--progress-port", str(port)]
    return {
        "name": FETCH_CONTAINER,
        "command": ["llmservice"],
        "args": [*args, "--shared", "--compile-cache", str(MODELS_MOUNT / _KERNELS)] if source.cache else args,
        "env": [*(one for one in env if one["name"].upper() in _EGRESS_ENV), *_environment(source, location)],
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
    mount = {"name": "models", "mountPath": str(MODELS_MOUNT), "readOnly": read_only}
    sub_path = source.cache.sub_path if source.cache else None
    return [mount | ({"subPath": sub_path} if sub_path else {})]


def kernel_mounts(source: ModelSource) -> list[Manifest]:
    """Where the server may write in the cache's volume: kernels that it compiled, for the next pods."""
    if source.cache is None:
        return []
    folders = (source.cache.sub_path, _KERNELS)
    return [{"name": "models", "mountPath": KERNELS_MOUNT, "subPath": "/".join(filter(None, folders))}]


def kernel_args(source: ModelSource) -> list[str]:
    return [] if source.cache is None else ["--compile-cache", KERNELS_MOUNT]


def storage_request(source: ModelSource, model: Model) -> Manifest:
    """Disk space of the node that the download needs, if known, so that no pod is scheduled where it does not fit."""
    if source.cache is not None or model.location.fetch_uri is None or model.weights_file_bytes is None:
        return {}
    return {"ephemeral-storage": _room(model.weights_file_bytes)}


def _size_limit(model: Model) -> Manifest:
    return {} if model.weights_file_bytes is None else {"sizeLimit": _room(model.weights_file_bytes)}


def _room(weights_file_bytes: int) -> str:
    """The weights, and a tenth and a GiB for tokenizer and configuration."""
    return f"{-(-(weights_file_bytes * 11 // 10 + _GIB) // _MIB)}Mi"


def _environment(source: ModelSource, location: ModelLocation) -> list[Manifest]:
    if location.kind == "s3":
        return _s3_environment(source)
    env = _hub_environment(location)
    if secret := source.secret_ref:
        reference = {"secretKeyRef": {"name": secret.name, "key": "token"}}
        env += [{"name": "LLMSERVICE_SECRET", "value": secret.name}, {"name": "HF_TOKEN", "valueFrom": reference}]
    return env


def _hub_environment(location: ModelLocation) -> list[Manifest]:
    return [] if location.hf_endpoint is None else [{"name": "HF_ENDPOINT", "value": location.hf_endpoint}]


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


ADAPTER_LIST_KEY = "adapters.json"
_ADAPTER_LIST_MOUNT = "/etc/llmservice/adapters"
_ADAPTERS_MOUNT = "/adapters"


def adapter_list_name(service: LLMService) -> str:
    return f"{service.name}-adapters"


def adapter_args(service: LLMService) -> list[str]:
    """The server's flags; empty without slots for adapters."""
    spec = service.spec
    if not spec.max_loras:
        return []
    return [
        *("--max-loras", str(spec.max_loras)),
        *("--max-lora-rank", str(spec.engine.max_lora_rank)),
        *(("--lora-experts",) if spec.engine.lora_experts else ()),
        *("--adapters-file", f"{_ADAPTER_LIST_MOUNT}/{ADAPTER_LIST_KEY}"),
        *("--adapters-dir", _ADAPTERS_MOUNT),
    ]


def adapter_volumes(service: LLMService) -> list[Manifest]:
    """The list, which the kubelet updates in running pods, and room for the files that the server fetches."""
    if not service.spec.max_loras:
        return []
    return [
        {"name": "adapter-list", "configMap": {"name": adapter_list_name(service)}},
        {"name": "adapters", "emptyDir": {}},
    ]


def adapter_mounts(service: LLMService) -> list[Manifest]:
    if not service.spec.max_loras:
        return []
    return [
        {"name": "adapter-list", "mountPath": _ADAPTER_LIST_MOUNT, "readOnly": True},
        {"name": "adapters", "mountPath": _ADAPTERS_MOUNT},
    ]


def adapter_environment(service: LLMService, location: ModelLocation) -> list[Manifest]:
    """Of the server, which fetches adapters: the hub and the model's store, without credentials.

    The hub also where no adapter is from there: one that is added must not restart the pods.
    """
    if not service.spec.max_loras:
        return []
    env = [*_hub_environment(location), *_s3_environment(service.spec.model)]
    return [one for one in env if one["name"] in _STORES]


TMP_MOUNT = "/tmp"  # noqa: S108 - a volume of the pod's own
CACHE_MOUNT = "/cache"
SHM_MOUNT = "/dev/shm"  # noqa: S108 - a volume of the pod's own

_TMP_SIZE = "1Gi"
_CACHE_SIZE = "4Gi"
_SHM_SIZE = "256Mi"
_SHM_GIB_PER_GPU = 1
_CACHES = {
    "HOME": CACHE_MOUNT,
    "XDG_CACHE_HOME": CACHE_MOUNT,
    "HF_HOME": f"{CACHE_MOUNT}/huggingface",
    "TRITON_CACHE_DIR": f"{CACHE_MOUNT}/triton",
    "TORCHINDUCTOR_CACHE_DIR": f"{CACHE_MOUNT}/torchinductor",
}


def scratch_volumes(service: LLMService, sized: Sized) -> list[Manifest]:
    """Each with a limit, so that a pod is evicted before it fills the node's disk."""
    shm = {"medium": "Memory", "sizeLimit": _shm_size(service, sized)}
    return [
        {"name": "tmp", "emptyDir": {"sizeLimit": _TMP_SIZE}},
        {"name": "cache", "emptyDir": {"sizeLimit": _CACHE_SIZE}},
        {"name": "shm", "emptyDir": shm},
    ]


def scratch_mounts() -> list[Manifest]:
    return [
        {"name": "tmp", "mountPath": TMP_MOUNT},
        {"name": "cache", "mountPath": CACHE_MOUNT},
        {"name": "shm", "mountPath": SHM_MOUNT},
    ]


def scratch_environment() -> list[Manifest]:
    """Writable folders for the caches of libraries, whose default is the read-only home."""
    return [{"name": name, "value": value} for name, value in _CACHES.items()]


def _shm_size(service: LLMService, sized: Sized) -> str:
    """For processes that exchange tensors between GPUs. Its use counts as the pod's memory."""
    gpu = service.spec.resources.gpu
    return f"{_SHM_GIB_PER_GPU * gpu.count}Gi" if isinstance(sized.device, GPU) and gpu else _SHM_SIZE
