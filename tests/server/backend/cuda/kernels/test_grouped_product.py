import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from llmservice_server.backend.cuda.kernels.products import Tiled, grouped_product
from llmservice_server.backend.cuda.kernels.routing import combine, route

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
CHOICES = {"one token": (1, 3), "few tokens": (9, 2), "many tokens": (1100, 2), "one expert each": (70, 1)}
NUM_EXPERTS = 5


def choice(num_tokens: int, each: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(num_tokens)
    scores = torch.rand(num_tokens, NUM_EXPERTS, generator=random)
    scores[:, 3] = 0  # an expert without tokens
    return scores.topk(each).indices


@pytest.mark.parametrize("name", [name for name in CHOICES if name != "one token"])
@pytest.mark.parametrize("tile_rows", [16, 64])
def test_rows_are_sorted_by_expert_and_tiles_hold_each_once(name: str, tile_rows: int) -> None:
    chosen = choice(*CHOICES[name])
    routing, counts = route(chosen, NUM_EXPERTS, tile_rows), chosen.flatten().bincount(minlength=NUM_EXPERTS)
    assert routing.sources is not None
    assert routing.places is not None
    experts = chosen.flatten()[routing.sources.long()]
    assert torch.equal(experts, torch.arange(NUM_EXPERTS).repeat_interleave(counts))
    assert torch.equal(routing.sources[routing.places.long()], torch.arange(chosen.numel(), dtype=torch.int32))
    owners = torch.full((chosen.numel(),), -1)
    for expert, first, end in routing.tiles.tolist():
        part = owners[first : min(end, first + tile_rows)]
        assert (part == -1).all()
        part[:] = expert
    assert torch.equal(owners, experts)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", ["one token", "few tokens", "one expert each"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_each_row_is_multiplied_with_its_experts_matrix(dtype: torch.dtype, name: str, has_bias: bool) -> None:
    random = torch.Generator().manual_seed(0)
    chosen = choice(*CHOICES[name])
    weights = torch.randn(NUM_EXPERTS, 80, 96, generator=random).to(dtype)
    bias = torch.randn(NUM_EXPERTS, 80, generator=random).to(dtype) if has_bias else None
    tokens = torch.randn(len(chosen), 96, generator=random).to(dtype)
    routing = route(chosen, NUM_EXPERTS, 16)
    in_order = torch.arange(routing.num_pairs)  # of a single token
    pairs = in_order if routing.sources is None else routing.sources.long()
    rows, experts = tokens[pairs // chosen.shape[1]], chosen.flatten()[pairs]
    expected = torch.stack([
        F.linear(row.float(), weights[expert].float(), None if bias is None else bias[expert].float())
        for row, expert in zip(rows, experts.tolist(), strict=True)
    ])  # fmt: skip
    for states, of_tokens in ((tokens, True), (rows, False)):
        product = grouped_product(states, routing, Tiled.dense(weights), bias, of_tokens=of_tokens)
        assert (product.float() - expected).norm() < BOUNDS[dtype] * expected.norm()
    shares = torch.rand(chosen.shape, generator=random)
    by_pair = expected[in_order if routing.places is None else routing.places.long()].view(*chosen.shape, -1)
    summed = combine(expected.to(dtype), routing, shares).float()
    assert (summed - (by_pair * shares[..., None]).sum(1)).norm() < BOUNDS[dtype] * summed.norm()
