"""Products of a few rows with a packed matrix, by kernels of our own that read its memory; numba compiles them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy.typing as npt
import torch

from llmservice_server.cpu.compiled import use_threads
from llmservice_server.cpu.element import as_array
from llmservice_server.cpu.panel_product import as_lanes, multiply, panels_of


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
