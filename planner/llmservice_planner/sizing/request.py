"""The request for a plan, with validation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llmservice_planner.model.quantization import QUANTIZATIONS, Quantization
from llmservice_planner.model.shape import ModelShape
from llmservice_planner.sizing.gpu import CPU, Device

LimitedBy = Literal["kvMemory", "logits", "maxNumSeqs", "itlTarget", "ridge", "tokenBudget", "cap"]
"""Which bound set `max_num_seqs`:

- `kvMemory`: the KV pool, with 128 tokens per sequence (`least_sequence_tokens`), or the memory of a sequence's logits
- `logits`: rows of logits take a sixteenth of the memory for blocks, or those of twice the typical sequences that fit
- `maxNumSeqs`: the user's number
- `itlTarget`: the decode step would take longer than the inter-token latency target
- `ridge`: above it arithmetic takes longer than reading the weights, so a larger batch adds only latency; with a target
  for the inter-token latency, that is the bound instead
- `tokenBudget`: `max_num_batched_tokens`, of which a decode step needs one per sequence
- `cap`: 1024; 256 for a GPU whose rates are unknown; 64 for a CPU
"""

DTYPES = ("auto", "bfloat16", "float16", "float32")
KV_DTYPES = (*DTYPES, "fp8")
MAX_NUM_SEQS_CAP = 1024
"""Above this, the scheduler's time per step affects the inter-token latency."""
CAP_OF_UNKNOWN_RATES = 256
"""More sequences rarely increase throughput, and each needs a row of logits."""
CAP_OF_CPU = 64
"""More sequences add latency and hardly any throughput: the ridge of two cores with AVX-512 is at 13 (`llmservice bench
profile`), and 64 sequences decode a fifth more tokens a second than 32."""
LEAST_SEQUENCE_TOKENS = 128
"""Requests that use less on average are rare; sequences beyond the pool by this measure would only wait for blocks."""
EXPECTED_TOKENS = 1536
"""Prompt and answer of a request where nothing else is known; 1,100 and 210 on average in the Azure conversation trace
2023 (Patel et al., "Splitwise", ISCA 2024)."""
MOST_LORAS = 64
"""Slots for LoRA adapters in memory."""
MOST_LORA_RANK = 512
_TOO_LARGE = 10**12


class SizingError(ValueError):
    """The fields of a request contradict each other; the message names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizingRequest:
    """A model, its devices and the engine's settings. Raises `SizingError`."""

    shape: ModelShape
    device: Device
    device_count: int = 1
    """GPUs that share the model (tensor parallelism); 1 on a CPU."""
    max_model_len: int | None = None
    """Longest sequence (prompt and answer); None: the model's `default_model_len`."""
    dtype: str = "auto"
    kv_dtype: str = "auto"
    quantization: Quantization = "auto"
    """What the server holds of quantised weights, and whether it quantises others."""
    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    """The share of the device's memory (on a CPU: the container's) that the server may use."""
    max_num_batched_tokens: int | None = None
    """Token budget of a step; None: by the device's memory and the latency target."""
    expected_tokens: int | None = None
    """Tokens of a typical request (prompt and answer); None: 1536, or `max_model_len` if that is less."""
    max_num_seqs: int | None = None
    """The user's number, which overrides the other bounds."""
    max_loras: int = 0
    """LoRA adapters in memory at once; each takes the memory of one of `max_lora_rank` on every linear layer."""
    max_lora_rank: int = 16
    lora_experts: bool = False
    """Whether these adapters may change a mixture's experts."""
    itl_p99_s: float | None = None
    weights_bytes: int | None = None
    """Bytes from the checkpoint; None: computed from the shape."""
    overhead_bytes_per_device: int | None = None
    """The measured overhead, which replaces the estimates."""
    least_sequence_tokens: int = LEAST_SEQUENCE_TOKENS
    """The memory holds so many tokens of each sequence at least, which bounds their number."""
    bounded_by_ridge: bool = True
    """Whether the number of sequences ends at the ridge, where more add latency and little throughput."""
    notes: tuple[str, ...] = ()
    """How these settings were chosen: the first lines of the explanation."""

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_counts()
        self._check_tensor_parallel()
        self._check_lengths()

    @property
    def model_len(self) -> int:
        """`max_model_len`, or the model's."""
        length = self.max_model_len or self.shape.default_model_len
        if length is None:
            raise SizingError("max_model_len is missing, and the shape names no maxPositionEmbeddings to take instead")
        return length

    @property
    def typical_tokens(self) -> int:
        """`expected_tokens`, or its default."""
        return self.expected_tokens or min(EXPECTED_TOKENS, self.model_len)

    @property
    def resolved_dtype(self) -> str:
        return self.shape.dtype if self.dtype == "auto" else self.dtype

    @property
    def resolved_kv_dtype(self) -> str:
        return self.resolved_dtype if self.kv_dtype == "auto" else self.kv_dtype

    @property
    def on_cpu(self) -> bool:
        return isinstance(self.device, CPU)

    @property
    def packs_tied_head(self) -> bool:
        """Whether the server holds the embedding a second time, as the output head: packed for products, or int8."""
        is_converted = self.on_cpu or self.quantization == "int8"
        return is_converted and self.shape.tie_word_embeddings and not self.shape.is_encoder

    def _check_choices(self) -> None:
        for name, allowed in (("dtype", DTYPES), ("kv_dtype", KV_DTYPES), ("quantization", QUANTIZATIONS)):
            if getattr(self, name) not in allowed:
                raise SizingError(f"{name} is {getattr(self, name)!r}, expected one of {', '.join(allowed)}")
        if self.quantization == "int8" and not self.shape.takes_int8:
            raise SizingError(
                f"quantization is int8, which is not for {self.shape.architecture}: use auto, which keeps mxfp4"
            )
        if self.weights_bytes is None and (unknown := self.shape.why_not_counted):
            raise SizingError(
                f"{unknown}, so its weights cannot be counted from its shape: give their bytes, or the folder with its "
                "safetensors files"
            )

    def _check_counts(self) -> None:
        for name in ("device_count", "block_size", "max_num_batched_tokens", "least_sequence_tokens"):
            value = getattr(self, name)
            if value is not None and not 1 <= value < _TOO_LARGE:
                raise SizingError(f"{name} is {value}, expected at least 1 and less than 10**12")
        if not 0 <= self.max_loras <= MOST_LORAS or not 1 <= self.max_lora_rank <= MOST_LORA_RANK:
            raise SizingError(
                f"max_loras is {self.max_loras} and max_lora_rank {self.max_lora_rank}, expected 0 to {MOST_LORAS} and "
                f"1 to {MOST_LORA_RANK}"
            )
        if self.lora_experts and self.max_loras and not self.shape.adapted_expert_features:
            raise SizingError("lora_experts is set, but this model has no experts: leave it out")
        for name in ("weights_bytes", "overhead_bytes_per_device", "itl_p99_s"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise SizingError(f"{name} is {value}, expected no negative number")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise SizingError(f"gpu_memory_utilization is {self.gpu_memory_utilization}, expected above 0, at most 1")
        most = min(MAX_NUM_SEQS_CAP, self.max_num_batched_tokens or MAX_NUM_SEQS_CAP)
        if self.max_num_seqs is not None and not 1 <= self.max_num_seqs <= most:
            raise SizingError(
                f"max_num_seqs is {self.max_num_seqs}, expected 1 to {most}: more would only add latency, and a decode "
                "step needs a token of max_num_batched_tokens for each"
            )

    def _check_tensor_parallel(self) -> None:
        if isinstance(self.device, CPU):
            if self.device_count != 1:
                raise SizingError(f"device_count is {self.device_count}, expected 1 on a CPU")
            return
        if not can_shard(self.shape, self.device_count):
            raise SizingError(
                f"{self.shape.heads} heads ({self.shape.kv_heads} of them KV) cannot be split over {self.device_count} "
                f"GPUs: use {', '.join(str(n) for n in range(1, 17) if can_shard(self.shape, n))}"
            )

    def _check_lengths(self) -> None:
        if self.max_model_len is not None and not 1 <= self.max_model_len < _TOO_LARGE:
            raise SizingError(f"max_model_len is {self.max_model_len}, expected at least 1 and less than 10**12")
        longest, length = self.shape.max_position_embeddings, self.model_len
        if longest is not None and length > longest:
            raise SizingError(f"max_model_len {length} is longer than the {longest} positions the model knows")
        if self.expected_tokens is not None and not 1 <= self.expected_tokens <= length:
            raise SizingError(f"expected_tokens is {self.expected_tokens}, expected 1 to max_model_len {length}")


def can_shard(shape: ModelShape, device_count: int) -> bool:
    """Whether attention splits evenly over `device_count` GPUs: whole heads, and KV heads either whole or repeated."""
    kv_even = shape.is_mla or shape.kv_heads % device_count == 0 or device_count % shape.kv_heads == 0
    return shape.heads % device_count == 0 and kv_even
