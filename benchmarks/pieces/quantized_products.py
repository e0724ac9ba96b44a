"""Matrix products of 8-bit weights and activations on this CPU, beside those of bfloat16."""

from __future__ import annotations

import time

import torch

from llmservice_server.backend.base import Linear
from llmservice_server.backend.cpu.int8 import Int8Linear
from llmservice_server.backend.cpu.linear import HAS_QUAD_PRODUCT, PackedLinear, pack
from llmservice_server.backend.quantized import QuantizedWeight
from llmservice_server.backend.torch.layer_ops import TorchLinear

SHAPES = ((2304, 768), (6144, 768), (768, 3072))  # of a model of 110 million parameters
NUM_ROWS = (1, 8, 32, 256)
_ROUND_S = 0.3


def measure_products(outputs: int, inputs: int, num_rows: int) -> tuple[float, float] | None:
    """Seconds in bfloat16 and in 8 bits, the quantisation of activations included; None where the CPU has no such."""
    if not HAS_QUAD_PRODUCT:
        return None
    weight = torch.randn(outputs, inputs)
    dense = pack(TorchLinear(weight.bfloat16()))
    if isinstance(dense, PackedLinear):
        dense.use_kernel()
    linears: tuple[Linear, ...] = dense, Int8Linear.of(QuantizedWeight.int8(weight), None)
    hidden = torch.randn(num_rows, inputs, dtype=torch.bfloat16)
    best = [float("inf")] * len(linears)
    for linear in linears:
        linear(hidden)
    end_s = time.perf_counter() + _ROUND_S
    while time.perf_counter() < end_s:
        for index, linear in enumerate(linears):  # in turn: the speed of a shared machine varies
            started_s = time.perf_counter()
            linear(hidden)
            best[index] = min(best[index], time.perf_counter() - started_s)
    return best[0], best[1]
