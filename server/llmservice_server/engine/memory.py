"""How much memory there is for the KV cache, and what it holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llmservice_server.engine.errors import OutOfMemoryError

GIB = 1 << 30
_UNLIMITED = 1 << 60  # cgroup v1 says "no limit" with a number near 2**63


@dataclass(frozen=True, slots=True)
class KVCachePlan:
    """What the engine allocates, and what it promises on the strength of it."""

    num_blocks: int  # the null block included
    max_model_len: int

    @property
    def num_usable_blocks(self) -> int:
        return self.num_blocks - 1


def plan_kv_cache(
    pool_bytes: int,
    *,
    bytes_per_block: int,
    block_size: int,
    max_model_len: int,
    may_shorten: bool,
) -> KVCachePlan:
    """Divide `pool_bytes` into blocks, so that one request of `max_model_len` tokens always fits.

    Where it does not, `max_model_len` is lowered if it `may_shorten`; else raises `OutOfMemoryError` with the longest
    length that would fit.
    """
    num_blocks = max(0, pool_bytes) // bytes_per_block
    longest = max(0, num_blocks - 1) * block_size
    if longest >= max_model_len:
        return KVCachePlan(num_blocks, max_model_len)
    if may_shorten and longest > 0:
        return KVCachePlan(num_blocks, longest)
    need = (-(-max_model_len // block_size) + 1) * bytes_per_block
    remedy = f"lower it to {longest} or" if longest > 0 else "it leaves room for no block at all:"
    raise OutOfMemoryError(
        f"max_model_len {max_model_len} needs {_size(need)} of KV cache, {_size(pool_bytes)} is left: {remedy} give "
        "the engine more memory (--kv-cache-memory, --gpu-memory-utilization)"
    )


def sequences_held(kv_cache: KVCachePlan, block_size: int, expected_tokens: int, most: int) -> int:
    """How many sequences of `expected_tokens` the pool holds: 1 to `most`. The planner's policy `expected`.

    Where requests cannot be longer than that anyhow it is the policy `guaranteed`: none is ever preempted.
    """
    blocks_each = -(-min(expected_tokens, kv_cache.max_model_len) // block_size)
    return max(1, min(most, kv_cache.num_usable_blocks // blocks_each))


@dataclass(frozen=True, slots=True)
class _CgroupFiles:
    """Where cgroups of one version say what is allowed, what is charged, and what of that the kernel drops first."""

    limit: str
    usage: str
    stat: str
    reclaimable: str


_CGROUPS = (
    _CgroupFiles("memory.max", "memory.current", "memory.stat", "inactive_file"),  # v2
    _CgroupFiles(
        "memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"
    ),  # v1
)


def available_cpu_bytes(root: Path = Path("/")) -> int:
    """What this process may still take: the machine's free memory, or the rest of its cgroup's where that is less.

    A model file just downloaded is charged to the cgroup as page cache; it goes when memory is asked for, so it counts
    as free, as it does for the kubelet's working set.
    """
    machine = _mem_available(root / "proc/meminfo")
    for files in _CGROUPS:
        limit = _number(root / "sys/fs/cgroup" / files.limit)
        if limit is not None and limit < _UNLIMITED:
            usage = _number(root / "sys/fs/cgroup" / files.usage) or 0
            usage -= _stat(root / "sys/fs/cgroup" / files.stat, files.reclaimable)
            return min(machine, max(0, limit - max(0, usage)))
    return machine


def _stat(path: Path, name: str) -> int:
    """One figure of a file of `name value` lines; 0 where it is absent."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), 0)


def activation_bytes(num_tokens: int, num_seqs: int, widest: int, vocab_size: int, itemsize: int) -> int:
    """An estimate of a step's intermediates on CPU, for models with which measuring them would take long.

    A layer holds a few tensors of `num_tokens` rows at a time, the widest of them the fused projections; the sampler
    holds float32 logits of `num_seqs` rows about three times over.
    """
    return 4 * num_tokens * widest * itemsize + 3 * num_seqs * vocab_size * 4


def peak_growth_bytes(work: Callable[[], None], proc: Path = Path("/proc/self")) -> int | None:
    """How far the process's resident memory rises above today's while `work` runs; None where the kernel can't tell."""
    try:
        (proc / "clear_refs").write_text("5")  # proc(5): the peak, VmHWM, is from now on
        before = _stat(proc / "status", "VmRSS:")
    except OSError:
        return None
    work()
    return (_stat(proc / "status", "VmHWM:") - before) * 1024


def _mem_available(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OutOfMemoryError(f"{meminfo} does not say what memory is available: give --kv-cache-memory")


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max": no limit
        return None


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB // 10 else f"{num_bytes / (1 << 20):.2f} MiB"
