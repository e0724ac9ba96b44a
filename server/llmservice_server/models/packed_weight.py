"""One row times a matrix that lies packed as oneDNN's product wants it: read once, as fast as memory gives it.

A step of one sequence reads every weight for one multiplication each. oneDNN spends tens of microseconds on a call
before it begins; this begins at once, and keeps to one copy of the weights.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch

from llmservice_server.cpu.compiled import compiled
from llmservice_server.cpu.element import as_array, first_of_pair, narrowed, second_of_pair, widened

_BLOCK = 64
"""Outputs that lie side by side: as many as fill four vector registers with sums."""
_UNROLLED = 4
"""Inputs that are added up at a time, so that the sums are written a quarter as often."""
_LANES = {torch.float32: np.float32, torch.bfloat16: np.uint32}
_NO_BIAS = np.empty(0, np.float32)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """The memory of a packed weight, `[out / 64, in / pair, 64]`, filled up with zeros.

    Inputs lie in pairs, two bfloat16 in a uint32, or singly as float32.
    """

    blocks: npt.NDArray[Any]
    bias: npt.NDArray[np.float32]
    num_out: int
    num_in: int
    dtype: torch.dtype

    @classmethod
    def of(cls, packed: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedWeight | None:
        """None where `packed` does not hold `weight` in this layout: oneDNN documents none, so each is looked at.

        The memory stays `packed`'s, and is as short-lived.
        """
        if weight.dtype not in _LANES:
            return None
        try:
            num_bytes, address = torch.ops.mkldnn._nbytes(packed), torch.ops.mkldnn.data_ptr(packed)
        except (AttributeError, RuntimeError):  # another torch
            return None
        num_out, num_in = weight.shape
        num_blocks = -(-num_out // _BLOCK)
        if num_bytes % (num_blocks * _BLOCK * 4 * _UNROLLED):
            return None
        memory = np.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), _LANES[weight.dtype])
        wide = _NO_BIAS if bias is None else bias.float().numpy()
        found = cls(memory.reshape(num_blocks, -1, _BLOCK), wide, num_out, num_in, weight.dtype)
        return found if found._holds(weight) else None

    @property
    def num_padded_in(self) -> int:
        return int(self.blocks.shape[1]) * 4 // self.dtype.itemsize

    def _holds(self, weight: torch.Tensor) -> bool:
        """Whether the first and the last block are those of `weight`, bit for bit."""
        if self.num_padded_in < self.num_in:
            return False
        for number in {0, len(self.blocks) - 1}:
            expected = as_array(weight[number * _BLOCK : (number + 1) * _BLOCK])
            by_row = self.blocks[number].T.copy().view(expected.dtype)
            if not np.array_equal(by_row[: len(expected), : self.num_in], expected):
                return False
        return True

    def times(self, row: torch.Tensor) -> torch.Tensor:
        """The product with `row` `[1, in]`, `[1, out]`."""
        product = row.new_empty(1, self.num_out)
        multiply = _multiply if self.dtype == torch.float32 else _multiply_pairs
        multiply(self.blocks, as_array(row)[0], self.bias, as_array(product)[0])
        return product


@compiled(parallel=True)
def _multiply(blocks: Any, row: Any, bias: Any, product: Any) -> None:
    inputs = _filled_up(row, blocks.shape[1])
    for number in numba.prange(len(blocks)):
        sums = np.zeros(_BLOCK, np.float32)
        _add_products(blocks[number], inputs, sums)
        _write(sums, bias, number * _BLOCK, product)


@compiled(parallel=True)
def _multiply_pairs(blocks: Any, row: Any, bias: Any, product: Any) -> None:
    inputs = _filled_up(row, 2 * blocks.shape[1])
    for number in numba.prange(len(blocks)):
        sums = np.zeros(_BLOCK, np.float32)
        _add_pairs(blocks[number], inputs, sums)
        _write(sums, bias, number * _BLOCK, product)


@compiled()
def _filled_up(row: Any, length: int) -> Any:
    """The row as float32, with zeros behind it."""
    inputs = np.zeros(length, np.float32)
    for index in range(len(row)):
        inputs[index] = widened(row[index])
    return inputs


@compiled()
def _write(sums: Any, bias: Any, first: int, product: Any) -> None:
    """The sums of a block, with their bias, into `product` `[num_out]` from `first` on."""
    for place in range(min(_BLOCK, len(product) - first)):
        if len(bias) > 0:
            sums[place] += bias[first + place]
        product[first + place] = narrowed(sums[place], product[first + place])


@compiled()
def _add_products(block: Any, inputs: Any, sums: Any) -> None:
    for index in range(0, len(block), _UNROLLED):
        weights_0, weights_1, weights_2, weights_3 = block[index], block[index + 1], block[index + 2], block[index + 3]
        input_0, input_1, input_2, input_3 = inputs[index], inputs[index + 1], inputs[index + 2], inputs[index + 3]
        for place in range(_BLOCK):
            sums[place] += (
                input_0 * weights_0[place]
                + input_1 * weights_1[place]
                + input_2 * weights_2[place]
                + input_3 * weights_3[place]
            )


@compiled()
def _add_pairs(block: Any, inputs: Any, sums: Any) -> None:
    for index in range(0, len(block), 2):
        pairs_0, pairs_1 = block[index], block[index + 1]
        first = 2 * index
        input_0, input_1, input_2, input_3 = inputs[first], inputs[first + 1], inputs[first + 2], inputs[first + 3]
        for place in range(_BLOCK):
            sums[place] += (
                input_0 * first_of_pair(pairs_0[place])
                + input_1 * second_of_pair(pairs_0[place])
                + input_2 * first_of_pair(pairs_1[place])
                + input_3 * second_of_pair(pairs_1[place])
            )
