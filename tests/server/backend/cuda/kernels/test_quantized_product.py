import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from llmservice_server.backend.cuda.kernels.conversions import dequantized
from llmservice_server.backend.cuda.kernels.products import Tiled, quantized_product
from llmservice_server.backend.quantized import QuantizedWeight

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
FORMATS = ["int8", "int8, groups", "int4", "int4, zeros", "fp8", "fp8, blocks", "mxfp8", "mxfp4", "nvfp4", "nf4"]


def weight_of(name: str, outputs: int, inputs: int) -> QuantizedWeight:
    random = torch.Generator().manual_seed(0)
    group, rows = (None if name in ("int8", "fp8") else 128 if "blocks" in name else 32), 128 if "blocks" in name else 1
    size = -(-outputs // rows), 1 if group is None else -(-inputs // group)
    scales = torch.rand(size, generator=random) + 0.1
    values = torch.randint(-100, 100, (outputs, inputs), generator=random)
    if name == "mxfp4":
        powers = torch.randint(100, 130, size, generator=random).to(torch.uint8).view(torch.float8_e8m0fnu)
        return QuantizedWeight(values[:, ::2].to(torch.uint8), powers, group=32)
    if name == "nvfp4":
        scales = torch.rand(outputs, inputs // 16, generator=random).to(torch.float8_e4m3fn)
        by_output = 0.1 + torch.rand(outputs, 1, generator=random).double()
        return QuantizedWeight(values[:, ::2].to(torch.uint8), scales, group=16, output_scales=by_output)
    if name == "mxfp8":
        scales = scales.log2().floor().exp2().bfloat16()
    if "fp8" in name:
        return QuantizedWeight(values.float().to(torch.float8_e4m3fn), scales, rows=rows, group=group)
    zeros = torch.randint(-7, 8, size, generator=random).to(torch.int8) if "zeros" in name else None
    if name == "nf4":
        table = torch.randn(16, generator=random)
        return QuantizedWeight(values[:, ::2].to(torch.uint8), scales, group=group, table=table)
    if "int4" in name:
        return QuantizedWeight(values[:, ::2].to(torch.uint8), scales, zeros, group=group)
    return QuantizedWeight(values.to(torch.int8), scales, group=group)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("num_rows", [1, 20])
@pytest.mark.parametrize("name", FORMATS)
def test_products_agree_with_those_of_the_dequantised_weight(name: str, num_rows: int, dtype: torch.dtype) -> None:
    weight = weight_of(name, 160, 192)
    random = torch.Generator().manual_seed(1)
    hidden = torch.randn(num_rows, 192, generator=random).to(dtype)
    bias = torch.randn(160, generator=random).to(dtype)
    for added in (None, bias):
        expected = F.linear(hidden.float(), weight.dequantize(dtype).float(), None if added is None else added.float())
        product = quantized_product(hidden, Tiled.of([weight]), added).float()
        assert (product - expected).norm() < BOUNDS[dtype] * expected.norm()


def test_a_block_that_is_larger_than_the_matrix_is_scaled() -> None:
    weight = weight_of("fp8, blocks", 64, 96)
    hidden = torch.randn(2, 96, generator=torch.Generator().manual_seed(1))
    expected = F.linear(hidden, weight.dequantize(torch.float32))
    torch.testing.assert_close(quantized_product(hidden, Tiled.of([weight]), None), expected, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(dequantized(Tiled.of([weight]), torch.float32), weight.dequantize(torch.float32))


@pytest.mark.parametrize(("name", "inputs"), [("mxfp4", 32), ("nvfp4", 16)])
def test_a_single_group_of_floats_is_scaled_once(name: str, inputs: int) -> None:
    weight = weight_of(name, 64, inputs)
    hidden = torch.randn(2, inputs, generator=torch.Generator().manual_seed(1))
    expected = F.linear(hidden, weight.dequantize(torch.float32))
    torch.testing.assert_close(quantized_product(hidden, Tiled.of([weight]), None), expected)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", FORMATS)
def test_a_weight_is_dequantised_as_by_torch(name: str, dtype: torch.dtype) -> None:
    weight = weight_of(name, 160, 192)
    dense, expected = dequantized(Tiled.of([weight]), dtype), weight.dequantize(dtype)
    if dtype == torch.float32 and name != "nvfp4":
        assert torch.equal(dense, expected)
    elif dtype == torch.float32:  # of two scales, the kernel rounds one in float32
        torch.testing.assert_close(dense, expected, rtol=2**-22, atol=0)
    else:  # the interpreter truncates where a GPU rounds
        torch.testing.assert_close(dense, expected, rtol=2**-7, atol=0)
