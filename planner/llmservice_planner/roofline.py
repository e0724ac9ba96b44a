"""The roofline of decode and prefill steps (Williams et al., CACM 52(4), 2009).

A decode step reads every weight once and the KV cache of every sequence; its arithmetic is two operations per parameter
and token. Below the ridge reading takes longer, above it the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmservice_planner.gpu import GPU, Device
from llmservice_planner.shape import ModelShape

ATTAINABLE = 0.8
"""The share of a data sheet's rates that good kernels reach: on an H200, PyTorch's large bf16 products reach 790 of 989
TFLOP/s (80 %), its copies 4.3 of 4.8 TB/s (90 %), and attention over paged blocks less."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """One model on a group of devices, with their total rates."""

    shape: ModelShape
    weights_bytes: int
    kv_bytes_per_token: int
    bandwidth_bytes_per_s: float
    flops: float

    @classmethod
    def of(
        cls,
        shape: ModelShape,
        device: Device,
        device_count: int,
        dtype: str,
        weights_bytes: int,
        kv_bytes_per_token: int,
    ) -> Roofline | None:
        """None if the device's rates are unknown (a CPU, a GPU that is not in the catalogue)."""
        if device.bandwidth_bytes_per_s is None or device.flops_16bit is None:
            return None
        flops = device.flops_16bit
        if dtype == "float32" and isinstance(device, GPU):
            flops /= 8  # outside the tensor cores; TF32 is not used
        scale = device_count * ATTAINABLE
        bandwidth = device.bandwidth_bytes_per_s
        return cls(shape, weights_bytes, kv_bytes_per_token, scale * bandwidth, scale * flops)

    @property
    def ridge_tokens(self) -> int:
        """The tokens of a step above which the arithmetic takes longer than reading the weights.

        In bf16 these are the GPU's operations per byte: 312 TFLOP/s ÷ 2 TB/s = 156 on an A100.
        """
        seconds_to_read = self.weights_bytes / self.bandwidth_bytes_per_s
        return max(1, int(seconds_to_read / self._compute_s(1)))

    def decode_step_s(self, num_seqs: int, context_tokens: int) -> float:
        """Seconds of a step that decodes a token for each of `num_seqs` sequences of `context_tokens`."""
        kv_bytes = num_seqs * context_tokens * self.kv_bytes_per_token
        read_s = (self._weights_read(num_seqs) + kv_bytes) / self.bandwidth_bytes_per_s
        return max(read_s, self._compute_s(num_seqs))

    def prefill_s(self, num_tokens: int) -> float:
        """Seconds of a step of `num_tokens` prompt tokens, without the quadratic part of attention."""
        return max(self._compute_s(num_tokens), self._weights_read(num_tokens) / self.bandwidth_bytes_per_s)

    def _compute_s(self, num_tokens: int) -> float:
        return 2 * self.shape.active_parameters * num_tokens / self.flops

    def _weights_read(self, num_tokens: int) -> float:
        """Bytes of weights that a step reads; of the experts those with a token, assuming uniform routing."""
        if not self.shape.num_experts:
            return self.weights_bytes
        idle = (1 - self.shape.experts_per_token / self.shape.num_experts) ** num_tokens
        experts = self.shape.moe_layers * self.shape.num_experts * self.shape.expert_parameters
        return self.weights_bytes * (1 - idle * experts / self.shape.num_parameters)
