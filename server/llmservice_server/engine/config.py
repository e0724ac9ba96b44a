"""The engine's settings, checked when they are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from llmservice_planner.model.quantization import Quantization
from llmservice_planner.sizing.request import CAP_OF_UNKNOWN_RATES, EXPECTED_TOKENS, MOST_LORA_RANK, MOST_LORAS
from llmservice_planner.sizing.step_tokens import StepTokens, step_tokens
from llmservice_server.types.errors import ConfigError

DType = Literal["auto", "bfloat16", "float16", "float32"]
KVCacheDType = Literal["auto", "bfloat16", "float16", "float32", "fp8"]
Attention = Literal["auto", "triton", "torch"]
Implementation = Literal["auto", "own", "transformers"]
Pooling = Literal["auto", "last", "mean", "cls"]
Device = Literal["auto", "cpu", "cuda"]
SchedulerName = Literal["continuous", "dynamic", "static"]
QueueOrder = Literal["fcfs", "sjf"]
LaneName = Literal["interactive", "batch"]
LANES: tuple[str, ...] = get_args(LaneName)  # in the order in which they are served
ToolCallFormatName = Literal[
    "auto",
    "none",
    "hermes",
    "qwen3_coder",
    "seed_oss",
    "minimax_m2",
    "glm",
    "gemma",
    "functiongemma",
    "mistral",
    "nemotron",
    "granite",
    "hunyuan",
    "phi4_mini",
    "apertus",
    "deepseek_v3",
    "deepseek_v31",
    "cohere",
    "olmo3",
    "llama3_json",
    "harmony",
]
ReasoningFormatName = Literal[
    "auto", "none", "think", "hunyuan", "ernie", "seed_oss", "mistral", "apertus", "gemma", "cohere", "harmony"
]


@dataclass(frozen=True, slots=True)
class Flag:
    """Makes a setting a flag of `llmservice serve` as well; see `commands/serve.py`."""

    help: str
    metavar: str | None = None
    parse: Callable[[str], Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The engine's settings. Raises `ConfigError` when made with values that cannot work.

    The help texts are those of the command line. A flag that begins with `no` turns its setting off.
    """

    model: Path
    tokenizer: Annotated[Path | None, Flag("folder of another tokenizer (default: the model's)", metavar="DIR")] = None
    dtype: Annotated[DType, Flag("of weights and activations; auto: the checkpoint's")] = "auto"
    implementation: Annotated[
        Implementation,
        Flag("own: of this server; transformers: its model on our cache; auto: our own where there is one"),
    ] = "auto"
    quantization: Annotated[
        Quantization,
        Flag("of weights in memory; auto: as stored where that is no slower; int8: 8-bit products; dense: none"),
    ] = "auto"
    device: Annotated[Device, Flag("auto: cuda where there is one")] = "auto"
    max_model_len: Annotated[
        int | None,
        Flag("prompt and answer together (default: the model's, or what memory holds)"),
    ] = None
    max_num_seqs: Annotated[int | None, Flag("in a step, at most (default: as the KV cache holds)")] = None
    expected_tokens: Annotated[
        int,
        Flag("that a request uses, prompt and answer, as long as few have ended"),
    ] = EXPECTED_TOKENS
    max_num_batched_tokens: Annotated[
        int | None,
        Flag("token budget of one step (default: 8192 on a GPU of 70 GiB or more, else 2048)"),
    ] = None
    max_prefill_tokens: Annotated[
        int | None,
        Flag("of a step, at most for all prompts together (default: 512 on CPU, where more compute no faster)"),
    ] = None
    prefill_chunk_tokens: Annotated[
        int | None,
        Flag("of a step, at most for one prompt while others wait (default: an eighth of the budget, 512 or more)"),
    ] = None
    block_size: Annotated[int, Flag("of the KV cache's blocks")] = 16
    gpu_memory_utilization: Annotated[
        float,
        Flag("of the memory that may be used; on CPU, that is available at start"),
    ] = 0.9
    memory_limit_bytes: Annotated[int | None, Flag("of the memory that utilization is a share of, at most")] = None
    start_record: Annotated[
        Path | None,
        Flag(
            "on CPU: where a start notes its KV cache; one that was killed is followed by one with a smaller cache",
            metavar="FILE",
        ),
    ] = None
    kv_cache_memory_bytes: Annotated[int | None, Flag("such as 512MiB (default: what utilization leaves)")] = None
    kv_cache_dtype: Annotated[KVCacheDType, Flag("auto: the model's; fp8: e4m3 with scales, on CUDA only")] = "auto"
    attention: Annotated[
        Attention,
        Flag("triton: our GPU kernels; torch: on any device; auto: the fastest that works, and the log says why"),
    ] = "auto"
    enforce_eager: Annotated[bool, Flag("on CUDA: launch a decode step's kernels one by one, without graphs")] = False
    overlap: Annotated[bool | None, Flag("on CUDA: plan no step before the one before it is read")] = None
    pooling: Annotated[
        Pooling,
        Flag("of /v1/embeddings; auto: as the checkpoint says, else mean of an encoder, the last token of a decoder"),
    ] = "auto"
    embedding_window_s: Annotated[
        float,
        Flag("time that an input of /v1/embeddings may wait for others to share its batch"),
    ] = 0.005
    scheduler: Annotated[
        SchedulerName,
        Flag("dynamic and static run batches of --max-num-seqs to their end: to compare, and for batch jobs"),
    ] = "continuous"
    max_batch_wait_s: Annotated[
        float | None,
        Flag("how long dynamic (default: 50ms) and static (10s) wait for a full batch"),
    ] = None
    prefix_caching: Annotated[bool, Flag("compute every prompt whole, however it begins")] = True
    swap_space_gib: Annotated[
        float,
        Flag("CPU memory for preempted sequences (default: none, they are computed again)", metavar="GIB"),
    ] = 0.0
    long_prefill_tokens: Annotated[
        int | None,
        Flag("of a step, at most for all prompts longer than a chunk while others wait (default: three quarters)"),
    ] = None
    batch_share: Annotated[
        float,
        Flag("of sequences and tokens that the batch lane keeps however busy the interactive one is"),
    ] = 0.1
    interactive_order: Annotated[
        QueueOrder,
        Flag("the interactive lane serves in order of arrival, or those predicted to be shortest first, with ageing"),
    ] = "fcfs"
    batch_order: Annotated[
        QueueOrder,
        Flag("the batch lane serves in order of arrival, or those predicted to be shortest first, with ageing"),
    ] = "fcfs"
    max_loras: Annotated[int, Flag("LoRA adapters in memory at once (default: none)", parse=int)] = 0
    max_lora_rank: Annotated[int, Flag("of an adapter, at most: the memory of a slot")] = 16
    lora_experts: Annotated[
        bool, Flag("slots also hold what adapters change in a mixture's experts, which takes most of their memory")
    ] = False
    compile_cache: Annotated[
        Path | None,
        Flag(
            "folder of compiled kernels that pods share; they execute what is in it (default: one of this user)", "DIR"
        ),
    ] = None
    seed: Annotated[int, Flag("of requests without a seed of their own", parse=int)] = 0
    threads: Annotated[int | None, Flag("on CPU (default: torch's choice)")] = None

    def __post_init__(self) -> None:
        for name, allowed in _choices().items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} is {getattr(self, name)!r}, expected one of {', '.join(allowed)}")
        if not 0 <= self.max_loras <= MOST_LORAS:
            raise ConfigError(f"max_loras is {self.max_loras}, expected 0 (none) to {MOST_LORAS}")
        if not 1 <= self.max_lora_rank <= MOST_LORA_RANK:
            raise ConfigError(f"max_lora_rank is {self.max_lora_rank}, expected 1 to {MOST_LORA_RANK}")
        if self.lora_experts and not self.max_loras:
            raise ConfigError("lora_experts needs slots for adapters: set max_loras")
        for name in ("block_size", "expected_tokens"):
            _require_positive(name, getattr(self, name))
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "prefill_chunk_tokens",
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
        if self.max_num_seqs is not None and self.step_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens {self.step_tokens} is below max_num_seqs {self.max_num_seqs}: some "
                f"sequences would get no token in a step: raise the first to {self.max_num_seqs} or lower the second"
            )

    @property
    def most_seqs(self) -> int:
        """The number of sequences that memory is reserved for: `max_num_seqs`, or its bound where it is not set."""
        return self.max_num_seqs or min(CAP_OF_UNKNOWN_RATES, self.step_tokens)

    @property
    def step_tokens(self) -> int:
        """`max_num_batched_tokens`, or its default for a CPU."""
        return self._step.total

    @property
    def chunk_tokens(self) -> int:
        """`prefill_chunk_tokens`, or its default."""
        return self.prefill_chunk_tokens or self._step.chunk

    @property
    def _step(self) -> StepTokens:
        return step_tokens(None, total=self.max_num_batched_tokens, at_least=self.max_num_seqs or 1)

    def for_gpu(self, memory_bytes: int) -> EngineConfig:
        """With the defaults of a GPU with so much memory where none are set."""
        step = step_tokens(memory_bytes, total=self.max_num_batched_tokens, at_least=self.max_num_seqs or 1)
        return replace(self, max_num_batched_tokens=step.total)


@cache
def _choices() -> dict[str, tuple[str, ...]]:
    """The settings that take one of a few names, and these."""
    hints = get_type_hints(EngineConfig)
    return {name: get_args(kind) for name, kind in hints.items() if get_origin(kind) is Literal}


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name} is {value}, expected at least 1")
