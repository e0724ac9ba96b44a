"""Products with quantised weights on a GPU: of few rows by a Triton kernel, of many by torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from llmservice_server.backend.cuda.kernels.conversions import dequantized, round_rows
from llmservice_server.backend.cuda.kernels.products import Tiled, quantized_product
from llmservice_server.backend.quantized import QuantizedLinear, QuantizedWeight

_MULTIPLE = 16
"""Of the sizes of torch's fp8 product."""
_MOST_FP8_ROWS = 32
"""Of rounded activations that our kernel multiplies; torch's product is slow for few rows."""
MOST_ROWS = 128
"""That our kernel multiplies; beyond, dense weights are made for each product, which takes less time than it."""


@dataclass(slots=True)
class CudaQuantizedLinear:
    """Implements `Linear`.

    Activations are rounded to fp8 where the checkpoint was made for that and has a scale for each output; others are
    multiplied as they are, which is more exact.
    """

    tiled: Tiled
    bias: torch.Tensor | None = None
    order: torch.Tensor | None = None  # of the inputs, as of `QuantizedWeight`
    rounds: bool = False  # activations, to fp8
    input_scale: torch.Tensor | None = None

    @classmethod
    def of(cls, linear: QuantizedLinear) -> Self:
        """Of one whose weight `can_multiply`."""
        weight = linear.quantized
        rounds = multiplies_fp8(weight, linear.dtype)
        if rounds:
            weight = replace(weight, scales=weight.scales.float())
        return cls(Tiled.of([weight]), linear.bias, weight.order, rounds, weight.input_scale if rounds else None)

    @property
    def weight(self) -> torch.Tensor:
        return self.tiled.values[0]

    @property
    def nbytes(self) -> int:
        others = self.bias, self.order, self.input_scale
        return self.tiled.nbytes + sum(part.nbytes for part in others if part is not None)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.rounds:
            return self._fp8_product(hidden)
        if self.order is not None:
            hidden = hidden.index_select(1, self.order)
        if len(hidden) <= MOST_ROWS:
            return quantized_product(hidden, self.tiled, self.bias)
        return F.linear(hidden, dequantized(self.tiled, hidden.dtype), self.bias)

    def _fp8_product(self, hidden: torch.Tensor) -> torch.Tensor:
        scales = self.tiled.scales
        assert scales is not None  # noqa: S101 - of quantised weights
        rounded, scale = round_rows(hidden, self.input_scale)
        if len(hidden) <= _MOST_FP8_ROWS:
            return quantized_product(rounded, self.tiled, self.bias, scale, hidden.dtype)
        product: torch.Tensor = torch._scaled_mm(
            rounded,
            self.tiled.values[0].t(),
            scale_a=scale,
            scale_b=scales[0].t(),
            bias=self.bias,
            out_dtype=hidden.dtype,
        )
        return product


def multiplies_fp8(weight: QuantizedWeight, dtype: torch.dtype) -> bool:
    """Whether torch's product with a scale for each row takes it."""
    sizes_fit = all(size % _MULTIPLE == 0 for size in weight.shape)
    by_output = weight.scales.shape == (weight.shape[0], 1)
    return weight.activations == "fp8" and by_output and sizes_fit and dtype == torch.bfloat16
