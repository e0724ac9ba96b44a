"""A matrix that hidden states are multiplied with, on a CPU in the layout that its matrix product likes best."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from llmservice_server.cpu.compiled import use_threads
from llmservice_server.cpu.element import as_array
from llmservice_server.cpu.panel_product import as_lanes, multiply, panels_of

_LAYOUT_ROWS = 512
"""The number of rows that oneDNN picks the layout for. The layout for a full step's rows proved fast for every smaller
number as well; those for 1 and for 32 rows are up to ten times slower elsewhere (float32 and bfloat16, AVX-512)."""

_STEPS = ((8, 1), (32, 4), (64, 8), (128, 16), (256, 32), (math.inf, 64))
"""Up to so many rows, multiples of the second number."""


FEW_ROWS = 64
"""Up to so many, products by kernels of our own are as fast as oneDNN's, or faster."""
_AGREEMENT = 0.02  # between two ways of adding up: bfloat16 has three digits


@dataclass(slots=True)
class Linear:
    """`weight` is `[out, in]` until `pack`, and oneDNN's own affair from then on.

    `panels` is its memory where our own kernels can read that.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    packed: bool = False
    panels: npt.NDArray[Any] | None = field(default=None, repr=False)
    _bias: npt.NDArray[Any] | None = field(default=None, init=False, repr=False)  # beside `panels`; maybe empty

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[num_rows, in]` to `[num_rows, out]`."""
        if self.panels is not None and len(hidden) <= FEW_ROWS:
            product = hidden.new_empty(len(hidden), len(self.panels) * self.panels.shape[2])
            multiply(as_lanes(hidden.contiguous()), self.panels, self._bias, as_array(product))
            return product
        if self.packed:
            num_rows = hidden.shape[0]
            surplus = padded_rows(num_rows) - num_rows
            rows = F.pad(hidden, (0, 0, 0, surplus)) if surplus else hidden
            return _packed_product(rows, self.weight, self.bias)[:num_rows]
        return F.linear(hidden, self.weight, self.bias)

    def pack(self) -> None:
        """Lay the weight out for the product once, where that is possible, instead of anew for every product.

        torch does this itself for compiled models only, by the same operators.
        """
        if not self.packed and self.weight.device.type == "cpu" and can_pack(self.weight.dtype):
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight, _LAYOUT_ROWS)
            self.packed = True

    def find_panels(self) -> None:
        """Have products of a few rows done by our own kernel, where it can read what `pack` has made.

        It is compiled when it first runs, which takes seconds.
        """
        if self.packed:
            outputs, inputs = self.weight.shape
            self.panels = _panels(self.weight, outputs, inputs)
            self._bias = as_array(torch.empty(0, dtype=self.weight.dtype) if self.bias is None else self.bias)

    def parts(self, names: dict[str, int]) -> Iterator[tuple[str, torch.Tensor]]:
        """The rows of a fused matrix under the checkpoint's names; `names` gives each its number of rows, in order."""
        sizes = list(names.values())
        for name, weight in zip(names, torch.split(self.weight, sizes), strict=True):
            yield f"{name}.weight", weight
        if self.bias is not None:
            for name, bias in zip(names, torch.split(self.bias, sizes), strict=True):
                yield f"{name}.bias", bias

    @property
    def nbytes(self) -> int:
        """Of the matrix, whatever its layout, and the bias."""
        bias = 0 if self.bias is None else self.bias.nbytes
        return self.weight.numel() * self.weight.dtype.itemsize + bias


def padded_rows(num_rows: int) -> int:
    """The number of rows that a packed product of `num_rows` is computed with.

    For every other number of rows oneDNN makes another kernel, which takes milliseconds and half a megabyte: there must
    not be one for every number of tokens that a step may have. At most a third is added, and little to many rows.
    """
    step = next(step for most, step in _STEPS if num_rows <= most)
    return -(-num_rows // step) * step


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch and this CPU have the packed product for `dtype`: tried, since nothing documents it."""
    if not torch._C._has_mkldnn:
        return False
    weight, hidden = torch.eye(32, dtype=dtype), torch.arange(64, dtype=dtype).view(2, 32)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _LAYOUT_ROWS)
        return torch.equal(_packed_product(hidden, packed, None), hidden)
    except (AttributeError, RuntimeError):  # another torch, or a CPU without instructions for this dtype
        return False


def _panels(weight: torch.Tensor, outputs: int, inputs: int) -> npt.NDArray[Any] | None:
    """The packed matrix's memory, if a product of ours with it is what oneDNN's is."""
    panels = panels_of(weight, (outputs, inputs))
    if panels is None:
        return None
    use_threads(torch.get_num_threads())
    hidden = torch.linspace(-1, 1, inputs, dtype=weight.dtype)[None]
    ours = hidden.new_empty(1, outputs)
    multiply(as_lanes(hidden), panels, as_array(hidden.new_empty(0)), as_array(ours))
    theirs = _packed_product(hidden, weight, None).float()
    return panels if (ours.float() - theirs).norm() <= _AGREEMENT * theirs.norm() else None


def _packed_product(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(hidden, weight, bias, "none", [], "")
    return product
