"""Products of a few rows with a packed matrix, by kernels of our own that read its memory; numba compiles them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from llmservice_server.cpu.compiled import use_threads
from llmservice_server.cpu.element import as_array
from llmservice_server.cpu.panel_product import as_lanes, multiply, panels_of
from llmservice_server.models.cpu_head import multiply_norms


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

    def logits(self, hidden: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
        """The product of the RMS norms of `hidden`, `[num_rows, in]`, in float32: `[num_rows, out]`.

        One call does it all. Behind a step that has read all weights nothing of Python and torch is left in the caches:
        each of several calls takes ten times as long as it seems to.
        """
        logits = torch.empty(len(hidden), len(self.memory) * self.memory.shape[2])
        arrays = as_array(hidden.contiguous()), as_array(norm), np.float32(eps)
        multiply_norms(*arrays, self.memory, self.bias, logits.numpy())
        return logits
