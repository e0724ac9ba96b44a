import pytest
import torch

from llmservice_server.backend.agreement import quantized
from llmservice_server.backend.cuda.kernels.rotary import store

BLOCK_SIZE = 4


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("num_kv_heads", [1, 3, 8])
def test_each_token_lands_in_its_slot_and_nothing_else_changes(head_dim: int, num_kv_heads: int) -> None:
    fused = torch.randn(5, 3 + 2 * num_kv_heads, head_dim)  # a view with strides, as the fused product gives it
    cache = torch.full((6, num_kv_heads, 2, BLOCK_SIZE, head_dim), torch.nan)
    slots = torch.tensor([4, 23, 9, 7, 16], dtype=torch.int32)
    store(fused[:, 3:], slots, cache)
    expected = torch.full_like(cache, torch.nan)
    for token, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, BLOCK_SIZE)
        expected[block, :, :, offset] = fused[token, 3:].view(2, num_kv_heads, head_dim).transpose(0, 1)
    torch.testing.assert_close(cache, expected, rtol=0, atol=0, equal_nan=True)


def test_slots_of_the_null_block_are_skipped() -> None:
    cache = torch.zeros(2, 2, 2, BLOCK_SIZE, 64)
    store(torch.ones(5, 4, 64), torch.tensor([0, 1, 2, 3, 5], dtype=torch.int32), cache)
    assert (cache[0] == 0).all()
    assert (cache[1, :, :, 1] == 1).all()
    assert cache.sum() == 4 * 64


def test_an_fp8_cache_keeps_a_scale_for_each_row() -> None:
    key_value = torch.randn(3, 4, 64)
    key_value[0, 1] = 0
    key_value[1] *= 1e4
    key_value[2] *= 1e-4
    cache = torch.zeros(2, 2, 2, BLOCK_SIZE, 64, dtype=torch.float8_e4m3fn)
    scales = torch.full((2, 2, 2, BLOCK_SIZE), torch.nan)
    store(key_value, torch.tensor([4, 5, 7], dtype=torch.int32), cache, scales)
    kept = (cache[1].float() * scales[1, ..., None])[:, :, [0, 1, 3]].permute(2, 1, 0, 3).reshape(3, 4, 64)
    largest = key_value.abs().amax(-1)
    torch.testing.assert_close(kept.abs().amax(-1), largest, rtol=1e-6, atol=1e-9)  # 448 is exact, so nothing overflows
    agree = (kept - quantized(key_value)).abs() <= 1e-3 * largest[..., None]
    assert agree.float().mean() > 0.9  # the interpreter drops carries
    assert scales[1, :, :, 2].isnan().all()
