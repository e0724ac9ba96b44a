"""Products with weights of 4 bits on a CPU, compared with the dequantised weight in float64."""

import pytest
import torch

from llmservice_server.backend.cpu.int4 import Int4Linear, can_multiply
from llmservice_server.backend.quantized import QuantizedWeight

pytestmark = pytest.mark.slow

OUTPUTS, INPUTS = 128, 1536
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def weight_of(group: int | None, dtype: torch.dtype, *, zeros: bool, inputs: int = INPUTS) -> QuantizedWeight:
    random = torch.Generator().manual_seed(0)
    groups = 1 if group is None else inputs // group
    values = torch.randint(0, 256, (OUTPUTS, inputs // 2), generator=random).to(torch.uint8)
    scales = (0.001 + 0.01 * torch.rand(OUTPUTS, groups, generator=random)).to(dtype)
    shifted = torch.randint(-8, 8, (OUTPUTS, groups), generator=random).to(torch.int8) if zeros else None
    return QuantizedWeight(values, scales, shifted, group=group)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("group", "zeros"), [(32, True), (128, False), (768, True), (None, False)])
def test_the_product_is_that_of_the_kernel_s_numbers(group: int | None, zeros: bool, dtype: torch.dtype) -> None:
    """Few rows, whose numbers stay in registers, and many."""
    weight = weight_of(group, dtype, zeros=zeros)
    random = torch.Generator().manual_seed(1)
    bias = torch.randn(OUTPUTS, generator=random).to(dtype)
    linear = Int4Linear.of(weight, bias)
    for num_rows in (1, 2, 3, 4, 5, 6, 7, 33):
        hidden = torch.randn(num_rows, INPUTS, generator=random).to(dtype)
        expected = hidden.double() @ weight.dequantize(torch.float64).T + bias.double()
        product = linear(hidden)
        assert product.dtype == dtype
        assert (product.double() - expected).norm() < BOUNDS[dtype] * expected.norm()
    assert linear.nbytes == weight.nbytes + bias.nbytes


@pytest.mark.parametrize(
    "dtype",  # float16 is multiplied as float32, and rounded as the test above has it
    [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.soak)],
)
@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4"])
def test_floats_of_4_bits_are_multiplied(kind: str, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    values = torch.randint(0, 256, (OUTPUTS, INPUTS // 2), generator=random).to(torch.uint8)
    if kind == "mxfp4":
        powers = torch.randint(120, 135, (OUTPUTS, INPUTS // 32), generator=random).to(torch.uint8)
        weight = QuantizedWeight(values, powers.view(torch.float8_e8m0fnu), group=32)
    else:  # all scales but NaN, also the smallest
        scales = torch.randint(0, 0x7F, (OUTPUTS, INPUTS // 16), generator=random).to(torch.uint8)
        by_output = torch.rand(OUTPUTS, 1, generator=random).double()
        weight = QuantizedWeight(values, scales.view(torch.float8_e4m3fn), group=16, output_scales=by_output)
    bias = torch.randn(OUTPUTS, generator=random).to(dtype)
    linear = Int4Linear.of(weight, bias)
    for num_rows in (1, 3, 6, 33):
        hidden = torch.randn(num_rows, INPUTS, generator=random).to(dtype)
        expected = hidden.double() @ weight.dequantize(torch.float64).T + bias.double()
        assert (linear(hidden).double() - expected).norm() < BOUNDS[dtype] * expected.norm()
    assert linear.nbytes == weight.nbytes + bias.nbytes


def test_reordered_inputs_are_multiplied_by_their_own_weights() -> None:
    plain = weight_of(32, torch.float32, zeros=False)
    order = torch.randperm(INPUTS, generator=torch.Generator().manual_seed(2)).int()
    weight = QuantizedWeight(plain.values, plain.scales, group=32, order=order)
    hidden = torch.randn(3, INPUTS, generator=torch.Generator().manual_seed(1))
    expected = hidden @ weight.dequantize(torch.float32).T
    torch.testing.assert_close(Int4Linear.of(weight, None)(hidden), expected, rtol=1e-3, atol=1e-3)


def test_what_the_layout_does_not_take_is_left_to_torch() -> None:
    assert can_multiply(weight_of(128, torch.float32, zeros=True))
    whole = weight_of(None, torch.float32, zeros=False, inputs=36)
    assert not can_multiply(whole)  # 36 inputs are no multiple of eight
    narrow = weight_of(32, torch.float32, zeros=False)
    assert not can_multiply(QuantizedWeight(narrow.values[:96], narrow.scales[:96], group=32))
    assert not can_multiply(QuantizedWeight.int8(torch.ones(64, 64)))
