"""The engine's settings, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from llmservice_server.engine.errors import ConfigError

DType = Literal["auto", "bfloat16", "float16", "float32"]
KVCacheDType = Literal["auto", "bfloat16", "float16", "float32", "fp8"]
Attention = Literal["auto", "triton", "torch"]
Pooling = Literal["last", "mean"]
Device = Literal["auto", "cpu", "cuda"]
SchedulerName = Literal["continuous", "dynamic", "static"]
QueuePolicy = Literal["fcfs", "sjf"]

_CHOICES = {
    "dtype": DType,
    "device": Device,
    "kv_cache_dtype": KVCacheDType,
    "attention": Attention,
    "pooling": Pooling,
    "scheduler": SchedulerName,
    "interactive_policy": QueuePolicy,
    "batch_policy": QueuePolicy,
}


MAX_AUTO_SEQS = 256  # more rarely add throughput, and each costs a row of logits


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything the engine is told at start. Raises `ConfigError` when made with settings that cannot work."""

    model: Path
    dtype: DType = "auto"  # auto: the checkpoint's own
    device: Device = "auto"  # auto: cuda where there is one
    max_model_len: int | None = None  # prompt and answer together; None: the model's context, or what the memory holds
    max_num_seqs: int | None = None  # None: as many as the KV cache holds, at `expected_tokens` each
    expected_tokens: int = 1536  # that a request really uses, prompt and answer together; longer ones may preempt
    max_num_batched_tokens: int = 2048  # the token budget of one step
    prefill_chunk_tokens: int = 512  # the most that one prompt may take of a step (Sarathi-Serve: 256 to 1024)
    block_size: int = 16  # tokens
    gpu_memory_utilization: float = 0.9  # of the device's memory; on CPU, of the memory that is available at start
    memory_limit_bytes: int | None = None  # None: the device's memory; on CPU, what is available at start
    kv_cache_memory_bytes: int | None = None  # None: what utilization leaves beside weights and activations
    kv_cache_dtype: KVCacheDType = "auto"  # auto: the model's; fp8: e4m3 with a scale for each token and head, on CUDA
    attention: Attention = "auto"  # auto: the fastest that works on the device
    scheduler: SchedulerName = "continuous"
    max_batch_wait_s: float | None = None  # dynamic and static: how long the oldest request waits for a full batch
    enforce_eager: bool = False  # no CUDA graphs for decode steps
    overlap: bool | None = None  # plan a step while the one before is computed; None: on CUDA, where that saves time
    prefix_caching: bool = True  # of the continuous scheduler
    swap_space_gib: float = 0.0  # CPU memory for preempted sequences; the continuous scheduler's
    max_prefill_tokens: int | None = None  # of a step, for all prompts; None: on CPU 512, as more compute no faster
    long_prefill_tokens: int | None = None  # of a step, for all prompts longer than a chunk; None: three quarters
    batch_share: float = 0.1  # of sequences and tokens: what the batch lane keeps however busy the interactive one is
    interactive_policy: QueuePolicy = "fcfs"
    batch_policy: QueuePolicy = "fcfs"
    seed: int = 0  # of the requests that bring no seed of their own
    pooling: Pooling = "last"  # what of a text's states is its embedding: the last token's, or the mean of all
    embedding_window_s: float = 0.005  # how long an input may wait for others to share its batch
    start_record: Path | None = None  # a file that outlives this process; on CPU, see engine/start_record.py
    threads: int | None = None  # intra-op threads on CPU; None: torch's choice

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in get_args(allowed):
                raise ConfigError(f"{name} is {getattr(self, name)!r}, expected one of {', '.join(get_args(allowed))}")
        for name in ("max_num_batched_tokens", "prefill_chunk_tokens", "block_size", "expected_tokens"):
            _require_positive(name, getattr(self, name))
        for name in (
            "max_num_seqs",
            "max_model_len",
            "kv_cache_memory_bytes",
            "memory_limit_bytes",
            "threads",
            "max_prefill_tokens",
            "long_prefill_tokens",
        ):
            if getattr(self, name) is not None:
                _require_positive(name, getattr(self, name))
        if self.block_size & (self.block_size - 1) or self.block_size > 256:
            raise ConfigError(f"block_size is {self.block_size}, expected a power of two up to 256")
        if not 0 <= self.embedding_window_s < float("inf"):
            raise ConfigError(f"embedding_window_s is {self.embedding_window_s}, expected seconds, 0 or more")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}, expected above 0 and at most 1"
            )
        self._validate_scheduling()

    def _validate_scheduling(self) -> None:
        if not 0 <= self.batch_share < 1:
            raise ConfigError(f"batch_share is {self.batch_share}, expected 0 (none) or more and less than 1")
        for name in ("swap_space_gib", "max_batch_wait_s"):
            if not 0 <= (getattr(self, name) or 0) < float("inf"):
                raise ConfigError(f"{name} is {getattr(self, name)}, expected 0 or more")
        if self.max_batch_wait_s is not None and self.scheduler == "continuous":
            raise ConfigError("max_batch_wait_s is for the dynamic and static schedulers: continuous never waits")
        if self.swap_space_gib and self.scheduler != "continuous":
            raise ConfigError(f"swap_space_gib is for the continuous scheduler: {self.scheduler} never preempts")
        if self.max_num_seqs is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs {self.max_num_seqs}: some "
                f"sequences would get no token in a step: raise the first to {self.max_num_seqs} or lower the second"
            )

    @property
    def most_seqs(self) -> int:
        """What memory is set aside for: the sequences asked for, or the most that are taken where none are."""
        return self.max_num_seqs or min(MAX_AUTO_SEQS, self.max_num_batched_tokens)


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name} is {value}, expected at least 1")
