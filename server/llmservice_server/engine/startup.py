"""What happens once: read the checkpoint, load the weights, see what memory is left, allocate the KV cache."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from llmservice_planner.explanation import format_bytes
from llmservice_planner.overhead import PROCESS_BYTES
from llmservice_server.attention.base import AttentionBackend, KVCacheShape
from llmservice_server.attention.choice import AttentionChoice, choose_attention
from llmservice_server.attention.swapped_blocks import SwappedBlocks
from llmservice_server.engine.config import EngineConfig
from llmservice_server.engine.errors import ConfigError, ModelLoadError, OutOfMemoryError
from llmservice_server.engine.loader import Checkpoint
from llmservice_server.engine.memory import (
    GIB,
    KVCachePlan,
    activation_bytes,
    available_cpu_bytes,
    peak_growth_bytes,
    plan_kv_cache,
    sequences_held,
)
from llmservice_server.engine.plan import BlockCopy, Plan
from llmservice_server.engine.runner import DecodePath, ModelRunner
from llmservice_server.engine.start_phases import StartPhases
from llmservice_server.engine.start_record import StartRecord
from llmservice_server.engine.swap_space import PreemptionCost, SwapSpace
from llmservice_server.models.layer_ops import TritonLayerOps
from llmservice_server.models.linear import FEW_ROWS
from llmservice_server.models.llama import LlamaModel
from llmservice_server.sampling.heaviest import choose_heaviest
from llmservice_server.sampling.sampler import Sampler

_LOG = logging.getLogger(__name__)
_PROFILE_S = 1.0  # a profiling pass on CPU may take as long
_WARM_UP_TOKENS = 16  # the first step pays for lazy initialisation, a request should not
_WORTH_COMPILING_BYTES = 64 << 20
"""Of weights. What a step of a smaller model saves never makes up for the time in which its kernels are compiled."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the device: what there is to use at start, and what is taken of it."""

    total: int
    weights: int
    activations: int
    graphs: int = 0  # CUDA's, of decode steps
    processes: int = 0  # Python, PyTorch and the tokenizer, where they live in the same memory

    @property
    def besides_kv_cache(self) -> int:
        return self.weights + self.activations + self.graphs + self.processes


@dataclass(frozen=True, slots=True)
class Started:
    """An engine's loaded half."""

    runner: ModelRunner
    kv_cache: KVCachePlan
    max_num_seqs: int
    memory_bytes: dict[str, int]  # by kind: weights, kv_cache, activations, graphs, total
    vocab_size: int
    eos_token_ids: frozenset[int]
    swap: SwapSpace | None
    phases_s: dict[str, float] = field(default_factory=dict)  # where the time of starting went, seconds by name


def start(config: EngineConfig) -> Started:
    """Raises `StartError` with what is wrong, expected and to be done."""
    checkpoint = Checkpoint.open(config.model)
    device = _device(config)
    context = checkpoint.config.max_context
    if config.max_model_len is not None and config.max_model_len > context:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is beyond the model's context of {context} tokens: lower it"
        )
    shape = _kv_cache_shape(checkpoint, config)
    phases = StartPhases()
    with phases.phase("attention backend"):
        choice = choose_attention(
            config.attention, shape, checkpoint.dtype(config.dtype), device, config.max_num_batched_tokens
        )
    choice = replace(choice, worth_compiling=checkpoint.weight_file_bytes >= _WORTH_COMPILING_BYTES)
    _LOG.info("attention backend: %s (%s)", choice.name, choice.reason)
    model, memory = _load(checkpoint, config, device, choice, phases)
    kv_cache = _plan(config, context, shape, memory, device)
    max_num_seqs = config.max_num_seqs or sequences_held(
        kv_cache, config.block_size, config.expected_tokens, config.most_seqs
    )
    with phases.phase("KV cache"):
        attention = _attention(choice, kv_cache.num_blocks, device)
        swapped_blocks = _swapped_blocks(config, shape, attention, memory)
    runner = ModelRunner(model, attention, swapped_blocks, _sampler(model, choice))
    if choice.name == "cpu":
        runner.decode_path = _cpu_decode(model, attention, min(max_num_seqs, FEW_ROWS))
    warm_up = min(_WARM_UP_TOKENS, kv_cache.num_usable_blocks * config.block_size)
    with phases.phase("warm-up"):
        if not runner.warm_up(warm_up, config.block_size):
            raise ModelLoadError(
                f"the model's logits are not finite in its first step in {model.dtype}, so it could answer nothing: "
                "look for NaN and infinity in the checkpoint's weights, or try another --dtype"
            )
    if _uses_graphs(config, choice, device):
        with phases.phase("CUDA graphs"):
            memory = _capture_graphs(runner, max_num_seqs, kv_cache, memory)
    swap = None
    if swapped_blocks is not None:
        swap = SwapSpace(swapped_blocks.num_blocks, _preemption_cost(runner, config, kv_cache))
    started = Started(
        runner=runner,
        kv_cache=kv_cache,
        max_num_seqs=max_num_seqs,
        memory_bytes={
            "weights": memory.weights,
            "kv_cache": sum(cache.nbytes for cache in attention.caches),
            "activations": memory.activations,
            "graphs": memory.graphs,
            "total": memory.total,
        },
        vocab_size=checkpoint.config.vocab_size,
        eos_token_ids=checkpoint.eos_token_ids,
        swap=swap,
        phases_s=phases.seconds,
    )
    _LOG.info(
        "%s on %s in %s: weights %.2f GiB, KV cache %.2f GiB in %d blocks of %d, max_model_len %d, max_num_seqs %d",
        checkpoint.config.architecture,
        device,
        model.dtype,
        memory.weights / GIB,
        started.memory_bytes["kv_cache"] / GIB,
        kv_cache.num_usable_blocks,
        config.block_size,
        kv_cache.max_model_len,
        max_num_seqs,
    )
    _LOG.info("the engine took %s", phases)
    return started


def _kv_cache_shape(checkpoint: Checkpoint, config: EngineConfig) -> KVCacheShape:
    return KVCacheShape(
        num_heads=checkpoint.config.num_heads,
        num_kv_heads=checkpoint.config.num_kv_heads,
        head_dim=checkpoint.config.head_dim,
        windows=checkpoint.config.windows,
        block_size=config.block_size,
        dtype=_kv_cache_dtype(checkpoint, config),
    )


def _kv_cache_dtype(checkpoint: Checkpoint, config: EngineConfig) -> torch.dtype:
    if config.kv_cache_dtype == "fp8":
        return torch.float8_e4m3fn
    return checkpoint.dtype(config.dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype)


def _device(config: EngineConfig) -> torch.device:
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
    checkpoint: Checkpoint,
    config: EngineConfig,
    device: torch.device,
    choice: AttentionChoice,
    phases: StartPhases,
) -> tuple[LlamaModel, Memory]:
    """Load the weights and learn what a full step needs beside them."""
    total = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else available_cpu_bytes()
    processes = 0
    if config.memory_limit_bytes is not None:
        # The limit is of the whole pod, its processes included; what is available was counted without them.
        processes = 0 if device.type == "cuda" else PROCESS_BYTES
        total = min(total + processes, config.memory_limit_bytes)
    if checkpoint.weight_file_bytes > total:
        raise OutOfMemoryError(
            f"the weights are {format_bytes(checkpoint.weight_file_bytes)}, but only {format_bytes(total)} of memory "
            "can be used: use a smaller model or more memory"
        )
    try:
        with phases.phase("weights"):
            model = checkpoint.load(checkpoint.dtype(config.dtype), device)
        if choice.name == "triton":
            model.ops = TritonLayerOps()
        elif choice.name == "cpu" and model.lm_head.packed:  # beside products that are not, the rest is nothing
            from llmservice_server.models import cpu_layer_ops  # brings a compiler along

            if choice.worth_compiling:
                model.ops = cpu_layer_ops.ThreadedCpuLayerOps()
                for linear in model.linears:
                    linear.find_panels()
            else:
                model.ops = cpu_layer_ops.CpuLayerOps()
        with phases.phase("profiling"):
            profile = _profile if device.type == "cuda" else _profile_cpu
            activations = profile(model, config, choice)
            graphs = _predicted_graphs(model, config, choice) if _uses_graphs(config, choice, device) else 0
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"the weights and a step of {config.max_num_batched_tokens} tokens do not fit into the device's "
            f"{format_bytes(total)}: use a smaller model or lower max_num_batched_tokens"
        ) from error
    return model, Memory(total, model.weight_bytes, activations, graphs, processes)


def _cpu_decode(model: LlamaModel, attention: AttentionBackend, max_num_seqs: int) -> DecodePath | None:
    from llmservice_server.attention.cpu_backend import CpuAttention  # brings a compiler along
    from llmservice_server.engine.cpu_decode import CpuDecode, can_decode

    if not isinstance(attention, CpuAttention) or not can_decode(model):
        return None
    return CpuDecode(model, attention, max_num_seqs)


def _uses_graphs(config: EngineConfig, choice: AttentionChoice, device: torch.device) -> bool:
    """Only our own kernels take a batch's shape without asking the device for it."""
    return device.type == "cuda" and choice.name == "triton" and not config.enforce_eager


def _predicted_graphs(model: LlamaModel, config: EngineConfig, choice: AttentionChoice) -> int:
    from llmservice_server.attention.triton_backend import TritonAttention
    from llmservice_server.engine.graph_capture import predict_graph_bytes

    attention = TritonAttention(choice.shape, 2, model.device)
    return predict_graph_bytes(model, attention, config.most_seqs, config.max_model_len or model.config.max_context)


def _capture_graphs(runner: ModelRunner, max_num_seqs: int, kv_cache: KVCachePlan, memory: Memory) -> Memory:
    """The runner's graphs, and the account with what they really take in the place of what was predicted."""
    from llmservice_server.attention.triton_backend import TritonAttention
    from llmservice_server.engine.graph_capture import capture_graphs, free_bytes

    model, attention = runner.model, runner.attention
    if not isinstance(attention, TritonAttention):
        return replace(memory, graphs=0)
    before = free_bytes(model.device)
    runner.decode_path = capture_graphs(model, attention, max_num_seqs, kv_cache.max_model_len, kv_cache.num_blocks)
    taken = max(0, before - free_bytes(model.device))
    _LOG.info("CUDA graphs take %.2f GiB, %.2f were set aside", taken / GIB, memory.graphs / GIB)
    return replace(memory, graphs=taken)


def _estimate(model: LlamaModel, config: EngineConfig) -> int:
    shape = model.config
    widest = max(2 * shape.intermediate_size, (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim)
    return activation_bytes(
        config.max_num_batched_tokens, config.most_seqs, widest, shape.vocab_size, model.dtype.itemsize
    )


def _profile_cpu(model: LlamaModel, config: EngineConfig, choice: AttentionChoice) -> int:
    """Bytes that a full step takes beside the weights: measured where that takes a moment, else estimated."""
    runner, step, cache_bytes = _full_step(model, config, choice)
    num_tokens = min(_WARM_UP_TOKENS, config.block_size)
    for _ in range(2):  # the first pays for lazy initialisation
        token_s = (
            _seconds(lambda: runner.dummy_step(num_tokens, 1, num_tokens, config.block_size), cuda=False) / num_tokens
        )
    if token_s * config.max_num_batched_tokens > _PROFILE_S:
        return _estimate(model, config)
    grown = peak_growth_bytes(step)
    if grown is None:
        return _estimate(model, config)
    return max(grown - cache_bytes, config.most_seqs * model.config.vocab_size * 4)  # what the sampler adds to it


def _profile(model: LlamaModel, config: EngineConfig, choice: AttentionChoice) -> int:
    """Bytes that a full step takes beside the weights, CUDA's context and other users of the card included."""
    torch.cuda.reset_peak_memory_stats(model.device)
    runner, step, cache_bytes = _full_step(model, config, choice)
    step()
    torch.cuda.synchronize(model.device)
    peak = torch.cuda.max_memory_allocated(model.device) - cache_bytes
    del runner, step
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(model.device)
    outside_torch = total - free - torch.cuda.memory_reserved(model.device)
    return max(0, peak - model.weight_bytes) + outside_torch


def _full_step(
    model: LlamaModel, config: EngineConfig, choice: AttentionChoice
) -> tuple[ModelRunner, Callable[[], None], int]:
    """The largest step that the scheduler may plan, ready to be taken, and the bytes of the KV cache that it fills."""
    longest = min(config.max_model_len or model.config.max_context, config.prefill_chunk_tokens)
    blocks_each = -(-longest // config.block_size)
    num_blocks = 1 + blocks_each * -(-config.max_num_batched_tokens // longest)
    runner = ModelRunner(model, choice.backend(num_blocks, model.device), sampler=_sampler(model, choice))

    def step() -> None:
        runner.dummy_step(config.max_num_batched_tokens, config.most_seqs, longest, config.block_size)

    return runner, step, num_blocks * choice.shape.bytes_per_block


def _sampler(model: LlamaModel, choice: AttentionChoice) -> Sampler:
    """With our own kernel where attention has ours."""
    if model.device.type == "cpu" or choice.name != "triton":
        return Sampler()
    return Sampler(choose_heaviest(model.config.vocab_size, model.device))


def _attention(choice: AttentionChoice, num_blocks: int, device: torch.device) -> AttentionBackend:
    try:
        return choice.backend(num_blocks, device)
    except RuntimeError as error:  # torch's word for it on CPU; on CUDA a subclass
        size = num_blocks * choice.shape.bytes_per_block / GIB
        raise OutOfMemoryError(
            f"the KV cache of {size:.2f} GiB cannot be allocated on {device}: "
            "lower --kv-cache-memory or --gpu-memory-utilization"
        ) from error


def _swapped_blocks(
    config: EngineConfig, shape: KVCacheShape, attention: AttentionBackend, memory: Memory
) -> SwappedBlocks | None:
    num_bytes = int(config.swap_space_gib * GIB)
    num_blocks = num_bytes // shape.bytes_per_block
    if num_blocks == 0:
        return None
    left = available_cpu_bytes()
    if attention.device.type == "cpu":  # the KV cache's memory is promised, but not yet touched
        left -= len(attention.caches) * attention.caches[0].nbytes + memory.activations
    if num_bytes > left:
        raise OutOfMemoryError(
            f"--swap-space-gib asks for {num_bytes / GIB:.2f} GiB of CPU memory, {max(0, left) / GIB:.2f} GiB is left: "
            "lower it, or give the engine more memory"
        )
    return SwappedBlocks(attention.caches, num_blocks)


def _preemption_cost(runner: ModelRunner, config: EngineConfig, kv_cache: KVCachePlan) -> PreemptionCost:
    """What it costs to copy a block and to compute a token, from one step and one copy; nothing is cached yet."""
    cuda = runner.model.device.type == "cuda"
    num_tokens = min(
        config.prefill_chunk_tokens if cuda else _WARM_UP_TOKENS, kv_cache.num_usable_blocks * config.block_size
    )
    computing_s = _seconds(lambda: runner.dummy_step(num_tokens, 1, num_tokens, config.block_size), cuda)
    copies = [BlockCopy(0, 0)]
    plan = Plan(swap_out=copies, swap_in=copies)  # the null block: out and in again
    _seconds(lambda: runner.swap(plan), cuda)
    return PreemptionCost(_seconds(lambda: runner.swap(plan), cuda) / 2, computing_s / num_tokens)


def _seconds(work: Callable[[], object], cuda: bool) -> float:
    started_s = time.perf_counter()
    work()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started_s


def _plan(config: EngineConfig, context: int, shape: KVCacheShape, memory: Memory, device: torch.device) -> KVCachePlan:
    wanted = config.max_model_len or context
    if config.kv_cache_memory_bytes is not None:
        pool_bytes = config.kv_cache_memory_bytes
        left = memory.total - memory.besides_kv_cache
        if pool_bytes > left:  # torch would promise it all the same, and the kernel kill us once it is used
            raise OutOfMemoryError(
                f"--kv-cache-memory asks for {format_bytes(pool_bytes)}, the rest leaves {format_bytes(left)} "
                f"of {format_bytes(memory.total)}: lower it, or give the engine more memory"
            )
    else:
        pool_bytes = int(memory.total * config.gpu_memory_utilization) - memory.besides_kv_cache
        if device.type == "cpu":  # shared with the page cache and others: no more than the sequences can ever use
            most_blocks = 1 + config.most_seqs * -(-wanted // config.block_size)
            pool_bytes = min(pool_bytes, most_blocks * shape.bytes_per_block)
    if device.type == "cpu":
        least = (1 + -(-wanted // config.block_size)) * shape.bytes_per_block
        pool_bytes = StartRecord(config.start_record).begin(pool_bytes, least)
    plan = plan_kv_cache(
        pool_bytes,
        bytes_per_block=shape.bytes_per_block,
        block_size=config.block_size,
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
