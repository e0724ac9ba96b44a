"""SiLU times gate: what a Llama's MLP does between its two products."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from llmservice_server.backend.cuda.kernels.jit import jit, padded


@jit
def _add_rms_norm(
    hidden: tl.tensor,
    delta: tl.tensor,
    weight: tl.tensor,
    normed: tl.tensor,
    eps: tl.tensor,
    ADDS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * SIZE
    columns = tl.arange(0, WIDTH)
    mask = columns < SIZE
    states = tl.load(hidden + row + columns, mask=mask, other=0.0)
    if ADDS:
        added = states.to(tl.float32) + tl.load(delta + row + columns, mask=mask, other=0.0).to(tl.float32)
        states = added.to(states.dtype)  # rounded as the sum that the next layer adds to is
        tl.store(hidden + row + columns, states, mask=mask)
    states = states.to(tl.float32)
    mean_square = tl.sum(states * states, axis=0) / SIZE
    factor = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    scaled = states * tl.rsqrt(mean_square + eps) * factor
    tl.store(normed + row + columns, scaled.to(normed.dtype.element_ty), mask=mask)


def add_rms_norm(hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add `delta` to `hidden` in place, where there is one, and return the sum's RMS norm times `weight`.

    All contiguous: hidden, delta and the answer `[num_rows, size]`, weight `[size]`. Bytes: 2 reads and 2 writes of
    `num_rows * size` elements; 1 and 1 without a delta.
    """
    normed = torch.empty_like(hidden)
    size = hidden.shape[1]
    width = padded(size)
    _add_rms_norm[(len(hidden),)](
        hidden,
        hidden if delta is None else delta,
        weight,
        normed,
        eps,
        ADDS=delta is not None,
        SIZE=size,
        WIDTH=width,
        num_warps=min(16, max(2, width // 512)),
    )
    return normed


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
