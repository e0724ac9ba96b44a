"""How much memory a step takes, how much that leaves for the KV cache, and what the cache holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from llmservice_planner.model.block_groups import BlockGroups
from llmservice_planner.sizing.explanation import format_bytes
from llmservice_planner.sizing.overhead import PROCESS_BYTES
from llmservice_planner.sizing.request import LEAST_SEQUENCE_TOKENS
from llmservice_server.backend.base import Backend, Model
from llmservice_server.engine.config import EngineConfig
from llmservice_server.engine.interfaces import KVCachePlan
from llmservice_server.runtime.embedding_model import EmbeddingModel
from llmservice_server.runtime.runner import ModelRunner, staging_bytes
from llmservice_server.runtime.vector_format import VectorFormat
from llmservice_server.types.errors import OutOfMemoryError

_PROBE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the device: what there is to use at start, and what is taken of it."""

    total: int
    weights: int
    activations: int
    graphs: int = 0  # CUDA's, of decode steps
    adapters: int = 0  # slots of LoRA adapters
    processes: int = 0  # Python, PyTorch and the tokenizer, where they live in the same memory

    @property
    def besides_kv_cache(self) -> int:
        return self.weights + self.adapters + self.activations + self.graphs + self.processes


def usable_bytes(config: EngineConfig, available: int, *, shares_memory: bool) -> tuple[int, int]:
    """What may be used of `available` bytes, and the part of it that this server's processes take.

    The limit in `config` is of the whole pod, its processes included; what is available was counted without them.
    """
    if config.memory_limit_bytes is None:
        return available, 0
    processes = PROCESS_BYTES if shares_memory else 0
    return min(available + processes, config.memory_limit_bytes), processes


def measure_activations(model: Model, backend: Backend, config: EngineConfig) -> int:
    """Bytes that a full step takes beside the weights: measured, or estimated where that would take long."""
    runner, step, cache_bytes = _full_step(model, backend, config)
    if backend.profile_limit_s is not None:
        num_tokens = min(_PROBE_TOKENS, config.block_size)
        for _ in range(2):  # the first pays for lazy initialisation
            probe_s = seconds(lambda: runner.dummy_step(num_tokens, 1, num_tokens, config.block_size), backend)
        if probe_s / num_tokens * config.step_tokens > backend.profile_limit_s:
            return _estimate(model, config)
    taken = backend.step_bytes(step, cache_bytes=cache_bytes, weight_bytes=model.weight_bytes)
    if taken is None:
        return _estimate(model, config)
    if backend.shares_memory:  # the allocator hides what the sampler adds to it
        return max(taken, config.most_seqs * model.config.vocab_size * 4)
    masks = config.most_seqs * model.config.vocab_size // 8  # of grammars, a bit for each token
    return taken + masks + (staging_bytes(backend.shape) if config.swap_space_gib else 0)


def seconds(work: Callable[[], object], backend: Backend) -> float:
    """The seconds that `work` takes on the device."""
    started_s = time.perf_counter()
    work()
    backend.synchronize()
    return time.perf_counter() - started_s


def _full_step(model: Model, backend: Backend, config: EngineConfig) -> tuple[ModelRunner, Callable[[], None], int]:
    """The largest step that the scheduler may plan, ready to be taken, and the bytes of the KV cache that it fills."""
    longest = min(config.max_model_len or model.config.max_context, config.step_tokens)
    blocks_each = -(-longest // config.block_size)
    num_blocks = 1 + blocks_each * -(-config.step_tokens // longest)
    runner = ModelRunner(model, backend.attention(num_blocks), backend)

    def step() -> None:
        runner.dummy_step(config.step_tokens, config.most_seqs, longest, config.block_size)
        if not backend.shares_memory:  # inputs of /v1/embeddings are computed between steps, without the KV cache
            embedding = EmbeddingModel(model, VectorFormat.plain(model.config.hidden_size))
            embedding.embed([[0] * longest] * (config.step_tokens // longest))

    return runner, step, num_blocks * backend.shape.bytes_per_block


def _estimate(model: Model, config: EngineConfig) -> int:
    """Of a step's intermediates on a CPU, where measuring them would take long.

    A layer holds a few tensors of all tokens' rows at a time, the widest of them the fused projections; the sampler
    holds float32 logits of all sequences about three times over.
    """
    shape = model.config
    widest = max(shape.mlp_width, (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim)
    layer_bytes = 4 * config.step_tokens * widest * model.dtype.itemsize
    return layer_bytes + 3 * config.most_seqs * shape.vocab_size * 4


def plan_kv_cache(
    pool_bytes: int, *, bytes_per_block: int, groups: BlockGroups, max_model_len: int, may_shorten: bool
) -> KVCachePlan:
    """Divide `pool_bytes` into blocks, so that one request of `max_model_len` tokens always fits.

    Where it does not, `max_model_len` is lowered if it `may_shorten`; else raises `OutOfMemoryError` with the longest
    length that would fit.
    """
    num_blocks = max(0, pool_bytes) // bytes_per_block
    longest = groups.longest(num_blocks - 1, max_model_len)
    if longest == max_model_len or (may_shorten and longest > 0):
        return KVCachePlan(num_blocks, longest, groups)
    need = (groups.blocks(max_model_len) + 1) * bytes_per_block
    remedy = f"lower it to {longest} or" if longest > 0 else "it leaves room for no block at all:"
    raise OutOfMemoryError(
        f"max_model_len {max_model_len} needs {format_bytes(need)} of KV cache, {format_bytes(pool_bytes)} is left: "
        f"{remedy} give the engine more memory (--kv-cache-memory, --gpu-memory-utilization)"
    )


def most_sequences(kv_cache: KVCachePlan, most: int) -> int:
    """How many sequences may run at once: as many short ones as the pool holds, from 1 to `most`.

    Fewer run where requests are longer: the scheduler admits what the pool is predicted to hold.
    """
    blocks_each = kv_cache.groups.blocks(min(LEAST_SEQUENCE_TOKENS, kv_cache.max_model_len))
    return max(1, min(most, kv_cache.num_usable_blocks // blocks_each))
