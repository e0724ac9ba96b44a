"""What a CPU does between a step's products, compiled by numba when it first runs.

torch takes several passes for a norm or an activation and a call for each pass: where a step is a token of each
sequence, calls are what they cost, and where it is prompts, the memory's time. Sums and intermediate values are float32
whatever the model's dtype.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from llmservice_server.backend.base import Linear
from llmservice_server.backend.cpu.compiled import compiled, compiled_inner, for_each
from llmservice_server.backend.cpu.element import as_array, exp, narrowed, widened
from llmservice_server.backend.cpu.linear import PackedLinear
from llmservice_server.backend.cpu.panel_product import PANEL, multiply_into
from llmservice_server.backend.torch.layer_ops import TorchLayerOps

_MANY = 1 << 18
"""Elements from which on torch is faster, which has its passes done by all threads."""


class CpuLayerOps(TorchLayerOps):
    """Implements `LayerOps` by one pass of one thread each, and for long prompts as torch does."""

    def add_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        if hidden.numel() >= _MANY:
            return super().add_norm(hidden, delta, weight, eps)
        normed = torch.empty_like(hidden)
        arrays = as_array(hidden), as_array(weight), np.float32(eps), as_array(normed)
        if delta is None:
            norm(*arrays)
        else:
            add_norm(as_array(delta), *arrays)
        return normed

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        if gate_up.numel() >= _MANY:
            return super().silu_mul(gate_up)
        gated = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        _silu_mul(as_array(gate_up), as_array(gated))
        return gated


class ThreadedCpuLayerOps:
    """Implements `LayerOps` by one pass of all threads each. That takes seconds longer to compile."""

    def add_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        normed = torch.empty_like(hidden)
        arrays = as_array(hidden), as_array(weight), np.float32(eps), as_array(normed)
        if delta is None:
            norm(*arrays)
        else:
            _add_norm_threaded(as_array(delta), *arrays)
        return normed

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gated = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        _silu_mul_threaded(as_array(gate_up), as_array(gated))
        return gated

    def logits(self, hidden: torch.Tensor, norm: torch.Tensor, eps: float, head: Linear) -> torch.Tensor:
        """One call does it all for a few rows.

        Behind a step that has read all weights nothing of Python and torch is left in the caches: each of several
        calls takes ten times as long as it seems to.
        """
        if not isinstance(head, PackedLinear) or (panels := head.panels_for(hidden)) is None:
            return head(self.add_norm(hidden, None, norm, eps)).float()
        logits = torch.empty(len(hidden), len(panels.memory) * panels.memory.shape[2])
        arrays = as_array(hidden.contiguous()), as_array(norm), np.float32(eps)
        _multiply_norms(*arrays, panels.memory, panels.bias, logits.numpy())
        return logits


@compiled_inner()
def _norm_row(row: Any, weight: Any, eps: Any, normed: Any) -> None:
    total = np.float32(0)
    for index in range(len(row)):
        total += widened(row[index]) * widened(row[index])
    scale = np.float32(1) / np.sqrt(total / np.float32(len(row)) + eps)
    for index in range(len(row)):
        normed[index] = narrowed(widened(row[index]) * scale * widened(weight[index]), normed[index])


@compiled()
def norm(hidden: Any, weight: Any, eps: Any, normed: Any) -> None:
    """Write the RMS norm of each row, times `weight`."""
    for row in range(len(hidden)):
        _norm_row(hidden[row], weight, eps, normed[row])


@compiled_inner()
def add(delta: Any, hidden: Any) -> None:
    """Add `delta` to `hidden`, in place."""
    for row in range(len(hidden)):
        _add_row(delta[row], hidden[row])


@compiled_inner()
def _add_row(delta: Any, hidden: Any) -> None:
    for index in range(len(hidden)):
        hidden[index] = narrowed(widened(hidden[index]) + widened(delta[index]), hidden[index])


@compiled()
def add_norm(delta: Any, hidden: Any, weight: Any, eps: Any, normed: Any) -> None:
    """Add `delta` to `hidden`, in place, and write the norms of the sum's rows."""
    add(delta, hidden)
    norm(hidden, weight, eps, normed)


@compiled(nogil=True)
def _add_norm_threaded(delta: Any, hidden: Any, weight: Any, eps: Any, normed: Any) -> None:
    for_each(_add_norm_row, len(hidden), (delta, hidden, weight, eps, normed))


@compiled_inner()
def _add_norm_row(row: int, delta: Any, hidden: Any, weight: Any, eps: Any, normed: Any) -> None:
    _add_row(delta[row], hidden[row])
    _norm_row(hidden[row], weight, eps, normed[row])


@compiled_inner()
def silu_mul_row(gate: Any, up: Any, gated: Any) -> None:
    """Write `silu(gate) * up`."""
    for index in range(len(gated)):
        value = widened(gate[index])
        gated[index] = narrowed(value / (np.float32(1) + exp(-value)) * widened(up[index]), gated[index])


@compiled()
def _silu_mul(gate_up: Any, gated: Any) -> None:
    for row in range(len(gated)):
        _silu_mul_row(row, gate_up, gated)


@compiled(nogil=True)
def _silu_mul_threaded(gate_up: Any, gated: Any) -> None:
    for_each(_silu_mul_row, len(gated), (gate_up, gated))


@compiled_inner()
def _silu_mul_row(row: int, gate_up: Any, gated: Any) -> None:
    width = gated.shape[1]
    silu_mul_row(gate_up[row, :width], gate_up[row, width:], gated[row])


@compiled(nogil=True)
def _multiply_norms(hidden: Any, weight: Any, eps: Any, panels: Any, bias: Any, product: Any) -> None:
    """`norm(hidden) @ panels + bias` into `product`, float32, rounded as the elements of `hidden` are.

    hidden: an array of `as_array`, `[num_rows, in]`. weight: the norm's. panels and bias: those of `multiply`.
    """
    normed = np.empty_like(hidden)
    norm(hidden, weight, eps, normed)
    for_each(_multiply_panel, len(panels), (normed.view(panels.dtype), panels, bias, normed, product))


@compiled_inner()
def _multiply_panel(number: int, lanes: Any, panels: Any, bias: Any, like: Any, product: Any) -> None:
    first = number * PANEL
    sums, rounded = np.empty((len(lanes), PANEL), np.float32), np.empty((len(lanes), PANEL), like.dtype)
    multiply_into(lanes, panels[number], bias[first : first + PANEL], sums, rounded)
    for row in range(len(lanes)):
        for index in range(PANEL):
            product[row, first + index] = widened(rounded[row, index])
