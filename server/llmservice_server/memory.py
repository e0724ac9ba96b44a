"""How much memory there is for the KV cache, and what it holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llmservice_server.errors import OutOfMemoryError

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
    most_blocks: int | None = None,
) -> KVCachePlan:
    """Divide `pool_bytes` into blocks, so that one request of `max_model_len` tokens always fits.

    Where it does not, `max_model_len` is lowered if it `may_shorten`; else raises `OutOfMemoryError` with the longest
    length that would fit. `most_blocks` bounds the pool where more could never be used.
    """
    num_blocks = max(0, pool_bytes) // bytes_per_block
    if most_blocks is not None:
        num_blocks = min(num_blocks, most_blocks)
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


def available_cpu_bytes(root: Path = Path("/")) -> int:
    """What this process may still take: the machine's free memory, or the rest of its cgroup's (v2, v1) if less."""
    limits = [_mem_available(root / "proc/meminfo")]
    for limit, usage in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        maximum = _number(root / "sys/fs/cgroup" / limit)
        if maximum is not None and maximum < _UNLIMITED:
            limits.append(max(0, maximum - (_number(root / "sys/fs/cgroup" / usage) or 0)))
            break
    return min(limits)


def activation_bytes(num_tokens: int, num_seqs: int, widest: int, vocab_size: int, itemsize: int) -> int:
    """An estimate of a step's intermediates on CPU, where no allocator counts them.

    A layer holds a few tensors of `num_tokens` rows at a time, the widest of them the fused projections; the sampler
    holds float32 logits of `num_seqs` rows about three times over.
    """
    return 4 * num_tokens * widest * itemsize + 3 * num_seqs * vocab_size * 4


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
