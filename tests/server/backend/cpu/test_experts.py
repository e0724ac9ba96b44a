"""The kernel for a mixture's experts agrees with the loop over them."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from llmservice_server.backend.cpu.backend import converted
from llmservice_server.backend.cpu.experts import CpuExperts
from llmservice_server.backend.cpu.layer_ops import CpuLayerOps
from llmservice_server.backend.cpu.linear import FAST_ROWS, pack
from llmservice_server.backend.cpu.linear_kernels import HAS_QUAD_PRODUCT
from llmservice_server.backend.experts import Experts
from llmservice_server.backend.layers import Activation
from llmservice_server.backend.quantized import QuantizedLinear, QuantizedWeight
from llmservice_server.backend.torch.layer_ops import TorchLayerOps, TorchLinear

pytestmark = pytest.mark.slow

NUM_EXPERTS, HIDDEN, WIDTH = 5, 128, 192
NEEDS_QUADS = pytest.mark.skipif(not HAS_QUAD_PRODUCT, reason="this CPU multiplies no 8-bit integers")
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def int4(weight: torch.Tensor) -> QuantizedWeight:
    scales = weight.view(len(weight), -1, 64).abs().amax(-1) / 7
    values = (weight / scales.repeat_interleave(64, 1)).round().int() + 8
    return QuantizedWeight((values[:, ::2] | values[:, 1::2] << 4).to(torch.uint8), scales, group=64)


def mxfp4(weight: torch.Tensor) -> QuantizedWeight:
    """Random numbers of the matrix's size."""
    outputs, inputs = weight.shape
    powers = torch.randint(123, 125, (outputs, inputs // 32)).to(torch.uint8).view(torch.float8_e8m0fnu)
    return QuantizedWeight(torch.randint(0, 256, (outputs, inputs // 2)).to(torch.uint8), powers, group=32)


def nvfp4(weight: torch.Tensor) -> QuantizedWeight:
    outputs, inputs = weight.shape
    scales = (torch.rand(outputs, inputs // 16) / 8).to(torch.float8_e4m3fn)
    by_output = torch.rand(outputs, 1).double()
    values = torch.randint(0, 256, (outputs, inputs // 2)).to(torch.uint8)
    return QuantizedWeight(values, scales, group=16, output_scales=by_output)


def experts(dtype: torch.dtype, *, biases: bool, activation: Activation = "silu") -> Experts:
    torch.manual_seed(0)

    def matrix(outputs: int, inputs: int) -> TorchLinear:
        bias = torch.randn(outputs).to(dtype) if biases else None
        return TorchLinear((torch.randn(outputs, inputs) * inputs**-0.5).to(dtype), bias)

    gate_up = [matrix(2 * WIDTH, HIDDEN) for _ in range(NUM_EXPERTS)]
    return Experts(list(gate_up), [matrix(HIDDEN, WIDTH) for _ in range(NUM_EXPERTS)], activation)


@dtypes
@pytest.mark.parametrize(("biases", "activation"), [(False, "silu"), (True, "clamped_silu"), (False, "gelu_tanh")])
@pytest.mark.parametrize("num_tokens", [1, 6, 2 * NUM_EXPERTS * FAST_ROWS])
def test_the_kernel_agrees_with_the_loop(
    dtype: torch.dtype, biases: bool, activation: Activation, num_tokens: int
) -> None:
    plain, packed = (experts(dtype, biases=biases, activation=activation) for _ in range(2))
    packed.map_linears(pack)
    kernel = CpuExperts.of(packed, dtype)
    if kernel is None:
        pytest.skip("the kernel cannot read what oneDNN packs here")
    hidden = 4 * torch.randn(num_tokens, HIDDEN).to(dtype)  # so that some are bounded
    weights, chosen = torch.rand(num_tokens, NUM_EXPERTS - 1).topk(2)  # the last expert is never chosen
    expected = plain(hidden, chosen, weights, TorchLayerOps()).float()
    ours = kernel(hidden, chosen, weights, CpuLayerOps(threaded=True)).float()
    assert (ours - expected).norm() <= (1e-5 if dtype == torch.float32 else 1e-2) * expected.norm()


@pytest.mark.parametrize("num_tokens", [1, 6, 2 * NUM_EXPERTS * FAST_ROWS])
@pytest.mark.parametrize(
    ("quantized", "biases", "activation", "bound"),
    [
        pytest.param(QuantizedWeight.int8, False, "silu", 0.03, marks=NEEDS_QUADS, id="8 bits"),  # numbers are rounded
        pytest.param(int4, False, "silu", 1e-2, id="4 bits"),
        pytest.param(mxfp4, True, "clamped_silu", 1e-2, id="floats of 4 bits, one scale"),
        pytest.param(nvfp4, True, "clamped_silu", 1e-2, id="floats of 4 bits, two scales, biases"),
    ],
)
def test_the_kernel_agrees_with_the_loop_over_quantised_experts(
    quantized: Callable[[torch.Tensor], QuantizedWeight],
    biases: bool,
    activation: Activation,
    bound: float,
    num_tokens: int,
) -> None:
    dtype = torch.bfloat16
    plain = experts(dtype, biases=biases, activation=activation)
    plain.map_linears(lambda linear: QuantizedLinear(quantized(linear.weight.float()), dtype, linear.bias))
    packed = replace(plain)
    packed.map_linears(lambda linear: converted(linear, for_kernel=True))
    kernel = CpuExperts.of(packed, dtype)
    assert kernel is not None
    hidden = 4 * torch.randn(num_tokens, HIDDEN).to(dtype)
    weights, chosen = torch.rand(num_tokens, NUM_EXPERTS - 1).topk(2)
    expected = plain(hidden, chosen, weights, TorchLayerOps()).float()
    ours = kernel(hidden, chosen, weights, CpuLayerOps(threaded=True)).float()
    assert (ours - expected).norm() <= bound * expected.norm()


def test_each_token_gets_the_weighted_sum_of_its_experts() -> None:
    mixture, ops = experts(torch.float32, biases=True), TorchLayerOps()
    hidden = torch.randn(9, HIDDEN)
    weights, chosen = torch.rand(9, NUM_EXPERTS).topk(3)
    expected = torch.zeros_like(hidden)
    for token in range(9):
        for weight, expert in zip(weights[token], chosen[token].tolist(), strict=True):
            gated = ops.gated(mixture.gate_up[expert](hidden[token : token + 1]), "silu")
            expected[token] += weight * mixture.down[expert](gated)[0]
    torch.testing.assert_close(mixture(hidden, chosen, weights, ops), expected)
