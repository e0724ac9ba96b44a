import pytest
import torch

from llmservice_server.backend.cuda.kernels.rotary import rotate_and_store
from llmservice_server.models.rope import rotate

pytestmark = pytest.mark.slow

HEADS, KV_HEADS, BLOCK_SIZE = 5, 2, 4


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_norm", [False, True])
def test_queries_turn_in_place_and_keys_on_their_way(head_dim: int, dtype: torch.dtype, with_norm: bool) -> None:
    torch.manual_seed(0)
    heads = torch.randn(3, HEADS + 2 * KV_HEADS, head_dim).to(dtype)
    angles = torch.rand(3, 1, head_dim // 2) * 6
    cos = torch.cat([angles.cos()] * 2, -1).to(dtype)
    sin = torch.cat([-angles.sin(), angles.sin()], -1).to(dtype)
    weight = (torch.rand(HEADS + KV_HEADS, head_dim) + 0.5).to(dtype)
    before = heads.clone()
    plain = heads.clone().float()
    if with_norm:
        turned = plain[:, : HEADS + KV_HEADS]
        plain[:, : HEADS + KV_HEADS] = torch.nn.functional.rms_norm(turned, (head_dim,), eps=1e-5) * weight.float()
    rotate(plain[:, : HEADS + KV_HEADS], cos.float(), sin.float())
    cache = torch.full((3, KV_HEADS, 2, BLOCK_SIZE, head_dim), torch.nan).to(dtype)
    slots = torch.tensor([6, 2, 11], dtype=torch.int32)  # the second lies in the null block
    rotate_and_store(heads, (cos, sin), slots, cache, qk_norm=(weight, 1e-5) if with_norm else None)

    bound = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(heads[:, :HEADS].float(), plain[:, :HEADS], rtol=bound, atol=bound)
    assert torch.equal(heads[:, HEADS:], before[:, HEADS:])
    for token, (block, offset) in {0: (1, 2), 2: (2, 3)}.items():
        stored = cache[block, :, :, offset].transpose(0, 1).reshape(2 * KV_HEADS, head_dim).float()
        torch.testing.assert_close(stored, plain[token, HEADS:], rtol=bound, atol=bound)
    assert cache.isfinite().sum() == 2 * 2 * KV_HEADS * head_dim
