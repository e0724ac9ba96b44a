"""Start-up: read the checkpoint, load the weights, measure the memory left, allocate the KV cache."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from llmservice_planner.model.config import max_seq_length
from llmservice_planner.model.encoders import SENTENCES
from llmservice_planner.sizing.explanation import format_bytes
from llmservice_planner.sizing.gpu import GIB
from llmservice_planner.sizing.request import CAP_OF_CPU
from llmservice_server.backend.base import Attention, Backend, Model
from llmservice_server.backend.cache_shape import KVCacheShape
from llmservice_server.backend.choice import choose_backend
from llmservice_server.backend.compile_cache import COMPILATIONS, share
from llmservice_server.backend.quantized import QuantizedWeight
from llmservice_server.backend.torch.memory import available_cpu_bytes
from llmservice_server.engine.block_pool import PreemptionCost, SwapSpace
from llmservice_server.engine.config import EngineConfig
from llmservice_server.engine.engine import Engine
from llmservice_server.engine.interfaces import BlockCopy, KVCachePlan, Plan, Started
from llmservice_server.models.lora import Adaptables, AdapterSlots, can_apply_by_row
from llmservice_server.runtime.adapters import SlotStore
from llmservice_server.runtime.embedding_model import EmbeddingModel
from llmservice_server.runtime.embeddings import BatchEmbedder
from llmservice_server.runtime.loader import Checkpoint
from llmservice_server.runtime.memory import (
    Memory,
    measure_activations,
    most_sequences,
    plan_kv_cache,
    seconds,
    usable_bytes,
)
from llmservice_server.runtime.runner import ModelRunner, SwappedBlocks
from llmservice_server.runtime.start_record import StartRecord
from llmservice_server.runtime.vector_format import VectorFormat
from llmservice_server.sampling.grammar import GrammarCompiler
from llmservice_server.types.checkpoint_config import as_load_errors, read_json_object
from llmservice_server.types.errors import ConfigError, ModelLoadError, OutOfMemoryError

_LOG = logging.getLogger(__name__)
_WARM_UP_TOKENS = 16  # the first step pays for lazy initialisation, a request should not
_WORTH_COMPILING_BYTES = 64 << 20
"""Of weights. What a step of a smaller model saves never makes up for the time in which its kernels are compiled."""


class StartPhases:
    """Seconds by phase, in the order in which they began."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What runs inside is counted to `name`, also where it raises."""
        started_s = self._clock()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self._clock() - started_s

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        return f"{sum(self.seconds.values()):.1f} s ({parts})"


def load_engine(config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> Engine:
    """An engine that is ready to serve. Raises `StartError` with what is wrong, expected and to be done."""
    config = with_step_tokens(config, choose_device(config))
    return Engine(config, start(config), clock)


def with_step_tokens(config: EngineConfig, device: torch.device) -> EngineConfig:
    """With the defaults of this device where none are set."""
    if device.type != "cuda":
        return config
    return config.for_gpu(torch.cuda.get_device_properties(device).total_memory)


def model_runner(engine: Engine) -> ModelRunner:
    """The runner of an engine of `load_engine`. Raises TypeError where it is another `Runner`."""
    if not isinstance(engine.runner, ModelRunner):
        raise TypeError(f"the engine's runner is a {type(engine.runner).__name__}, which has no model")
    return engine.runner


def start(config: EngineConfig) -> Started:
    """Load a model and allocate its KV cache. Raises `StartError` with what is wrong, expected and to be done."""
    began_s, compiled_s = time.monotonic(), COMPILATIONS.seconds  # importing kernels compiles some
    if config.compile_cache is not None:
        share(config.compile_cache)
    checkpoint = Checkpoint.open(config.model, config.implementation)
    check_context(config, checkpoint.config.max_context)
    phases = StartPhases()
    with phases.phase("backend"):
        backend = _backend(checkpoint, config)
    if config.quantization == "int8" and not backend.keeps(QuantizedWeight.int8(torch.zeros(64, 64))):
        raise ConfigError(
            f"quantization is int8, but the backend {backend.name} has no fast product of 8-bit integers here (a CPU "
            "needs AVX-512 VNNI): use --quantization auto"
        )
    _LOG.log(logging.WARNING if backend.fallbacks else logging.INFO, "backend: %s (%s)", backend.name, backend.reason)
    model, memory, slots = _load(checkpoint, config, backend, phases)
    kv_cache = _plan(config, checkpoint.config.max_context, backend, memory)
    most_seqs = min(config.most_seqs, CAP_OF_CPU) if backend.shares_memory else config.most_seqs
    max_num_seqs = config.max_num_seqs or most_sequences(kv_cache, most_seqs)
    with phases.phase("KV cache"):
        attention = _attention(backend, kv_cache.num_blocks)
        swapped_blocks = _swapped_blocks(config, backend, attention, memory)
    runner = ModelRunner(model, attention, backend, swapped_blocks)
    with phases.phase("decode path"):
        memory = _make_decode_path(runner, slots, max_num_seqs, kv_cache, memory)
    with phases.phase("warm-up"):
        _warm_up(runner, config, kv_cache)
    started = Started(
        runner=runner,
        embedder=_embedder(runner, config, kv_cache),
        grammars=GrammarCompiler(config.tokenizer or config.model, checkpoint.config.vocab_size),
        kv_cache=kv_cache,
        max_num_seqs=max_num_seqs,
        memory_bytes={
            "weights": memory.weights,
            "kv_cache": sum(cache.nbytes for cache in attention.caches),
            "activations": memory.activations,
            "graphs": memory.graphs,
            **({} if slots is None else {"adapters": memory.adapters}),
            "total": memory.total,
        },
        vocab_size=checkpoint.config.vocab_size,
        eos_token_ids=checkpoint.eos_token_ids,
        architecture=checkpoint.config.architecture,
        model_code=checkpoint.config.implementation,
        task="generate" if checkpoint.config.has_head else "embed",
        swap=_swap_space(runner, config, kv_cache),
        adapters=None if slots is None else SlotStore(slots),
        overlaps=backend.overlaps,
        prefill_tokens=backend.prefill_tokens,
        load_s=time.monotonic() - began_s - (COMPILATIONS.seconds - compiled_s),
        compile_s=COMPILATIONS.seconds,
        kernels_compiled=COMPILATIONS.compiled,
        kernels_loaded=COMPILATIONS.loaded,
        fallbacks=dict(backend.fallbacks),
        phases_s=phases.seconds,
    )
    _LOG.info(
        "%s (%s) on %s in %s: weights %.2f GiB, KV cache %.2f GiB in %d blocks of %d, max_model_len %d, "
        "max_num_seqs %d",
        checkpoint.config.architecture,
        "own implementation" if started.model_code == "own" else "by transformers",
        backend.device,
        model.dtype,
        memory.weights / GIB,
        started.memory_bytes["kv_cache"] / GIB,
        kv_cache.num_usable_blocks,
        config.block_size,
        kv_cache.max_model_len,
        max_num_seqs,
    )
    _LOG.info(
        "the engine took %s; %d kernels compiled in %.1f s, %d loaded from the cache",
        phases,
        started.kernels_compiled,
        started.compile_s,
        started.kernels_loaded,
    )
    return started


def check_context(config: EngineConfig, context: int) -> None:
    """Raises `ConfigError` for requests longer than the model's context."""
    if config.max_model_len is not None and config.max_model_len > context:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is beyond the model's context of {context} tokens: lower it"
        )


def _backend(checkpoint: Checkpoint, config: EngineConfig) -> Backend:
    shape = KVCacheShape.of(checkpoint.config, config.block_size, _kv_cache_dtype(checkpoint, config))
    if shape.in_chunks and any(size is not None and size % shape.block_size for size in shape.windows):
        raise ConfigError(
            f"block_size is {shape.block_size}, and the model's attention_chunk_size {max(filter(None, shape.windows))}"
            " is no multiple of it: choose one that divides it"
        )
    return choose_backend(
        config.attention,
        shape,
        checkpoint.dtype(config.dtype),
        choose_device(config),
        max_num_batched_tokens=config.step_tokens,
        worth_compiling=checkpoint.weight_file_bytes >= _WORTH_COMPILING_BYTES,
        enforce_eager=config.enforce_eager,
    )


def _kv_cache_dtype(checkpoint: Checkpoint, config: EngineConfig) -> torch.dtype:
    if config.kv_cache_dtype == "fp8":
        return torch.float8_e4m3fn
    return checkpoint.dtype(config.dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype)


def choose_device(config: EngineConfig) -> torch.device:
    """The device of the settings, with torch's threads set to theirs. Raises `ConfigError` where there is none such."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device is cuda, but this machine has no usable CUDA device: use --device cpu, or check the driver"
        )
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if config.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda")


def _load(
    checkpoint: Checkpoint, config: EngineConfig, backend: Backend, phases: StartPhases
) -> tuple[Model, Memory, AdapterSlots | None]:
    """Load the weights, measure what a full step needs beside them, and allocate the slots of adapters."""
    total, processes = usable_bytes(config, backend.total_bytes(), shares_memory=backend.shares_memory)
    dtype = checkpoint.dtype(config.dtype)
    held = checkpoint.held_bytes(dtype, config.quantization, on_cpu=backend.shares_memory)
    if held > total:
        raise OutOfMemoryError(
            f"the weights are {format_bytes(held)}, but only {format_bytes(total)} of memory "
            "can be used: use a smaller model or more memory"
        )
    try:
        with phases.phase("weights"):
            model = checkpoint.load(
                dtype, backend.device, config.quantization, backend.keeps, max_model_len=config.max_model_len
            )
            adaptables = Adaptables.of(model) if config.max_loras else None
            if adaptables is not None and config.lora_experts and not adaptables.experts:
                raise ConfigError("lora_experts is set, but this model has no experts that adapters can change")
            backend.prepare(model)
            backend.release_memory()  # of what was converted
        with phases.phase("profiling"):
            activations = measure_activations(model, backend, config)
            max_model_len = config.max_model_len or model.config.max_context
            adapts = adaptables is not None and can_apply_by_row(
                config.max_loras, config.max_lora_rank, with_experts=config.lora_experts
            )
            graphs = backend.decode_path_bytes(
                model, max_num_seqs=config.most_seqs, max_model_len=max_model_len, adapts=adapts
            )
        slots, adapters = None, 0
        if adaptables is not None:
            with phases.phase("adapter slots"):
                slots = AdapterSlots(
                    adaptables,
                    config.max_loras,
                    config.max_lora_rank,
                    model.dtype,
                    model.device,
                    with_experts=config.lora_experts,
                )
            adapters = slots.nbytes
            if backend.shares_memory:  # one more is read at a time
                adapters += slots.nbytes // slots.num_slots
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"the weights and a step of {config.step_tokens} tokens do not fit into the device's "
            f"{format_bytes(total)}: use a smaller model or lower max_num_batched_tokens"
            + (", or fewer or smaller slots for adapters (max_loras, max_lora_rank)" if config.max_loras else "")
        ) from error
    return model, Memory(total, model.weight_bytes, activations, graphs, adapters, processes), slots


def _make_decode_path(
    runner: ModelRunner, slots: AdapterSlots | None, max_num_seqs: int, kv_cache: KVCachePlan, memory: Memory
) -> Memory:
    """Set the runner's decode path and adapters; returns `memory` with the measured size of graphs, not the predicted.

    The path is made of the model without adapters.
    """
    backend = runner.backend
    before = backend.free_bytes()
    runner.decode_path = backend.decode_path(
        runner.model, runner.attention, max_num_seqs=max_num_seqs, max_model_len=kv_cache.max_model_len
    )
    if slots is not None:
        slots.install(runner.model)
        runner.adapters = slots
        if runner.decode_path is not None and slots.apply_by_row:
            runner.decode_path.adapt(slots)
    if memory.graphs == 0:
        return memory
    taken = max(0, before - backend.free_bytes())
    _LOG.info("CUDA graphs take %.2f GiB, %.2f were set aside", taken / GIB, memory.graphs / GIB)
    return replace(memory, graphs=taken)


def _warm_up(runner: ModelRunner, config: EngineConfig, kv_cache: KVCachePlan) -> None:
    num_tokens = min(_WARM_UP_TOKENS, kv_cache.num_usable_blocks * config.block_size)
    if not runner.warm_up(num_tokens, config.block_size):
        raise ModelLoadError(
            f"the model's logits are not finite in its first step in {runner.model.dtype}, so it could answer nothing: "
            "look for NaN and infinity in the checkpoint's weights, or try another --dtype"
        )


def _embedder(runner: ModelRunner, config: EngineConfig, kv_cache: KVCachePlan) -> BatchEmbedder:
    vector_format = VectorFormat.of(config.model, config.pooling, runner.model.config.hidden_size, default="last")
    vector_format.modules.to(runner.model.device)
    sentences = {name: read_json_object(path) for name in SENTENCES if (path := config.model / name).is_file()}
    for name, content in sentences.items():
        if content.get("processing_kwargs"):  # of a model that also generates, for which they mean nothing
            _LOG.warning("%s: processing_kwargs have no effect on /v1/embeddings", name)
    with as_load_errors():
        cut = max_seq_length(sentences)
    longest = min(kv_cache.max_model_len, config.step_tokens)
    return BatchEmbedder(
        EmbeddingModel(runner.model, vector_format),
        runner.recover,
        vocab_size=runner.model.config.vocab_size,
        max_tokens=longest if cut is None else min(cut, longest),
        max_batch_tokens=config.step_tokens,
        window_s=config.embedding_window_s,
    )


def _attention(backend: Backend, num_blocks: int) -> Attention:
    try:
        return backend.attention(num_blocks)
    except RuntimeError as error:  # torch's type for it on CPU; on CUDA a subclass
        size = num_blocks * backend.shape.bytes_per_block / GIB
        raise OutOfMemoryError(
            f"the KV cache of {size:.2f} GiB cannot be allocated on {backend.device}: "
            "lower --kv-cache-memory or --gpu-memory-utilization"
        ) from error


def _swapped_blocks(
    config: EngineConfig, backend: Backend, attention: Attention, memory: Memory
) -> SwappedBlocks | None:
    num_bytes = int(config.swap_space_gib * GIB)
    num_blocks = num_bytes // backend.shape.bytes_per_block
    if num_blocks == 0:
        return None
    left = available_cpu_bytes()
    if backend.shares_memory:  # the KV cache's memory is reserved, but not yet touched
        left -= len(attention.caches) * attention.caches[0].nbytes + memory.activations
    if num_bytes > left:
        raise OutOfMemoryError(
            f"--swap-space-gib asks for {num_bytes / GIB:.2f} GiB of CPU memory, {max(0, left) / GIB:.2f} GiB is left: "
            "lower it, or give the engine more memory"
        )
    return SwappedBlocks(attention.caches, num_blocks)


def _swap_space(runner: ModelRunner, config: EngineConfig, kv_cache: KVCachePlan) -> SwapSpace | None:
    """With what it costs to copy a block and to compute a token, from one step and one copy; nothing is cached yet."""
    if runner.swapped_blocks is None:
        return None
    backend = runner.backend
    num_tokens = min(
        _WARM_UP_TOKENS if backend.shares_memory else config.chunk_tokens,
        kv_cache.num_usable_blocks * config.block_size,
    )
    computing_s = seconds(lambda: runner.dummy_step(num_tokens, 1, num_tokens, config.block_size), backend)
    copies = [BlockCopy(0, 0)]
    plan = Plan(swap_out=copies, swap_in=copies)  # the null block: out and in again
    seconds(lambda: runner.swap(plan), backend)
    copying_s = seconds(lambda: runner.swap(plan), backend) / 2
    return SwapSpace(runner.swapped_blocks.num_blocks, PreemptionCost(copying_s, computing_s / num_tokens))


def _plan(config: EngineConfig, context: int, backend: Backend, memory: Memory) -> KVCachePlan:
    shape, wanted = backend.shape, config.max_model_len or context
    groups = shape.block_groups(config.step_tokens)
    if config.kv_cache_memory_bytes is not None:
        pool_bytes = config.kv_cache_memory_bytes
        left = memory.total - memory.besides_kv_cache
        if pool_bytes > left:  # torch would allocate it, and the kernel would kill the process once it is used
            raise OutOfMemoryError(
                f"--kv-cache-memory asks for {format_bytes(pool_bytes)}, the rest leaves {format_bytes(left)} "
                f"of {format_bytes(memory.total)}: lower it, or give the engine more memory"
            )
    else:
        pool_bytes = int(memory.total * config.gpu_memory_utilization) - memory.besides_kv_cache
        if backend.shares_memory:  # no more than the sequences can ever use
            most_blocks = 1 + config.most_seqs * groups.blocks(wanted)
            pool_bytes = min(pool_bytes, most_blocks * shape.bytes_per_block)
    if backend.shares_memory:
        least = (1 + groups.blocks(wanted)) * shape.bytes_per_block
        pool_bytes = StartRecord(config.start_record).begin(pool_bytes, least)
    plan = plan_kv_cache(
        pool_bytes,
        bytes_per_block=shape.bytes_per_block,
        groups=groups,
        max_model_len=wanted,
        may_shorten=config.max_model_len is None,
    )
    if plan.max_model_len < wanted:
        _LOG.warning(
            "max_model_len lowered from the model's %d to %d tokens: that is what the KV cache holds; "
            "more memory, or a smaller model, allows more",
            wanted,
            plan.max_model_len,
        )
    return plan
