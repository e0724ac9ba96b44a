"""Quantised products of a GPU, with torch's fp8 product on the CPU and our kernel in Triton's interpreter."""

import pytest
import torch

from llmservice_server.backend.cuda.linear import CudaQuantizedLinear, multiplies_fp8
from llmservice_server.backend.quantized import QuantizedLinear, QuantizedWeight


@pytest.mark.parametrize("static", [False, True])
def test_fp8_products_agree_with_rounded_activations(static: bool) -> None:
    random = torch.Generator().manual_seed(0)
    values = torch.randn(48, 64, generator=random).to(torch.float8_e4m3fn)
    scales = torch.rand(48, 1, generator=random)
    input_scale = torch.tensor([0.01]) if static else None
    weight = QuantizedWeight(values, scales, activations="fp8", input_scale=input_scale)
    hidden, bias = torch.randn(20, 64, generator=random).bfloat16(), torch.randn(48, generator=random).bfloat16()
    assert multiplies_fp8(weight, hidden.dtype)
    expected = QuantizedLinear(weight, hidden.dtype, bias)(hidden).float()
    product = CudaQuantizedLinear.of(QuantizedLinear(weight, hidden.dtype, bias))(hidden).float()
    assert (product - expected).norm() < 0.1 * expected.norm()  # the interpreter truncates where a GPU rounds


def test_reordered_inputs_are_multiplied_by_their_own_weights() -> None:
    random = torch.Generator().manual_seed(0)
    values = torch.randint(0, 256, (32, 64), generator=random).to(torch.uint8)
    order = torch.randperm(128, generator=random).int()
    weight = QuantizedWeight(values, torch.rand(32, 4, generator=random), group=32, order=order)
    hidden = torch.randn(3, 128, generator=random)
    linear = QuantizedLinear(weight, hidden.dtype)
    torch.testing.assert_close(CudaQuantizedLinear.of(linear)(hidden), linear(hidden))
