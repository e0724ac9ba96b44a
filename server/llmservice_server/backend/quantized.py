"""Quantised weights: integers or 8-bit floats with scales, and a `Linear` in plain torch that multiplies them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

Activations = Literal["int8", "fp8"]
_FLOAT8 = torch.float8_e4m3fn
_FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FLOAT4_TABLE = (*_FLOAT4, *(-number for number in _FLOAT4))
"""By their bits (e2m1), of which the fourth is the sign."""
INT8_MAX, FLOAT8_MAX = 127.0, 448.0


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A matrix `[out, in]`. Its elements are `(values - zeros) * scales`.

    `scales` `[out / rows, in / group]` and `zeros` have an element for each `rows` outputs and `group` inputs (None:
    all). `order` `[in]` is the input that each column of `values` belongs to; None: as they are.

    With a `table` of sixteen numbers, 4 bits are places in it (NF4, arXiv:2305.14314, section 3).
    With scales of 8 bits, 4 bits are floats (e2m1), not integers: mxfp4 (OCP Microscaling Formats, section 5) with
    powers of two, float8_e8m0fnu, and NVFP4 with float8_e4m3fn, whose products `output_scales` scale again.
    """

    values: torch.Tensor  # int8 or float8_e4m3fn [out, in]; 4 bits: uint8 [out, in / 2] of values + 8, the first lowest
    scales: torch.Tensor
    zeros: torch.Tensor | None = None  # int8
    rows: int = 1
    group: int | None = None
    order: torch.Tensor | None = None
    activations: Activations | None = None  # what the checkpoint was made for; None: not quantised
    input_scale: torch.Tensor | None = None  # of all activations; None: of each row, by its largest number
    output_scales: torch.Tensor | None = None  # float64 [out, 1], so that dividing by a scale is exact too
    table: torch.Tensor | None = None  # float32 [16]

    @property
    def bits(self) -> int:
        return 4 if self.values.dtype == torch.uint8 else 8

    @property
    def shape(self) -> tuple[int, int]:
        outputs, width = self.values.shape
        return outputs, width * 8 // self.bits

    @property
    def nbytes(self) -> int:
        """Without the table, of 64 bytes."""
        parts = self.values, self.scales, self.zeros, self.order, self.input_scale, self.output_scales
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def is_int8_per_output(self) -> bool:
        """Whether products of integers have to be scaled only at their end."""
        return self.values.dtype == torch.int8 and self.scales.shape == (self.shape[0], 1) and self.zeros is None

    @property
    def is_float4(self) -> bool:
        return self.bits == 4 and self.scales.dtype.itemsize == 1

    @property
    def kernel_scales(self) -> torch.Tensor:
        """As kernels take them: powers of two as uint8, numbers of float8_e4m3fn as int8."""
        bits = {torch.float8_e8m0fnu: torch.uint8, _FLOAT8: torch.int8}.get(self.scales.dtype)
        return self.scales if bits is None else self.scales.view(bits)

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """`[out, in]`, computed in float32 and rounded to `dtype` once."""
        outputs, inputs = self.shape
        if self.is_float4 or self.table is not None:
            numbers = _FLOAT4_TABLE if self.table is None else self.table.tolist()
            groups, scales = _looked_up(self.values, numbers).view(*self.scales.shape, -1), self.scales.float()
            if self.output_scales is not None:
                scales = (scales * self.output_scales).float()
            return groups.mul_(scales[..., None]).view(outputs, inputs).to(dtype)
        values = self.values
        if self.bits == 4:
            values = torch.stack((values & 0xF, values >> 4), dim=-1).view(outputs, inputs)
        elements = values.to(torch.float32) - (8 if self.bits == 4 else 0)
        if self.zeros is not None:
            elements -= self._by_element(self.zeros)
        elements *= self._by_element(self.scales)
        if self.order is not None:
            elements = elements[:, torch.argsort(self.order)]
        return elements.to(dtype)

    def _by_element(self, each: torch.Tensor) -> torch.Tensor:
        outputs, inputs = self.shape
        by_column = each.float().repeat_interleave(self.rows, 0)[:outputs]
        return by_column if each.shape[1] == 1 else by_column.repeat_interleave(self.group or inputs, 1)[:, :inputs]

    def to(self, device: torch.device) -> Self:
        names = ("values", "scales", "zeros", "order", "input_scale", "output_scales", "table")
        return replace(self, **{name: part.to(device) for name in names if (part := getattr(self, name)) is not None})

    def by_row(self) -> Self:
        """With scales for each output of its own."""
        if self.rows == 1:
            return self
        outputs = self.shape[0]
        zeros = None if self.zeros is None else self.zeros.repeat_interleave(self.rows, 0)[:outputs]
        return replace(self, scales=self.scales.repeat_interleave(self.rows, 0)[:outputs], zeros=zeros, rows=1)

    def outputs(self, first: int, end: int) -> Self:
        """A copy of some of the outputs, so that no memory of the others is kept."""
        whole = self.by_row()
        names = ("values", "scales", "zeros", "output_scales")
        parts = {name: part[first:end].clone() for name in names if (part := getattr(whole, name)) is not None}
        return replace(whole, **parts)

    @classmethod
    def int8(cls, weight: torch.Tensor) -> Self:
        """A dense matrix, quantised with a scale for each output, for products with 8-bit activations."""
        scales = weight.float().abs().amax(1, keepdim=True) / INT8_MAX
        values = (weight.float() / scales.clamp_min(torch.finfo(torch.float32).tiny)).round_().to(torch.int8)
        return cls(values, scales, activations="int8")


def _looked_up(values: torch.Tensor, numbers: Sequence[float]) -> torch.Tensor:
    """Float32 `[..., in]` of bytes `[..., in / 2]` that have two places among sixteen numbers, the first lowest."""
    pairs = torch.tensor([(numbers[byte & 0xF], numbers[byte >> 4]) for byte in range(256)], device=values.device)
    # As 64-bit integers, of which torch selects two numbers at a time, ten times as fast as rows.
    return pairs.view(torch.int64).flatten().index_select(0, values.flatten().int()).view(torch.float32)


def fuse(parts: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """One matrix of the outputs of several; None where their formats or orders of inputs differ."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    if any(part.shape[0] % part.rows for part in parts[:-1]):  # a block would have outputs of two parts
        parts = [part.by_row() for part in parts]
    of_same_inputs = all(_equal(part.table, first.table) and _equal(part.order, first.order) for part in parts)
    if not of_same_inputs or len({*map(_format_of, parts)}) > 1:
        return None
    input_scale = None
    if first.input_scale is not None:  # the inputs are the same: the largest holds them all
        input_scale = torch.stack([part.input_scale for part in parts if part.input_scale is not None]).amax(0)
    zeros = [part.zeros for part in parts if part.zeros is not None]
    output_scales = [part.output_scales for part in parts if part.output_scales is not None]
    return replace(
        first,
        values=_cat([part.values for part in parts]),
        scales=_cat([part.scales for part in parts]),
        zeros=torch.cat(zeros) if zeros else None,
        rows=parts[0].rows,
        input_scale=input_scale,
        output_scales=torch.cat(output_scales) if output_scales else None,
    )


def _format_of(weight: QuantizedWeight) -> tuple[object, ...]:
    are_absent = (each is None for each in (weight.zeros, weight.output_scales, weight.input_scale))
    dtypes, num_groups = (weight.values.dtype, weight.scales.dtype), weight.scales.shape[1]
    return *dtypes, num_groups, weight.rows, weight.group, weight.activations, *are_absent


def _cat(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """`torch.cat`, which has no float8."""
    if not (parts[0].is_floating_point() and parts[0].itemsize == 1):
        return torch.cat(list(parts))
    return torch.cat([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)


def _equal(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    return torch.equal(left, right)


def round_activations(hidden: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """`hidden` `[num_rows, in]` as its quantised form stands for it, in float32."""
    if weight.activations is None:
        return hidden.float()
    most = INT8_MAX if weight.activations == "int8" else FLOAT8_MAX
    scale = weight.input_scale
    if scale is None:
        scale = hidden.float().abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / most
    scaled = (hidden.float() / scale).clamp_(-most, most)
    return (scaled.round_() if weight.activations == "int8" else scaled.to(_FLOAT8).float()) * scale


@dataclass(slots=True)
class QuantizedLinear:
    """Implements `Linear` on any device: the matrix is dequantised for each product, which is slow."""

    quantized: QuantizedWeight
    dtype: torch.dtype
    bias: torch.Tensor | None = None

    @property
    def weight(self) -> torch.Tensor:
        return self.quantized.values

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.quantized.activations is not None:
            hidden = round_activations(hidden, self.quantized).to(hidden.dtype)
        return F.linear(hidden, self.quantized.dequantize(hidden.dtype), self.bias)

    @property
    def nbytes(self) -> int:
        return self.quantized.nbytes + (0 if self.bias is None else self.bias.nbytes)
