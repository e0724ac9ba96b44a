"""Linear layers on a CPU: weights packed once, by oneDNN or by us, and a kernel of our own for a few rows of them.

With a few rows a product takes as long as its weights take to come from memory. oneDNN packs a matrix `[out, in]` in
columns as `linear_kernels.py` takes them. Nothing documents the layout, so the kernel's result is compared with
oneDNN's at load.

Where the CPU has no instructions for bfloat16, oneDNN packs no such matrix, and where it has tiles (`tiles.py`), it
packs in another layout. Then we pack the matrix (`OwnPackedLinear`), and our kernel computes any number of rows.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from llmservice_server.backend.cpu.compiled import use_threads
from llmservice_server.backend.cpu.linear_kernels import (
    COLUMNS,
    HAS_TILES,
    HAS_WIDE_REGISTERS,
    LANES,
    UPPER_HALF,
    as_operand,
    multiply,
)
from llmservice_server.backend.cpu.llvm import as_array
from llmservice_server.backend.layers import Linear
from llmservice_server.backend.torch.layer_ops import TorchLinear

_LAYOUT_ROWS = 512
"""The number of rows that oneDNN chooses the layout for. That for a full step's rows proved fast for every smaller
number as well; those for 1 and for 32 rows are up to ten times slower elsewhere (float32 and bfloat16, AVX-512)."""

_ROW_STEPS = ((8, 1), (32, 4), (64, 8), (128, 16), (640, 32), (math.inf, 64))
"""Up to the first number of rows, products have a multiple of the second; finer for the usual sizes of a step."""

KERNEL_ROWS = 64
"""Up to this many rows decode steps with our kernel are as fast as with oneDNN's products, or faster."""
FAST_ROWS = KERNEL_ROWS if HAS_WIDE_REGISTERS else KERNEL_ROWS // 2
"""Up to this many rows a single product is: from 64 on oneDNN's is 1.1 times as fast with registers of 8 numbers."""
_TOLERANCE = 0.02  # between two orders of summation: bfloat16 has three significant digits

_CONVERTED_BLOCKS = 8
"""Times 64 columns that are converted to float32 at a time: they stay in the core's cache until they are multiplied."""


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """A matrix and its bias, as the kernel takes them."""

    memory: npt.NDArray[Any]  # of `packed_memory`
    bias: npt.NDArray[Any]  # empty if there is none

    @classmethod
    def of(cls, packed: torch.Tensor, bias: torch.Tensor | None) -> Self | None:
        """None if oneDNN did not pack the matrix as the kernel expects."""
        outputs, inputs = packed.shape
        memory = packed_memory(packed, (outputs, inputs))
        if memory is None:
            return None
        use_threads(torch.get_num_threads())
        return cls(memory, as_array(torch.empty(0, dtype=packed.dtype) if bias is None else bias))

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[num_rows, in]` to `[num_rows, out]`."""
        product = hidden.new_empty(len(hidden), len(self.memory) * COLUMNS)
        multiply(as_operand(hidden.contiguous()), self.memory, self.bias, as_array(product))
        return product


@dataclass(slots=True)
class PackedLinear:
    """Implements `Linear`. `weight` has the shape `[out, in]` and oneDNN's layout.

    `kernel_weights` is the same memory for our kernel, if the kernel can read it.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    kernel_weights: PackedWeights | None = field(default=None, repr=False)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        if (weights := self.weights_for(hidden)) is not None:
            return weights(hidden)
        num_rows = hidden.shape[0]
        padding = padded_rows(num_rows) - num_rows
        rows = F.pad(hidden, (0, 0, 0, padding)) if padding else hidden
        return _onednn_product(rows, self.weight, self.bias)[:num_rows]

    @property
    def nbytes(self) -> int:
        bias = 0 if self.bias is None else self.bias.nbytes
        return self.weight.numel() * self.weight.dtype.itemsize + bias

    def weights_for(self, hidden: torch.Tensor) -> PackedWeights | None:
        """The kernel's weights; None if oneDNN computes a product with this number of rows."""
        return self.kernel_weights if len(hidden) <= FAST_ROWS else None

    def use_kernel(self) -> None:
        """Use our kernel for a few rows, if it can read the packed memory and agrees with oneDNN's product.

        The first call compiles the kernel, which takes seconds.
        """
        weights = PackedWeights.of(self.weight, self.bias)
        self.kernel_weights = weights if weights is not None and self._agrees(weights) else None

    def _agrees(self, weights: PackedWeights) -> bool:
        hidden = torch.linspace(-1, 1, self.weight.shape[1], dtype=self.weight.dtype)[None]
        expected = _onednn_product(hidden, self.weight, self.bias).float()
        return bool((weights(hidden).float() - expected).norm() <= _TOLERANCE * expected.norm())


@dataclass(slots=True)
class OwnPackedLinear(PackedLinear):
    """Weights in bfloat16 that we pack. `weight` is int32 `[out / 64, in / 2, 64]`, as of `packed_memory`.

    Without the kernel, products are in float32.
    """

    @classmethod
    def of(cls, linear: Linear) -> Self:
        outputs, inputs = linear.weight.shape
        pairs = linear.weight.view(outputs // COLUMNS, COLUMNS, inputs // 2, 2).permute(0, 2, 1, 3)
        return cls(pairs.contiguous().view(torch.int32).squeeze(-1), linear.bias)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        if (weights := self.weights_for(hidden)) is not None:
            return weights(hidden)
        product = hidden.new_empty(len(hidden), len(self.weight), COLUMNS)
        bias = hidden.new_zeros(len(self.weight) * COLUMNS) if self.bias is None else self.bias
        biases, rows = bias.float().view(-1, 1, COLUMNS), hidden.float()
        even, odd = (rows[:, first::2].contiguous().expand(_CONVERTED_BLOCKS, -1, -1) for first in (0, 1))
        halves = self.weight.new_empty(_CONVERTED_BLOCKS, *self.weight.shape[1:])
        for first in range(0, len(self.weight), _CONVERTED_BLOCKS):
            pairs = self.weight[first : first + _CONVERTED_BLOCKS]
            count = len(pairs)
            converted = halves[:count].view(torch.float32)
            torch.bitwise_left_shift(pairs, 16, out=halves[:count])
            total = torch.baddbmm(biases[first : first + count], even[:count], converted)
            torch.bitwise_and(pairs, UPPER_HALF, out=halves[:count])
            product[:, first : first + count] = total.baddbmm_(odd[:count], converted).transpose(0, 1)
        return product.flatten(1)

    def weights_for(self, hidden: torch.Tensor) -> PackedWeights | None:
        """Our kernel computes any number of rows, if it is compiled."""
        return self.kernel_weights

    def use_kernel(self) -> None:
        bias = torch.empty(0, dtype=torch.bfloat16) if self.bias is None else self.bias
        use_threads(torch.get_num_threads())
        self.kernel_weights = PackedWeights(self.weight.numpy(), as_array(bias))

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


def pack(linear: Linear, *, for_kernel: bool = True) -> Linear:
    """Pack a matrix once, if possible, instead of before every product. for_kernel: `use_kernel` will be called.

    torch does this itself for compiled models only, with the same operators.
    """
    if not isinstance(linear, TorchLinear) or not linear.weight.numel():
        return linear
    dtype, (outputs, inputs) = linear.weight.dtype, linear.weight.shape
    fits = dtype == torch.bfloat16 and outputs % COLUMNS == 0 and inputs % 2 == 0
    if fits and ((HAS_TILES and for_kernel) or not can_pack(dtype)):
        return OwnPackedLinear.of(linear)
    if can_pack(dtype):
        return PackedLinear(torch.ops.mkldnn._reorder_linear_weight(linear.weight, _LAYOUT_ROWS), linear.bias)
    return linear


def padded_rows(num_rows: int) -> int:
    """The number of rows that a oneDNN product of `num_rows` is computed with.

    oneDNN generates a kernel for each number of rows, in milliseconds and half a megabyte, and a step may have any
    number of tokens. At most a third is added, and less to many rows.
    """
    step = next(step for most, step in _ROW_STEPS if num_rows <= most)
    return -(-num_rows // step) * step


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch and this CPU have the packed product for `dtype`; tried, because nothing documents it."""
    if not torch._C._has_mkldnn:
        return False
    weight, hidden = torch.eye(32, dtype=dtype), torch.arange(64, dtype=dtype).view(2, 32)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _LAYOUT_ROWS)
        return torch.equal(_onednn_product(hidden, packed, None), hidden)
    except (AttributeError, RuntimeError):  # another torch, or a CPU without instructions for this dtype
        return False


def _onednn_product(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(hidden, weight, bias, "none", [], "")
    return product


def packed_memory(packed: torch.Tensor, shape: tuple[int, int]) -> npt.NDArray[Any] | None:
    """The memory of a matrix `[out, in]` that oneDNN packed: `[out / 64, lines, 64]`, valid as long as `packed`.

    A line is an input in float32, or a pair of inputs in bfloat16, as int32. None if the matrix cannot have this
    layout; the caller has to check that it has. Also None where oneDNN packs for tiles.
    """
    outputs, inputs = shape
    if packed.dtype == torch.bfloat16 and HAS_TILES:
        return None
    if packed.dtype not in (torch.float32, torch.bfloat16) or outputs % COLUMNS or inputs % 2:
        return None
    num_bytes, address = torch.ops.mkldnn._nbytes(packed), torch.ops.mkldnn.data_ptr(packed)
    if num_bytes != outputs * inputs * packed.dtype.itemsize or address % (4 * LANES):
        return None
    memory = (ctypes.c_ubyte * num_bytes).from_address(address)
    numbers = np.frombuffer(memory, np.float32 if packed.dtype == torch.float32 else np.int32)
    return numbers.reshape(outputs // COLUMNS, -1, COLUMNS)
