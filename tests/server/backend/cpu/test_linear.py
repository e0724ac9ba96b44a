"""Products by oneDNN and by our kernel agree with torch's in float64."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from llmservice_server.backend.cpu.layer_ops import CpuLayerOps
from llmservice_server.backend.cpu.linear import (
    KERNEL_ROWS,
    OwnPackedLinear,
    PackedLinear,
    can_pack,
    pack,
    packed_memory,
    padded_rows,
)
from llmservice_server.backend.cpu.linear_kernels import as_operand, multiply
from llmservice_server.backend.cpu.llvm import as_array
from llmservice_server.backend.torch.layer_ops import TorchLinear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("num_out", "num_in"), [(1, 1), (3, 64), (1280, 768), (33, 17)])
def test_a_packed_product_agrees_with_torch(dtype: torch.dtype, with_bias: bool, num_out: int, num_in: int) -> None:
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(num_out, num_in, generator=random).div_(num_in**0.5).to(dtype)
    bias = torch.randn(num_out, generator=random).to(dtype) if with_bias else None
    plain = TorchLinear(weight, bias)
    linear = pack(plain)
    assert isinstance(linear, PackedLinear) or not can_pack(dtype)
    assert linear.nbytes == plain.nbytes
    for num_rows in (1, 2, 7, 32, 130, 600):
        hidden = torch.randn(num_rows, num_in, generator=random).to(dtype)
        expected = F.linear(hidden.double(), weight.double(), None if bias is None else bias.double())
        # a float32 sum of num_in products, rounded once to dtype at the end
        tolerance = 4 * max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps * num_in**0.5)
        assert torch.allclose(linear(hidden).double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("uses_kernel", [False, True])
@pytest.mark.parametrize(("num_out", "num_in"), [(64, 2), (1280, 768)])
def test_a_product_of_converted_weights_agrees_with_torch(
    with_bias: bool, uses_kernel: bool, num_out: int, num_in: int
) -> None:
    """As on a CPU without instructions for bfloat16, wherever this runs."""
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(num_out, num_in, generator=random).div_(num_in**0.5).bfloat16()
    bias = torch.randn(num_out, generator=random).bfloat16() if with_bias else None
    linear = OwnPackedLinear.of(TorchLinear(weight, bias))
    assert linear.nbytes == TorchLinear(weight, bias).nbytes
    if uses_kernel:
        linear.use_kernel()
    for num_rows in (1, 2, 7, 32, 130):
        hidden = torch.randn(num_rows, num_in, generator=random).bfloat16()
        assert (linear.weights_for(hidden) is not None) == uses_kernel
        expected = F.linear(hidden.double(), weight.double(), None if bias is None else bias.double())
        assert torch.allclose(linear(hidden).double(), expected, rtol=0.03, atol=0.03)


def test_rows_may_be_slices_of_wider_rows() -> None:
    weight = torch.randn(24, 16)
    linear = pack(TorchLinear(weight))
    half = torch.randn(5, 32).chunk(2, dim=-1)[1]
    assert torch.allclose(linear(half), F.linear(half, weight), atol=1e-5)


def test_float32_is_packed_wherever_torch_has_onednn() -> None:
    """Fast decoding on a CPU must not be lost with a new torch."""
    assert can_pack(torch.float32) == torch._C._has_mkldnn


def test_a_matrix_that_cannot_be_packed_is_unchanged() -> None:
    for weight in (torch.ones(4, 4, dtype=torch.float64), torch.ones(0, 4)):  # of no shared experts
        linear = TorchLinear(weight)
        assert pack(linear) is linear


def test_products_have_few_numbers_of_rows_with_little_padding() -> None:
    padded = [padded_rows(num_rows) for num_rows in range(1, 2049)]
    assert len(set(padded)) == 60
    assert padded == sorted(padded)
    for num_rows, rows in enumerate(padded, start=1):
        assert num_rows <= rows <= num_rows * 4 / 3
        assert padded_rows(rows) == rows


dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@dtypes
@pytest.mark.parametrize("num_rows", [1, 7, KERNEL_ROWS])
@pytest.mark.parametrize("with_bias", [False, True])
def test_logits_agree_with_torch(dtype: torch.dtype, num_rows: int, with_bias: bool) -> None:
    random = torch.Generator().manual_seed(0)
    weight, norm, bias = (torch.randn(*shape, generator=random).to(dtype) for shape in ((192, 96), (96,), (192,)))
    linear = pack(TorchLinear(weight, bias if with_bias else None))
    assert isinstance(linear, PackedLinear)
    linear.use_kernel()
    hidden = torch.randn(num_rows, 96, generator=random).to(dtype)
    if linear.weights_for(hidden) is None:
        pytest.skip("the kernel cannot read what oneDNN packs on this CPU")
    exact = F.linear(
        F.rms_norm(hidden.double(), (96,), norm.double(), 1e-5), weight.double(), bias.double() if with_bias else None
    )
    logits = CpuLayerOps(threaded=True).logits(hidden, norm, 1e-5, linear)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, logits.to(dtype).float()), "rounded to the dtype of the model"
    off = (logits.double() - exact).norm(dim=1) / exact.norm(dim=1)
    assert (off < 4 * torch.finfo(dtype).eps).all(), off


def test_many_rows_are_computed_by_onednn() -> None:
    linear = pack(TorchLinear(torch.randn(64, 64)))
    assert isinstance(linear, PackedLinear)
    linear.use_kernel()
    assert linear.weights_for(torch.zeros(KERNEL_ROWS + 1, 64)) is None


packable = pytest.mark.parametrize("dtype", [dtype for dtype in (torch.float32, torch.bfloat16) if can_pack(dtype)])


def packed(weight: torch.Tensor) -> torch.Tensor:
    """The layout of `packed_memory`, computed here: a line for each input, or for each pair of inputs in bfloat16."""
    outputs, inputs = weight.shape
    together = 4 // weight.dtype.itemsize
    lines = weight.view(outputs // 64, 64, inputs // together, together).transpose(1, 2).contiguous()
    return lines.view(torch.float32 if weight.dtype == torch.float32 else torch.int32).squeeze(-1)


@dtypes
@pytest.mark.slow
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("num_out", "num_in"), [(64, 2), (192, 66), (64, 4608)])  # the last: columns in two parts
def test_kernel_agrees_with_torch_for_any_few_rows(
    dtype: torch.dtype, with_bias: bool, num_out: int, num_in: int
) -> None:
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(num_out, num_in, generator=random).div_(num_in**0.5).to(dtype)
    bias = torch.randn(num_out if with_bias else 0, generator=random).to(dtype)
    memory = packed(weight).numpy()
    for num_rows in (*range(1, 21), 32, 33, 50, 70):
        hidden = torch.randn(num_rows, num_in, generator=random).to(dtype)
        product = torch.full((num_rows, num_out), torch.nan, dtype=dtype)
        multiply(as_operand(hidden), memory, as_array(bias), as_array(product))
        expected = F.linear(hidden.double(), weight.double(), bias.double() if with_bias else None)
        tolerance = 4 * max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps * num_in**0.5)
        assert torch.allclose(product.double(), expected, rtol=tolerance, atol=tolerance)


@dtypes
@pytest.mark.slow
def test_nan_and_infinity_reach_the_product(dtype: torch.dtype) -> None:
    weight = torch.randn(64, 8).to(dtype)
    hidden = torch.ones(3, 8, dtype=dtype)
    hidden[1, 3], hidden[2, 5] = torch.nan, torch.inf
    product = torch.zeros(3, 64, dtype=dtype)
    multiply(as_operand(hidden), packed(weight).numpy(), as_array(torch.empty(0, dtype=dtype)), as_array(product))
    assert product[0].isfinite().all()
    assert product[1].isnan().all()
    assert not product[2].isfinite().any()


@packable
@pytest.mark.slow
def test_other_widths_than_multiples_of_64_outputs_are_refused(dtype: torch.dtype) -> None:
    for shape in ((65, 64), (64, 33)):
        reordered = torch.ops.mkldnn._reorder_linear_weight(torch.randn(shape).to(dtype), 512)
        assert packed_memory(reordered, shape) is None


@packable
@pytest.mark.slow
def test_linear_uses_the_kernel_only_for_the_expected_layout(dtype: torch.dtype) -> None:
    weight = torch.randn(128, 96).to(dtype)
    linear = pack(TorchLinear(weight))
    assert isinstance(linear, PackedLinear)
    linear.use_kernel()
    if linear.kernel_weights is not None:
        assert torch.equal(torch.from_numpy(linear.kernel_weights.memory.copy()), packed(weight))
    for num_rows in (1, KERNEL_ROWS, KERNEL_ROWS + 1):
        hidden = torch.randn(num_rows, 96).to(dtype)
        assert torch.allclose(linear(hidden).float(), F.linear(hidden.float(), weight.float()), rtol=2e-2, atol=0.1)


@packable
@pytest.mark.slow
def test_a_matrix_with_nan_is_computed_by_onednn(dtype: torch.dtype) -> None:
    weight = torch.full((64, 64), torch.nan, dtype=dtype)
    linear = PackedLinear(torch.ops.mkldnn._reorder_linear_weight(weight, 512))
    linear.use_kernel()
    assert linear.kernel_weights is None
