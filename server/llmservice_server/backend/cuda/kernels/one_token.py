"""A mixture's experts of a single token, dense and with SiLU: two kernels, where other products take four.

Nothing has to be sorted, and a matrix of a single column needs no tensor cores: each program reads rows of the experts'
matrices, multiplies them with the token's numbers and adds up. What takes time is the reading.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from llmservice_server.backend.cuda.kernels.jit import jit, padded
from llmservice_server.backend.cuda.kernels.layer_ops import silu

_OUTPUTS = 2
"""Of a program; with the numbers below, the fastest of those measured on an H200 with the experts of Qwen3-30B-A3B."""
_GATE_UP_INPUTS, _DOWN_INPUTS = 2048, 256
"""Read at a time, at most."""


@jit
def _gate_up(
    state: tl.tensor,
    chosen: tl.tensor,
    matrices: tl.tensor,
    gated: tl.tensor,
    SIZE: tl.constexpr,  # outputs of the gate
    WIDTH: tl.constexpr,  # inputs
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
) -> None:
    pair = tl.program_id(1)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = 2 * SIZE * tl.load(chosen + pair) + tl.minimum(outputs, SIZE - 1)  # the last again, instead of a mask
    first = matrices + row[:, None] * WIDTH
    gates = tl.zeros((OUTPUTS, INPUTS), tl.float32)
    ups = tl.zeros((OUTPUTS, INPUTS), tl.float32)
    for begin in range(0, WIDTH, INPUTS):
        places = begin + tl.arange(0, INPUTS)
        exists = places < WIDTH
        numbers = tl.load(state + places, mask=exists, other=0.0).to(tl.float32)[None, :]
        gate = tl.load(first + places[None, :], mask=exists[None, :], other=0.0)
        up = tl.load(first + SIZE * WIDTH + places[None, :], mask=exists[None, :], other=0.0)
        gates += gate.to(tl.float32) * numbers
        ups += up.to(tl.float32) * numbers
    tl.store(gated + pair * SIZE + outputs, silu(tl.sum(gates, 1)) * tl.sum(ups, 1), mask=outputs < SIZE)


@jit
def _down(
    gated: tl.tensor,
    chosen: tl.tensor,
    weights: tl.tensor,
    matrices: tl.tensor,
    sums: tl.tensor,
    NUM_CHOSEN: tl.constexpr,
    SIZE: tl.constexpr,  # outputs
    WIDTH: tl.constexpr,  # inputs
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
) -> None:
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    output = tl.minimum(outputs, SIZE - 1)
    total = tl.zeros((OUTPUTS, INPUTS), tl.float32)
    for pair in tl.static_range(NUM_CHOSEN):
        first = matrices + (SIZE * tl.load(chosen + pair) + output)[:, None] * WIDTH
        weight = tl.load(weights + pair)
        for begin in range(0, WIDTH, INPUTS):
            places = begin + tl.arange(0, INPUTS)
            exists = places < WIDTH
            numbers = tl.load(gated + pair * WIDTH + places, mask=exists, other=0.0) * weight
            matrix = tl.load(first + places[None, :], mask=exists[None, :], other=0.0)
            total += matrix.to(tl.float32) * numbers[None, :]
    tl.store(sums + outputs, tl.sum(total, 1).to(sums.dtype.element_ty), mask=outputs < SIZE)


def experts_of_one_token(
    hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """The weighted sum `[1, hidden_size]` of what the chosen experts make of `hidden` `[1, hidden_size]`.

    chosen: int64 `[1, top_k]`. weights: float32, likewise. gate_up: `[experts, 2 * width, hidden_size]`, the gate's
    rows first. down: `[experts, hidden_size, width]`. All contiguous. Bytes: the chosen experts' matrices, once.
    """
    hidden_size, width = down.shape[1:]
    num_chosen = chosen.numel()
    gated = hidden.new_empty((num_chosen, width), dtype=torch.float32)
    sums = torch.empty_like(hidden)
    _gate_up[triton.cdiv(width, _OUTPUTS), num_chosen](
        hidden,
        chosen,
        gate_up,
        gated,
        SIZE=width,
        WIDTH=hidden_size,
        OUTPUTS=_OUTPUTS,
        INPUTS=min(_GATE_UP_INPUTS, padded(hidden_size)),
    )
    _down[(triton.cdiv(hidden_size, _OUTPUTS),)](
        gated,
        chosen,
        weights,
        down,
        sums,
        NUM_CHOSEN=num_chosen,
        SIZE=hidden_size,
        WIDTH=width,
        OUTPUTS=_OUTPUTS,
        INPUTS=min(_DOWN_INPUTS, padded(width)),
    )
    return sums
