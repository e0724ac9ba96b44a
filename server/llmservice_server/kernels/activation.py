"""SiLU times gate: what a Llama's MLP does between its two products."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from llmservice_server.kernels.jit import jit

_COLUMNS = 1024


@jit
def _silu_mul(gate_up: tl.tensor, product: tl.tensor, SIZE: tl.constexpr, COLUMNS: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + columns, mask=mask, other=0.0).to(tl.float32)
    decay = tl.exp(-tl.abs(gate))  # never above 1
    activated = gate * tl.where(gate >= 0, 1.0, decay) / (1.0 + decay) * up
    tl.store(product + row * SIZE + columns, activated.to(product.dtype.element_ty), mask=mask)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` `[num_rows, size]` of `gate_up` `[num_rows, 2 * size]`, contiguous, the gate's columns first.

    Bytes: reads `num_rows * 2 * size` elements and writes half as many.
    """
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    product = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device)
    _silu_mul[num_rows, triton.cdiv(size, _COLUMNS)](gate_up, product, SIZE=size, COLUMNS=_COLUMNS, num_warps=4)
    return product
