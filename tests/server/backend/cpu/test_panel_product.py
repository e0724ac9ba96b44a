"""Products of our own with a matrix in oneDNN's packed memory."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from llmservice_server.backend.cpu import panel_product
from llmservice_server.backend.cpu.element import as_array
from llmservice_server.backend.cpu.linear import FEW_ROWS, PackedLinear, can_pack, pack
from llmservice_server.backend.cpu.panel_product import as_lanes, multiply, panels_of
from llmservice_server.backend.torch.layer_ops import TorchLinear

pytestmark = pytest.mark.slow

packable = pytest.mark.parametrize("dtype", [dtype for dtype in (torch.float32, torch.bfloat16) if can_pack(dtype)])


def in_panels(weight: torch.Tensor) -> torch.Tensor:
    """The layout that `panels_of` says, written out: a line for each input, or for each two of bfloat16."""
    outputs, inputs = weight.shape
    together = 4 // weight.dtype.itemsize
    return weight.view(outputs // 64, 64, inputs // together, together).transpose(1, 2).contiguous()


def packed_in_panels(weight: torch.Tensor) -> torch.Tensor:
    """Whatever this CPU's oneDNN does."""
    shape = (*in_panels(weight).shape[:2], 64)
    as_whole = torch.float32 if weight.dtype == torch.float32 else torch.int32
    return in_panels(weight).view(as_whole).view(shape)


@packable
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("num_out", "num_in"), [(64, 2), (192, 66), (64, 4608)])  # the last: two parts of a panel
def test_product_of_any_few_rows(dtype: torch.dtype, with_bias: bool, num_out: int, num_in: int) -> None:
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(num_out, num_in, generator=random).div_(num_in**0.5).to(dtype)
    bias = torch.randn(num_out if with_bias else 0, generator=random).to(dtype)
    panels = packed_in_panels(weight).numpy()
    for num_rows in range(1, 21):
        hidden = torch.randn(num_rows, num_in, generator=random).to(dtype)
        product = torch.full((num_rows, num_out), torch.nan, dtype=dtype)
        multiply(as_lanes(hidden), panels, as_array(bias), as_array(product))
        expected = F.linear(hidden.double(), weight.double(), bias.double() if with_bias else None)
        tolerance = 4 * max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps * num_in**0.5)
        assert torch.allclose(product.double(), expected, rtol=tolerance, atol=tolerance)


@packable
def test_what_is_not_finite_is_not_hidden(dtype: torch.dtype) -> None:
    weight = torch.randn(64, 8).to(dtype)
    hidden = torch.ones(3, 8, dtype=dtype)
    hidden[1, 3], hidden[2, 5] = torch.nan, torch.inf
    product = torch.zeros(3, 64, dtype=dtype)
    multiply(
        as_lanes(hidden), packed_in_panels(weight).numpy(), as_array(torch.empty(0, dtype=dtype)), as_array(product)
    )
    assert product[0].isfinite().all()
    assert product[1].isnan().all()
    assert not product[2].isfinite().any()


@packable
def test_a_matrix_that_fills_no_whole_panels_has_none(dtype: torch.dtype) -> None:
    for shape in ((65, 64), (64, 33)):
        packed = torch.ops.mkldnn._reorder_linear_weight(torch.randn(shape).to(dtype), 512)
        assert panels_of(packed, shape) is None


@packable
def test_bfloat16_is_left_to_onednn_where_the_cpu_multiplies_tiles(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = torch.ops.mkldnn._reorder_linear_weight(torch.randn(64, 64).to(dtype), 512)
    before = panels_of(packed, (64, 64))
    monkeypatch.setattr(panel_product, "_HAS_TILE_PRODUCT", True)
    after = panels_of(packed, (64, 64))
    assert (after is None) == (before is None or dtype == torch.bfloat16)


@packable
def test_linear_takes_our_product_only_where_the_memory_is_laid_out_so(dtype: torch.dtype) -> None:
    weight = torch.randn(128, 96).to(dtype)
    linear = pack(TorchLinear(weight))
    assert isinstance(linear, PackedLinear)
    linear.find_panels()
    if linear.panels is not None:
        assert torch.equal(torch.from_numpy(linear.panels.memory.copy()), packed_in_panels(weight))
    for num_rows in (1, FEW_ROWS, FEW_ROWS + 1):
        hidden = torch.randn(num_rows, 96).to(dtype)
        assert torch.allclose(linear(hidden).float(), F.linear(hidden.float(), weight.float()), rtol=2e-2, atol=0.1)


@packable
def test_a_matrix_of_numbers_that_are_not_finite_is_left_to_onednn(dtype: torch.dtype) -> None:
    linear = pack(TorchLinear(torch.full((64, 64), torch.nan, dtype=dtype)))
    assert isinstance(linear, PackedLinear)
    linear.find_panels()
    assert linear.panels is None
