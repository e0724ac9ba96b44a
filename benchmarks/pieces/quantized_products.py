"""Matrix products of weights of 8 and 4 bits on this CPU, beside those of bfloat16."""

from __future__ import annotations

import time

import torch

from llmservice_server.backend.base import Linear
from llmservice_server.backend.cpu.int4 import Int4Linear
from llmservice_server.backend.cpu.int8 import Int8Linear
from llmservice_server.backend.cpu.linear import HAS_QUAD_PRODUCT, PackedLinear, pack
from llmservice_server.backend.quantized import QuantizedWeight
from llmservice_server.backend.torch.layer_ops import TorchLinear

SHAPES = ((2304, 768), (6144, 768), (768, 3072))  # of a model of 110 million parameters
NUM_ROWS = (1, 8, 32, 256)
_ROUND_S = 0.3


def measure_products(outputs: int, inputs: int, num_rows: int) -> dict[str, float]:
    """Seconds in bfloat16, with 4 bits in groups of 128, and in 8 bits, where the CPU has instructions for these.

    Those in 8 bits include the quantisation of activations.
    """
    weight = torch.randn(outputs, inputs)
    dense = pack(TorchLinear(weight.bfloat16()))
    if isinstance(dense, PackedLinear):
        dense.use_kernel()
    numbers = torch.randint(256, (outputs, inputs // 2), dtype=torch.uint8)
    of_4_bits = QuantizedWeight(numbers, torch.rand(outputs, inputs // 128).bfloat16(), group=128)
    linears: dict[str, Linear] = {"bfloat16": dense, "int4": Int4Linear.of(of_4_bits, None)}
    if HAS_QUAD_PRODUCT:
        linears["int8"] = Int8Linear.of(QuantizedWeight.int8(weight), None)
    hidden = torch.randn(num_rows, inputs, dtype=torch.bfloat16)
    best = dict.fromkeys(linears, float("inf"))
    for linear in linears.values():
        linear(hidden)
    end_s = time.perf_counter() + _ROUND_S
    while time.perf_counter() < end_s:
        for name, linear in linears.items():  # in turn: the speed of a shared machine varies
            started_s = time.perf_counter()
            linear(hidden)
            best[name] = min(best[name], time.perf_counter() - started_s)
    return best
