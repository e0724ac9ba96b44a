"""The form in which a model's matrices are held: dense, or quantised as the checkpoint has them or to int8."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from llmservice_planner.model.quantization import Quantization
from llmservice_server.backend.layers import Linear
from llmservice_server.backend.quantized import QuantizedLinear, QuantizedWeight, fuse
from llmservice_server.backend.torch.layer_ops import TorchLinear


@dataclass(frozen=True, slots=True)
class MatrixForm:
    """What is asked for, and what the backend can multiply."""

    dtype: torch.dtype  # of activations, and of dense matrices
    device: torch.device
    quantization: Quantization
    keeps: Callable[[QuantizedWeight], bool]  # whether the backend multiplies it as fast as a dense one

    def linear(self, parts: Sequence[QuantizedWeight | torch.Tensor], bias: torch.Tensor | None) -> Linear:
        """A matrix of several parts, dense or quantised, whose outputs follow each other."""
        weight = _fused(parts)
        if self.quantization == "int8" and not (weight is not None and weight.is_int8_per_output):
            weight = QuantizedWeight.int8(_dense(parts, torch.float32))
        elif self.quantization == "int8" and weight is not None:
            weight = replace(weight, activations="int8")
        if weight is None or not self._stays_quantized(weight):
            return TorchLinear(_dense(parts, self.dtype).to(self.device), bias)
        return QuantizedLinear(weight.to(self.device), self.dtype, bias)

    def stack(self, places: Sequence[TorchLinear], weights: Iterable[QuantizedWeight]) -> list[Linear]:
        """Matrices of one size for these places; dense ones are parts of one tensor."""
        dense: list[torch.Tensor] = []
        linears: list[Linear] = []
        for number, (place, stored) in enumerate(zip(places, weights, strict=True)):
            weight = stored.to(self.device)
            if self._stays_quantized(weight):
                linears.append(QuantizedLinear(weight, self.dtype, place.bias))
                continue
            if not dense:
                dense = list(torch.empty(len(places), *weight.shape, dtype=self.dtype, device=self.device))
            linears.append(TorchLinear(dense[number].copy_(weight.dequantize(self.dtype)), place.bias))
        return linears

    def _stays_quantized(self, weight: QuantizedWeight) -> bool:
        return self.quantization == "stored" or (self.quantization != "dense" and self.keeps(weight))


def _fused(parts: Sequence[QuantizedWeight | torch.Tensor]) -> QuantizedWeight | None:
    """None if some are dense, or of another format: the matrix cannot be held as they are stored."""
    weights = [part for part in parts if isinstance(part, QuantizedWeight)]
    return fuse(weights) if len(weights) == len(parts) else None


def _dense(parts: Sequence[QuantizedWeight | torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    dense = [part.dequantize(dtype) if isinstance(part, QuantizedWeight) else part.to(dtype) for part in parts]
    return torch.cat(dense) if len(dense) > 1 else dense[0]
