"""What a decoder layer does between its matrix products: in torch's operations, or fused by GPU kernels."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention


class LayerOps(Protocol):
    def add_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add `delta` to `hidden` `[num_tokens, size]` in place, where there is one; the sum's RMS norm."""

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`silu(gate) * up` `[num_tokens, size]` of `gate_up` `[num_tokens, 2 * size]`, which may be overwritten."""


class TorchLayerOps:
    """Implements `LayerOps` on any device."""

    def add_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        if delta is not None:
            hidden += delta
        return F.rms_norm(hidden, (hidden.shape[-1],), weight, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


class TritonLayerOps:
    """Implements `LayerOps` on a GPU, one kernel each."""

    def __init__(self) -> None:
        from llmservice_server.kernels.activation import silu_mul
        from llmservice_server.kernels.norm import add_rms_norm

        self.add_norm = add_rms_norm
        self.silu_mul = silu_mul
