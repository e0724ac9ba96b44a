"""Products with quantised weights on a GPU: fp8 by torch, all others by a Triton kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llmservice_server.backend.cuda.kernels.jit import FP8, FP8_MAX
from llmservice_server.backend.cuda.kernels.quantized_product import quantized_product
from llmservice_server.backend.quantized import QuantizedWeight

_MULTIPLE = 16
"""Of the sizes of torch's fp8 product."""


@dataclass(slots=True)
class CudaQuantizedLinear:
    """Implements `Linear`.

    Activations are rounded to fp8 where the checkpoint was made for that and has a scale for each output; others are
    multiplied as they are, which is more exact.
    """

    quantized: QuantizedWeight
    bias: torch.Tensor | None = None

    @property
    def weight(self) -> torch.Tensor:
        return self.quantized.values

    @property
    def nbytes(self) -> int:
        return self.quantized.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        if multiplies_fp8(self.quantized, hidden.dtype):
            return self._fp8_product(hidden)
        if self.quantized.order is not None:
            hidden = hidden.index_select(1, self.quantized.order)
        return quantized_product(hidden, self.quantized, self.bias)

    def _fp8_product(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = self.quantized
        if weight.input_scale is None:
            scale = hidden.abs().amax(1, keepdim=True).float().clamp_min(torch.finfo(torch.float32).tiny) / FP8_MAX
        else:
            scale = weight.input_scale.expand(len(hidden), 1).contiguous()
        rounded = (hidden.float() / scale).clamp_(-FP8_MAX, FP8_MAX).to(FP8)
        product: torch.Tensor = torch._scaled_mm(
            rounded,
            weight.values.t(),
            scale_a=scale,
            scale_b=weight.scales.float().t(),
            bias=self.bias,
            out_dtype=hidden.dtype,
        )
        return product


def multiplies_fp8(weight: QuantizedWeight, dtype: torch.dtype) -> bool:
    """Whether torch's product with a scale for each row takes it."""
    sizes_fit = all(size % _MULTIPLE == 0 for size in weight.shape)
    by_output = weight.scales.shape == (weight.shape[0], 1)
    return weight.activations == "fp8" and by_output and sizes_fit and dtype == torch.bfloat16
