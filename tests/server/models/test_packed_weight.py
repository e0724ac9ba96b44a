"""One row through a packed weight's own memory, and no row where that memory is laid out otherwise."""

import pytest
import torch

from llmservice_server.models.linear import Linear, can_pack
from llmservice_server.models.packed_weight import PackedWeight


def packed(weight: torch.Tensor) -> torch.Tensor:
    """In the layout that `Linear` asks for."""
    linear = Linear(weight)
    linear.pack()
    return linear.weight


@pytest.mark.skipif(not can_pack(torch.float32), reason="this torch has no oneDNN")
@pytest.mark.parametrize("dtype", [dtype for dtype in (torch.float32, torch.bfloat16) if can_pack(dtype)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("num_out", "num_in"), [(3, 64), (1280, 768), (193, 48), (33, 17), (64, 2)])
def test_one_row_times_the_packed_weight(dtype: torch.dtype, with_bias: bool, num_out: int, num_in: int) -> None:
    weight = torch.randn(num_out, num_in).div_(num_in**0.5).to(dtype)
    bias = torch.randn(num_out).to(dtype) if with_bias else None
    memory = packed(weight.clone())
    found = PackedWeight.of(memory, weight, bias)
    if found is None:
        pytest.skip("this CPU's layout is another")
    row = torch.randn(1, num_in).to(dtype)
    expected = row.double() @ weight.double().T + (0 if bias is None else bias.double())
    tolerance = 4 * max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps * num_in**0.5)
    torch.testing.assert_close(found.times(row).double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.skipif(not can_pack(torch.float32), reason="this torch has no oneDNN")
def test_a_memory_that_does_not_hold_the_weight_is_not_read() -> None:
    weight = torch.randn(192, 48)
    other = weight.clone()
    other[-1, -1] += 1
    assert PackedWeight.of(packed(weight.clone()), other, None) is None
    assert PackedWeight.of(packed(weight.T.contiguous()), weight, None) is None


def test_a_dtype_whose_layout_nobody_knows_is_left_to_onednn() -> None:
    weight = torch.ones(8, 8, dtype=torch.float16)
    assert PackedWeight.of(weight, weight, None) is None
