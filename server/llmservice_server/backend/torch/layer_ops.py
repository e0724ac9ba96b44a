"""The operations of a layer besides attention, in plain torch on any device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from llmservice_server.backend.layers import CLAMPED_LIMIT, CLAMPED_SLOPE, Activation, Linear


@dataclass(slots=True)
class TorchLinear:
    """Implements `Linear`. `weight` is `[out, in]`."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.weight, self.bias)

    def to(self, device: torch.device) -> TorchLinear:
        return TorchLinear(self.weight.to(device), None if self.bias is None else self.bias.to(device))

    @property
    def nbytes(self) -> int:
        bias = 0 if self.bias is None else self.bias.nbytes
        return self.weight.nbytes + bias


class TorchLayerOps:
    """Implements `LayerOps`."""

    def add_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        if delta is not None:
            hidden += delta
        wide = hidden.to(weight.dtype)  # Gemma's weights are float32
        return F.rms_norm(wide, (hidden.shape[-1],), weight, eps).to(hidden.dtype)

    def gated(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        if activation == "clamped_silu":
            gate, up = gate.clamp(max=CLAMPED_LIMIT), up.clamp(-CLAMPED_LIMIT, CLAMPED_LIMIT)
            return up.add_(1).mul_(gate).mul_(torch.sigmoid(gate * CLAMPED_SLOPE))
        return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")).mul_(up)

    def logits(self, hidden: torch.Tensor, norm: torch.Tensor, eps: float, head: Linear) -> torch.Tensor:
        return head(self.add_norm(hidden, None, norm, eps)).float()
