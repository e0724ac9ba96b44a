"""What a pod may write to, its root being read-only: temporary files, caches of compiled code, shared memory."""

from __future__ import annotations

from llmservice_operator.api.resource import LLMService
from llmservice_operator.api.spec import Manifest
from llmservice_operator.sizing.sizing import Sized
from llmservice_planner.gpu import GPU

TMP_MOUNT = "/tmp"  # noqa: S108 - a volume of the pod's own
CACHE_MOUNT = "/cache"
SHM_MOUNT = "/dev/shm"  # noqa: S108 - a volume of the pod's own

_TMP_SIZE = "1Gi"
_CACHE_SIZE = "4Gi"
_SHM_SIZE = "256Mi"
_SHM_GIB_PER_CARD = 1
_CACHES = {
    "HOME": CACHE_MOUNT,
    "XDG_CACHE_HOME": CACHE_MOUNT,
    "HF_HOME": f"{CACHE_MOUNT}/huggingface",
    "TRITON_CACHE_DIR": f"{CACHE_MOUNT}/triton",
    "TORCHINDUCTOR_CACHE_DIR": f"{CACHE_MOUNT}/torchinductor",
}


def scratch_volumes(service: LLMService, sized: Sized) -> list[Manifest]:
    """Each with a limit: a pod that writes past it is evicted, rather than its node filled."""
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
    """Where libraries put what they would otherwise put below a home that can't be written to."""
    return [{"name": name, "value": value} for name, value in _CACHES.items()]


def _shm_size(service: LLMService, sized: Sized) -> str:
    """Processes that drive cards exchange tensors by it. What is used of it counts as the pod's memory."""
    gpu = service.spec.resources.gpu
    return f"{_SHM_GIB_PER_CARD * gpu.count}Gi" if isinstance(sized.device, GPU) and gpu else _SHM_SIZE
