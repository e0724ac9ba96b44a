"""A matrix that hidden states are multiplied with, on a CPU in the layout that its matrix product likes best."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

if TYPE_CHECKING:
    from llmservice_server.models.panels import Panels

_LAYOUT_ROWS = 512
"""The number of rows that oneDNN picks the layout for. The layout for a full step's rows proved fast for every smaller
number as well; those for 1 and for 32 rows are up to ten times slower elsewhere (float32 and bfloat16, AVX-512)."""

_STEPS = ((8, 1), (32, 4), (64, 8), (128, 16), (640, 32), (math.inf, 64))
"""Up to so many rows, multiples of the second number: finely as far as a step's usual sizes go."""


FEW_ROWS = 64
"""Up to so many, products by kernels of our own are as fast as oneDNN's, or faster."""
_AGREEMENT = 0.02  # between two ways of adding up: bfloat16 has three digits


@dataclass(slots=True)
class Linear:
    """`weight` is `[out, in]` until `pack`, and oneDNN's own affair from then on.

    `panels` does products of a few rows where our own kernels can read its memory.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    packed: bool = False
    panels: Panels | None = field(default=None, repr=False)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[num_rows, in]` to `[num_rows, out]`."""
        if (panels := self.panels_for(hidden)) is not None:
            return panels(hidden)
        if self.packed:
            num_rows = hidden.shape[0]
            surplus = padded_rows(num_rows) - num_rows
            rows = F.pad(hidden, (0, 0, 0, surplus)) if surplus else hidden
            return _packed_product(rows, self.weight, self.bias)[:num_rows]
        return F.linear(hidden, self.weight, self.bias)

    def panels_for(self, hidden: torch.Tensor) -> Panels | None:
        """Whose affair a product with so many rows is, where it is theirs."""
        return self.panels if len(hidden) <= FEW_ROWS else None

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
            from llmservice_server.models.panels import Panels  # brings a compiler along

            panels = Panels.of(self.weight, self.bias)
            self.panels = panels if panels is not None and self._agrees(panels) else None

    def _agrees(self, panels: Panels) -> bool:
        """Whether a product of ours with the packed matrix is what oneDNN's is."""
        hidden = torch.linspace(-1, 1, self.weight.shape[1], dtype=self.weight.dtype)[None]
        theirs = _packed_product(hidden, self.weight, self.bias).float()
        return bool((panels(hidden).float() - theirs).norm() <= _AGREEMENT * theirs.norm())

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


def _packed_product(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(hidden, weight, bias, "none", [], "")
    return product
