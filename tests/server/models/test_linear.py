"""Packed or not, a product is a product."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from llmservice_server.models.linear import Linear, can_pack, padded_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("num_out", "num_in"), [(1, 1), (3, 64), (1280, 768), (33, 17)])
def test_a_packed_product_is_the_plain_one(dtype: torch.dtype, with_bias: bool, num_out: int, num_in: int) -> None:
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(num_out, num_in, generator=random).div_(num_in**0.5).to(dtype)
    bias = torch.randn(num_out, generator=random).to(dtype) if with_bias else None
    linear = Linear(weight, bias)
    num_bytes = linear.nbytes
    linear.pack()
    assert linear.packed == can_pack(dtype)
    assert linear.nbytes == num_bytes
    for num_rows in (1, 2, 7, 32, 130, 600):
        hidden = torch.randn(num_rows, num_in, generator=random).to(dtype)
        expected = F.linear(hidden.double(), weight.double(), None if bias is None else bias.double())
        # a float32 sum of num_in products, rounded once to dtype at the end
        tolerance = 4 * max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps * num_in**0.5)
        assert torch.allclose(linear(hidden).double(), expected, rtol=tolerance, atol=tolerance)


def test_rows_may_be_a_part_of_wider_ones() -> None:
    weight = torch.randn(24, 16)
    linear = Linear(weight.clone())
    linear.pack()
    half = torch.randn(5, 32).chunk(2, dim=-1)[1]
    assert torch.allclose(linear(half), F.linear(half, weight), atol=1e-5)


def test_float32_is_packed_wherever_torch_has_onednn() -> None:
    """What makes decoding fast on a CPU must not get lost with a new torch."""
    assert can_pack(torch.float32) == torch._C._has_mkldnn


def test_what_cannot_be_packed_is_left_as_it_is() -> None:
    weight = torch.ones(4, 4, dtype=torch.float64)
    linear = Linear(weight)
    linear.pack()
    assert linear.weight is weight
    assert not linear.packed


def test_few_numbers_of_rows_are_computed_with_and_little_is_added() -> None:
    padded = [padded_rows(num_rows) for num_rows in range(1, 2049)]
    assert len(set(padded)) == 60
    assert padded == sorted(padded)
    for num_rows, rows in enumerate(padded, start=1):
        assert num_rows <= rows <= num_rows * 4 / 3
        assert padded_rows(rows) == rows
