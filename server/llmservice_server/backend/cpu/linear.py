"""A matrix in the layout that oneDNN's product likes best, and products of a few rows by our own kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Self

import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from llmservice_server.backend.base import Linear
from llmservice_server.backend.cpu.compiled import use_threads
from llmservice_server.backend.cpu.element import as_array
from llmservice_server.backend.cpu.panel_product import as_lanes, multiply, panels_of
from llmservice_server.backend.torch.layer_ops import TorchLinear

_LAYOUT_ROWS = 512
"""The number of rows that oneDNN picks the layout for. The layout for a full step's rows proved fast for every smaller
number as well; those for 1 and for 32 rows are up to ten times slower elsewhere (float32 and bfloat16, AVX-512)."""

_STEPS = ((8, 1), (32, 4), (64, 8), (128, 16), (640, 32), (math.inf, 64))
"""Up to so many rows, multiples of the second number: finely as far as a step's usual sizes go."""

FEW_ROWS = 64
"""Up to so many, products by kernels of our own are as fast as oneDNN's, or faster."""
_AGREEMENT = 0.02  # between two ways of adding up: bfloat16 has three digits


@dataclass(frozen=True, slots=True)
class Panels:
    """A matrix and its bias, as the kernels take them."""

    memory: npt.NDArray[Any]
    bias: npt.NDArray[Any]  # maybe empty

    @classmethod
    def of(cls, packed: torch.Tensor, bias: torch.Tensor | None) -> Self | None:
        """None where the memory of what oneDNN has packed is not laid out as the kernels expect."""
        outputs, inputs = packed.shape
        memory = panels_of(packed, (outputs, inputs))
        if memory is None:
            return None
        use_threads(torch.get_num_threads())
        return cls(memory, as_array(torch.empty(0, dtype=packed.dtype) if bias is None else bias))

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[num_rows, in]` to `[num_rows, out]`."""
        product = hidden.new_empty(len(hidden), len(self.memory) * self.memory.shape[2])
        multiply(as_lanes(hidden.contiguous()), self.memory, self.bias, as_array(product))
        return product


@dataclass(slots=True)
class PackedLinear:
    """Implements `Linear`. `weight` has the shape `[out, in]`, and a layout that only oneDNN knows.

    `panels` computes products of a few rows where our own kernels can read that memory.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    panels: Panels | None = field(default=None, repr=False)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        if (panels := self.panels_for(hidden)) is not None:
            return panels(hidden)
        num_rows = hidden.shape[0]
        surplus = padded_rows(num_rows) - num_rows
        rows = F.pad(hidden, (0, 0, 0, surplus)) if surplus else hidden
        return _packed_product(rows, self.weight, self.bias)[:num_rows]

    @property
    def nbytes(self) -> int:
        bias = 0 if self.bias is None else self.bias.nbytes
        return self.weight.numel() * self.weight.dtype.itemsize + bias

    def panels_for(self, hidden: torch.Tensor) -> Panels | None:
        """None where oneDNN computes a product with so many rows."""
        return self.panels if len(hidden) <= FEW_ROWS else None

    def find_panels(self) -> None:
        """Use our own kernel for a few rows, where it reads the packed memory and agrees with oneDNN's product.

        It is compiled when it first runs, which takes seconds.
        """
        panels = Panels.of(self.weight, self.bias)
        self.panels = panels if panels is not None and self._agrees(panels) else None

    def _agrees(self, panels: Panels) -> bool:
        hidden = torch.linspace(-1, 1, self.weight.shape[1], dtype=self.weight.dtype)[None]
        expected = _packed_product(hidden, self.weight, self.bias).float()
        return bool((panels(hidden).float() - expected).norm() <= _AGREEMENT * expected.norm())


def pack(linear: Linear) -> Linear:
    """Lay a matrix out for the product once, where that is possible, instead of anew for every product.

    torch does this itself for compiled models only, by the same operators.
    """
    if not isinstance(linear, TorchLinear) or not can_pack(linear.weight.dtype):
        return linear
    return PackedLinear(torch.ops.mkldnn._reorder_linear_weight(linear.weight, _LAYOUT_ROWS), linear.bias)


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


def _packed_product(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(hidden, weight, bias, "none", [], "")
    return product
