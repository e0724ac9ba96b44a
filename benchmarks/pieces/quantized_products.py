"""Matrix products of weights of 8 and 4 bits on this CPU, beside those of bfloat16."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from llmservice_server.backend.cpu.int4 import Int4Linear
from llmservice_server.backend.cpu.int8 import Int8Linear
from llmservice_server.backend.cpu.linear import PackedLinear, pack
from llmservice_server.backend.cpu.linear_kernels import HAS_QUAD_PRODUCT
from llmservice_server.backend.layers import Linear
from llmservice_server.backend.quantized import QuantizedWeight
from llmservice_server.backend.torch.layer_ops import TorchLinear

SHAPES = ((2304, 768), (6144, 768), (768, 3072))  # of a model of 110 million parameters
NUM_ROWS = (1, 8, 32, 256)
_ROUNDS = 8
_COLD_BYTES = 256 << 20
"""Of matrices in bfloat16 that are multiplied one after the other, as in a step: none of them is in a cache then."""


def measure_products(outputs: int, inputs: int, num_rows: int) -> dict[str, float]:
    """Seconds in bfloat16, with 4 bits in groups of 128, in mxfp4 and NVFP4, and in 8 bits where the CPU can.

    Those in 8 bits include the quantisation of activations.
    """
    weight = torch.randn(outputs, inputs)
    numbers = torch.randint(256, (outputs, inputs // 2), dtype=torch.uint8)
    of_4_bits = QuantizedWeight(numbers, torch.rand(outputs, inputs // 128).bfloat16(), group=128)
    powers = torch.full((outputs, inputs // 32), 120, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    mxfp4 = QuantizedWeight(numbers, powers, group=32)
    scales = torch.rand(outputs, inputs // 16).to(torch.float8_e4m3fn)
    nvfp4 = QuantizedWeight(numbers, scales, group=16, output_scales=torch.ones(outputs, 1, dtype=torch.float64))
    makes: dict[str, Callable[[], Linear]] = {
        "bfloat16": lambda: _dense(weight),
        "int4": lambda: Int4Linear.of(of_4_bits, None),
        "mxfp4": lambda: Int4Linear.of(mxfp4, None),
        "nvfp4": lambda: Int4Linear.of(nvfp4, None),
    }
    if HAS_QUAD_PRODUCT:
        makes["int8"] = lambda: Int8Linear.of(QuantizedWeight.int8(weight), None)
    count = _COLD_BYTES // (2 * weight.numel())
    linears = {name: [make() for _ in range(count)] for name, make in makes.items()}
    hidden = torch.randn(num_rows, inputs, dtype=torch.bfloat16)
    best = dict.fromkeys(linears, float("inf"))
    for round_ in range(_ROUNDS + 1):
        for name, copies in linears.items():  # in turn: the speed of a shared machine varies
            started_s = time.perf_counter()
            for linear in copies:
                linear(hidden)
            if round_:  # the first one compiles
                best[name] = min(best[name], (time.perf_counter() - started_s) / count)
    return best


def _dense(weight: torch.Tensor) -> Linear:
    linear = pack(TorchLinear(weight.bfloat16()))
    if isinstance(linear, PackedLinear):
        linear.use_kernel()
    return linear
