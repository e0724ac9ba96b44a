"""Memory of a device: how much is available, and how much a function needs."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from llmservice_server.types.errors import OutOfMemoryError

_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a number near 2**63


@dataclass(frozen=True, slots=True)
class _CgroupFiles:
    """The files of one cgroup version: limit, usage, and the part of usage that the kernel reclaims first."""

    limit: str
    usage: str
    stat: str
    reclaimable: str


_CGROUP_2 = _CgroupFiles("memory.max", "memory.current", "memory.stat", "inactive_file")
_CGROUP_1 = _CgroupFiles(
    "memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"
)


def available_cpu_bytes(root: Path = Path("/")) -> int:
    """The memory that this process can allocate: the machine's, or its cgroup's if that is less.

    A model file just downloaded is charged to the cgroup as page cache, which the kernel reclaims on demand; it counts
    as available, as it does for the kubelet's working set.
    """
    meminfo = root / "proc/meminfo"
    machine = _stat(meminfo, "MemAvailable:") * 1024
    if not machine:
        raise OutOfMemoryError(f"{meminfo} has no line MemAvailable: set --kv-cache-memory")
    for files in (_CGROUP_2, _CGROUP_1):
        limit = _number(root / "sys/fs/cgroup" / files.limit)
        if limit is not None and limit < _UNLIMITED:
            usage = _number(root / "sys/fs/cgroup" / files.usage) or 0
            usage -= _stat(root / "sys/fs/cgroup" / files.stat, files.reclaimable)
            return min(machine, max(0, limit - max(0, usage)))
    return machine


def peak_growth_bytes(work: Callable[[], None], proc: Path = Path("/proc/self")) -> int | None:
    """The growth of the process's resident memory while `work` runs; None if the kernel does not report it."""
    try:
        (proc / "clear_refs").write_text("5")  # proc(5): the peak, VmHWM, is from now on
        before = _stat(proc / "status", "VmRSS:")
    except OSError:
        return None
    work()
    return (_stat(proc / "status", "VmHWM:") - before) * 1024


def trim_heap() -> None:
    """Give freed memory back to the system, of which glibc keeps what lies between blocks in use; others do nothing."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def cuda_step_bytes(step: Callable[[], None], device: torch.device, *, cache_bytes: int, weight_bytes: int) -> int:
    """The memory of a step besides weights and cache, including CUDA's context and other users of the GPU."""
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - cache_bytes
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    outside_torch = total - free - torch.cuda.memory_reserved(device)
    return max(0, peak - weight_bytes) + outside_torch


def cuda_free_bytes(device: torch.device) -> int:
    """The GPU's free memory, after its work is done and torch has released its cached memory."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def _stat(path: Path, name: str) -> int:
    """A number in a file of `name value` lines; 0 if it is absent."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), 0)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max": no limit
        return None
