import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from llmservice_server.backend.cuda.kernels.grouped_product import grouped_product, tiles_of

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
COUNTS = [[0, 1, 0, 0], [3, 0, 17, 16], [0, 0, 0, 150]]


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_each_row_is_multiplied_with_its_experts_matrix(dtype: torch.dtype, counts: list[int], has_bias: bool) -> None:
    random = torch.Generator().manual_seed(0)
    weights = torch.randn(4, 80, 96, generator=random).to(dtype)
    bias = torch.randn(4, 80, generator=random).to(dtype) if has_bias else None
    rows = torch.randn(sum(counts), 96, generator=random).to(dtype)
    product = grouped_product(rows, tiles_of(torch.tensor(counts), len(rows)), weights, bias)
    expected = torch.cat([
        F.linear(part.float(), weight.float(), None if bias is None else bias[expert].float())
        for expert, (part, weight) in enumerate(zip(rows.split(counts), weights, strict=True))
    ])  # fmt: skip
    assert (product.float() - expected).norm() < BOUNDS[dtype] * expected.norm()


@pytest.mark.parametrize("counts", COUNTS)
def test_tiles_hold_every_row_once(counts: list[int]) -> None:
    owners = torch.full((sum(counts),), -1)
    for expert, first, end in tiles_of(torch.tensor(counts), sum(counts)).tolist():
        size = max(0, min(16 if sum(counts) <= 64 else 64, end - first))
        assert (owners[first : first + size] == -1).all()
        owners[first : first + size] = expert
    assert owners.tolist() == [expert for expert, count in enumerate(counts) for _ in range(count)]
