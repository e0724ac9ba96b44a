"""Products of 8-bit integers on a CPU: weights are quantised per output, each row of activations as it comes.

AVX-512 VNNI multiplies four unsigned by four signed bytes and adds them to a 32-bit sum, twice as many products an
instruction as of bfloat16, and weights take half the memory. Activations are `round(x / scale) + 128` with a scale for
each row, the largest number over 127; what the 128 adds to a sum is known before (`offsets`). Weights are packed as
those of bfloat16, with four inputs in place of two: `[out / 64, in / 4, 64]`. oneDNN's product of the same layout is
at most a seventh faster at 256 rows, slower at one, and it packs a matrix two hundred times as slowly.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch

from llmservice_server.backend.cpu.compiled import compiled, compiled_inner, for_each, use_threads
from llmservice_server.backend.cpu.linear_kernels import (
    COLUMNS,
    HAS_QUAD_PRODUCT,
    LINES_AT_ONCE,
    add_products,
    write_rows,
)
from llmservice_server.backend.cpu.llvm import as_array, to_float32
from llmservice_server.backend.quantized import QuantizedWeight

_MOST_INPUTS = 1 << 16
"""As many products of 255 and 127 fit into 32 bits."""
_THREADED_ROWS = 16
_TO_INTEGER = 3 << 22
"""A float32 with this added is rounded to an integer, in its lowest bits."""


@dataclass(slots=True)
class Int8Linear:
    """Implements `Linear`. `weight` is int32 `[out / 64, in / 4, 64]`, each four int8."""

    weight: torch.Tensor
    scales: torch.Tensor  # [out] float32
    offsets: torch.Tensor  # [out] int32: what a sum starts with
    bias: torch.Tensor | None = None
    _arrays: tuple[Any, Any] | None = field(default=None, repr=False)

    @classmethod
    def of(cls, weight: QuantizedWeight, bias: torch.Tensor | None) -> Self:
        outputs, inputs = weight.shape
        quads = weight.values.view(outputs // COLUMNS, COLUMNS, inputs // 4, 4).permute(0, 2, 1, 3)
        offsets = weight.values.sum(1, dtype=torch.int32).mul_(-128)
        scales = weight.scales.flatten().float()
        use_threads(torch.get_num_threads())
        return cls(quads.contiguous().view(torch.int32).squeeze(-1), scales, offsets, bias)

    def __call__(self, hidden: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Implements `Linear`. dtype: of the product; None: that of `hidden`."""
        if self._arrays is None:
            bias = hidden.new_empty(0) if self.bias is None else self.bias
            self._arrays = self.weight.numpy(), (self.scales.numpy(), self.offsets.numpy(), as_array(bias))
        weights, scaled = self._arrays
        product = hidden.new_empty(len(hidden), len(self.scales), dtype=dtype or hidden.dtype)
        rows = np.empty(hidden.shape, np.uint8), np.empty(len(hidden), np.float32)
        multiply_int8(as_array(hidden.contiguous()), rows, weights, scaled, as_array(product))
        return product

    @property
    def nbytes(self) -> int:
        parts = self.weight, self.scales, self.offsets, self.bias
        return sum(part.nbytes for part in parts if part is not None)


def can_multiply(weight: QuantizedWeight) -> bool:
    """Whether this CPU multiplies such weights, int8 with a scale for each output, as integers."""
    outputs, inputs = weight.shape
    fits = outputs % COLUMNS == 0 and inputs % 4 == 0 and inputs <= _MOST_INPUTS
    return HAS_QUAD_PRODUCT and fits and weight.is_int8_per_output


@compiled_inner()
def quantize_row(row: Any, quantized: Any) -> Any:
    """Write `round(row / scale) + 128`; returns the scale, NaN if there is NaN in the row."""
    most = np.int32(0)  # of the bits without the sign, which are in the order of the numbers: numba vectorises it
    for index in range(len(row)):
        most = max(most, np.int32(np.float32(to_float32(row[index])).view(np.int32) & 0x7FFFFFFF))
    largest = np.int32(most).view(np.float32)
    inverse = np.float32(127) / largest if largest > 0 else np.float32(0)
    for index in range(len(row)):
        rounded = to_float32(row[index]) * inverse + np.float32(_TO_INTEGER + 128)
        quantized[index] = np.uint8(np.float32(rounded).view(np.int32))
    return largest / np.float32(127)


@compiled_inner()
def _quantize_row(number: int, hidden: Any, quantized: Any, scales: Any) -> None:
    scales[number] = quantize_row(hidden[number], quantized[number])


@compiled(nogil=True)
def multiply_int8(hidden: Any, rows: Any, weights: Any, scaled: Any, product: Any) -> None:
    """Write `hidden @ weight.T + bias` to `product` `[num_rows, out]`.

    hidden: `[num_rows, in]`. rows: scratch, uint8 `[num_rows, in]` and float32 `[num_rows]`. weights: `[out / 64, in /
    4, 64]`. scaled: scales and offsets `[out]`, and the bias `[out]`, or empty. hidden, bias and product are arrays of
    `as_array`.
    """
    quantize_rows(hidden, rows)
    for_each(_product_columns, len(weights), (rows[0].view(np.int32), rows[1], weights, scaled, product))


@compiled_inner(nogil=True)
def quantize_rows(hidden: Any, rows: Any) -> None:
    """Write each row of `hidden` `[num_rows, in]`, quantised, to uint8 `[num_rows, in]`, and its scale."""
    quantized, row_scales = rows
    if len(hidden) < _THREADED_ROWS:
        for row in range(len(hidden)):
            _quantize_row(row, hidden, quantized, row_scales)
    else:
        for_each(_quantize_row, len(hidden), (hidden, quantized, row_scales))


@compiled_inner()
def _product_columns(number: int, quads: Any, row_scales: Any, weights: Any, scaled: Any, product: Any) -> None:
    int8_columns(number, (quads, row_scales), weights, scaled, number * COLUMNS, product)


@compiled_inner(owns_arrays=True)
def int8_columns(number: int, rows: Any, weights: Any, scaled: Any, first: int, product: Any) -> None:
    """Write 64 columns of the product, from `64 * number` on, to `product` from its column `first` on.

    rows: of `quantize_rows`, the numbers as int32. weights and scaled: as in `multiply_int8`.
    """
    quads, row_scales = rows
    columns = slice(number * COLUMNS, (number + 1) * COLUMNS)
    scales, offsets, bias = scaled[0][columns], scaled[1][columns], scaled[2][columns]
    sums = np.empty((len(quads), COLUMNS), np.int32)
    for row in range(len(sums)):
        for index in range(COLUMNS):
            sums[row, index] = offsets[index]
    for first_line in range(0, weights.shape[1], LINES_AT_ONCE):
        lines = slice(first_line, first_line + LINES_AT_ONCE)
        add_products(quads[:, lines], weights[number, lines], sums)
    write_rows(sums, row_scales, scales, bias, product[:, first : first + COLUMNS])
