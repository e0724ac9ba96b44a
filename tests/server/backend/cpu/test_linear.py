"""Packed or not, a product is a product."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from llmservice_server.backend.cpu.layer_ops import ThreadedCpuLayerOps
from llmservice_server.backend.cpu.linear import FEW_ROWS, PackedLinear, can_pack, pack, padded_rows
from llmservice_server.backend.torch.layer_ops import TorchLinear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("num_out", "num_in"), [(1, 1), (3, 64), (1280, 768), (33, 17)])
def test_a_packed_product_is_the_plain_one(dtype: torch.dtype, with_bias: bool, num_out: int, num_in: int) -> None:
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(num_out, num_in, generator=random).div_(num_in**0.5).to(dtype)
    bias = torch.randn(num_out, generator=random).to(dtype) if with_bias else None
    plain = TorchLinear(weight, bias)
    linear = pack(plain)
    assert isinstance(linear, PackedLinear) == can_pack(dtype)
    assert linear.nbytes == plain.nbytes
    for num_rows in (1, 2, 7, 32, 130, 600):
        hidden = torch.randn(num_rows, num_in, generator=random).to(dtype)
        expected = F.linear(hidden.double(), weight.double(), None if bias is None else bias.double())
        # a float32 sum of num_in products, rounded once to dtype at the end
        tolerance = 4 * max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps * num_in**0.5)
        assert torch.allclose(linear(hidden).double(), expected, rtol=tolerance, atol=tolerance)


def test_rows_may_be_a_part_of_wider_ones() -> None:
    weight = torch.randn(24, 16)
    linear = pack(TorchLinear(weight))
    half = torch.randn(5, 32).chunk(2, dim=-1)[1]
    assert torch.allclose(linear(half), F.linear(half, weight), atol=1e-5)


def test_float32_is_packed_wherever_torch_has_onednn() -> None:
    """What makes decoding fast on a CPU must not get lost with a new torch."""
    assert can_pack(torch.float32) == torch._C._has_mkldnn


def test_what_cannot_be_packed_is_left_as_it_is() -> None:
    linear = TorchLinear(torch.ones(4, 4, dtype=torch.float64))
    assert pack(linear) is linear


def test_few_numbers_of_rows_are_computed_with_and_little_is_added() -> None:
    padded = [padded_rows(num_rows) for num_rows in range(1, 2049)]
    assert len(set(padded)) == 60
    assert padded == sorted(padded)
    for num_rows, rows in enumerate(padded, start=1):
        assert num_rows <= rows <= num_rows * 4 / 3
        assert padded_rows(rows) == rows


dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@dtypes
@pytest.mark.parametrize("num_rows", [1, 7, FEW_ROWS])
@pytest.mark.parametrize("with_bias", [False, True])
def test_logits_are_the_product_of_the_norms(dtype: torch.dtype, num_rows: int, with_bias: bool) -> None:
    if not can_pack(dtype):
        pytest.skip(f"this CPU has no packed product of {dtype}")
    dice = torch.Generator().manual_seed(0)
    weight, norm, bias = (torch.randn(*shape, generator=dice).to(dtype) for shape in ((192, 96), (96,), (192,)))
    linear = pack(TorchLinear(weight, bias if with_bias else None))
    assert isinstance(linear, PackedLinear)
    linear.find_panels()
    hidden = torch.randn(num_rows, 96, generator=dice).to(dtype)
    if linear.panels_for(hidden) is None:
        pytest.skip("what oneDNN packs for this CPU is not laid out in panels")
    exact = F.linear(
        F.rms_norm(hidden.double(), (96,), norm.double(), 1e-5), weight.double(), bias.double() if with_bias else None
    )
    logits = ThreadedCpuLayerOps().logits(hidden, norm, 1e-5, linear)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, logits.to(dtype).float()), "rounded as the model's other products are"
    off = (logits.double() - exact).norm(dim=1) / exact.norm(dim=1)
    assert (off < 4 * torch.finfo(dtype).eps).all(), off


def test_many_rows_are_left_to_onednn() -> None:
    linear = pack(TorchLinear(torch.randn(64, 64)))
    assert isinstance(linear, PackedLinear)
    linear.find_panels()
    assert linear.panels_for(torch.zeros(FEW_ROWS + 1, 64)) is None
