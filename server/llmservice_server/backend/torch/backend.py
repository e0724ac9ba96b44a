"""The backend in plain torch: works on any device, and is the fallback and the reference of the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from llmservice_server.backend.base import Attention, DecodePath, Model
from llmservice_server.backend.cache_shape import KVCacheShape
from llmservice_server.backend.grouped import by_group
from llmservice_server.backend.quantized import QuantizedWeight
from llmservice_server.backend.sampling_batch import PenalizedRows, SamplingBatch
from llmservice_server.backend.torch import sampler
from llmservice_server.backend.torch.attention import TorchAttention
from llmservice_server.backend.torch.memory import (
    available_cpu_bytes,
    cuda_free_bytes,
    cuda_step_bytes,
    peak_growth_bytes,
    trim_heap,
)
from llmservice_server.types.messages import Fallback

_CPU_PREFILL_TOKENS = 512
"""Prompt tokens of a step. A CPU's matrix products reach full speed at about 128 rows: a longer step computes no faster
and delays every request; a GPU needs several times as many. With half of it, chunks cost a tenth of the
throughput of a small model, whose steps are mostly overhead; with this 3 % (`benchmarks/strategies.py`)."""

_PROFILE_LIMIT_S = 1.0  # of a profiling step on a CPU


@dataclass(slots=True)
class TorchBackend:
    """Implements `Backend`."""

    shape: KVCacheShape
    device: torch.device
    reason: str
    name: str = "torch"
    fallbacks: dict[Fallback, str] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def overlaps(self) -> bool:
        return self.on_gpu

    @property
    def shares_memory(self) -> bool:
        return not self.on_gpu

    @property
    def prefill_tokens(self) -> int | None:
        return None if self.on_gpu else _CPU_PREFILL_TOKENS

    @property
    def profile_limit_s(self) -> float | None:
        return None if self.on_gpu else _PROFILE_LIMIT_S

    def keeps(self, weight: QuantizedWeight) -> bool:
        """torch has no product with quantised weights that is faster on every device."""
        return False

    def prepare(self, model: Model) -> None:
        """A model is built with torch's operations and layout."""

    def attention(self, num_blocks: int) -> Attention:
        return by_group(self.shape, lambda shape: TorchAttention(shape, num_blocks, self.device))

    def decode_path(
        self, model: Model, attention: Attention, *, max_num_seqs: int, max_model_len: int
    ) -> DecodePath | None:
        return None

    def decode_path_bytes(self, model: Model, *, max_num_seqs: int, max_model_len: int, adapts: bool) -> int:
        return 0

    def choose_tokens(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        return sampler.choose(logits, batch)

    def penalize(self, logits: torch.Tensor, penalized: PenalizedRows) -> None:
        sampler.penalize(logits, penalized)

    def total_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.device)[1] if self.on_gpu else available_cpu_bytes()

    def step_bytes(self, step: Callable[[], None], *, cache_bytes: int, weight_bytes: int) -> int | None:
        if self.on_gpu:
            return cuda_step_bytes(step, self.device, cache_bytes=cache_bytes, weight_bytes=weight_bytes)
        grown = peak_growth_bytes(step)
        return None if grown is None else grown - cache_bytes

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def free_bytes(self) -> int:
        return cuda_free_bytes(self.device) if self.on_gpu else available_cpu_bytes()

    def release_memory(self) -> None:
        if self.on_gpu:
            torch.cuda.empty_cache()
        trim_heap()
