import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from llmservice_server.backend.agreement import quantized
from llmservice_server.backend.cuda.kernels.layer_ops import add_rms_norm, rotate_and_store, silu_mul, store
from llmservice_server.models.rope import rotate

HEADS, KV_HEADS, BLOCK_SIZE = 5, 2, 4
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 64), (3, 100), (2, 4096)])
def test_add_rms_norm_agrees_with_torch(dtype: torch.dtype, num_rows: int, size: int) -> None:
    torch.manual_seed(0)
    hidden, delta, weight = (torch.randn(*shape).to(dtype) for shape in ((num_rows, size), (num_rows, size), (size,)))
    total = hidden + delta
    normed = add_rms_norm(hidden, delta, weight, 1e-5)
    torch.testing.assert_close(hidden, total, rtol=BOUNDS[dtype], atol=1e-6)
    expected = F.rms_norm(total.float(), (size,), weight.float(), 1e-5)
    assert (normed.float() - expected).norm() / expected.norm() < BOUNDS[dtype]


def test_rms_norm_without_a_delta_keeps_the_states() -> None:
    hidden, weight = torch.randn(4, 96), torch.randn(96)
    before = hidden.clone()
    normed = add_rms_norm(hidden, None, weight, 1e-6)
    assert torch.equal(hidden, before)
    torch.testing.assert_close(normed, F.rms_norm(before, (96,), weight, 1e-6))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 1e-3)])
@pytest.mark.parametrize("size", [1, 100, 1500])
def test_silu_mul_agrees_with_torch(dtype: torch.dtype, bound: float, size: int) -> None:
    torch.manual_seed(0)
    gate_up = (10 * torch.randn(3, 2 * size)).to(dtype)
    gate, up = gate_up.float().chunk(2, dim=-1)
    expected = F.silu(gate) * up
    assert (silu_mul(gate_up).float() - expected).norm() / expected.norm() < bound


def test_large_gates_do_not_overflow() -> None:
    gate_up = torch.tensor([[1e30, -1e30, 2.0, 3.0]])
    torch.testing.assert_close(silu_mul(gate_up), torch.tensor([[2e30, 0.0]]))


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("num_kv_heads", [1, 3, 8])
def test_store_writes_each_token_to_its_slot_and_nothing_else(head_dim: int, num_kv_heads: int) -> None:
    fused = torch.randn(5, 3 + 2 * num_kv_heads, head_dim)  # a strided view, as of the fused product
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


def test_an_fp8_cache_has_a_scale_for_each_row() -> None:
    key_value = torch.randn(3, 4, 64)
    key_value[0, 1] = 0
    key_value[1] *= 1e4
    key_value[2] *= 1e-4
    cache = torch.zeros(2, 2, 2, BLOCK_SIZE, 64, dtype=torch.float8_e4m3fn)
    scales = torch.full((2, 2, 2, BLOCK_SIZE), torch.nan)
    store(key_value, torch.tensor([4, 5, 7], dtype=torch.int32), cache, scales)
    stored = (cache[1].float() * scales[1, ..., None])[:, :, [0, 1, 3]].permute(2, 1, 0, 3).reshape(3, 4, 64)
    largest = key_value.abs().amax(-1)
    torch.testing.assert_close(
        stored.abs().amax(-1), largest, rtol=1e-6, atol=1e-9
    )  # 448 is exact, so nothing overflows
    agree = (stored - quantized(key_value)).abs() <= 1e-3 * largest[..., None]
    assert agree.float().mean() > 0.9  # the interpreter drops carries when it rounds
    assert scales[1, :, :, 2].isnan().all()


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_norm", [False, True])
def test_rotate_and_store_agrees_with_torch(head_dim: int, dtype: torch.dtype, with_norm: bool) -> None:
    torch.manual_seed(0)
    heads = torch.randn(3, HEADS + 2 * KV_HEADS, head_dim).to(dtype)
    angles = torch.rand(3, 1, head_dim // 2) * 6
    cos = torch.cat([angles.cos()] * 2, -1).to(dtype)
    sin = torch.cat([-angles.sin(), angles.sin()], -1).to(dtype)
    weight = (torch.rand(HEADS + KV_HEADS, head_dim) + 0.5).to(dtype)
    before = heads.clone()
    plain = heads.clone().float()
    if with_norm:
        rotated = plain[:, : HEADS + KV_HEADS]
        plain[:, : HEADS + KV_HEADS] = F.rms_norm(rotated, (head_dim,), eps=1e-5) * weight.float()
    rotate(plain[:, : HEADS + KV_HEADS], cos.float(), sin.float())
    cache = torch.full((3, KV_HEADS, 2, BLOCK_SIZE, head_dim), torch.nan).to(dtype)
    slots = torch.tensor([6, 2, 11], dtype=torch.int32)  # the second is in the null block
    rotate_and_store(heads, (cos, sin), slots, cache, qk_norm=(weight, 1e-5) if with_norm else None)

    bound = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(heads[:, :HEADS].float(), plain[:, :HEADS], rtol=bound, atol=bound)
    assert torch.equal(heads[:, HEADS:], before[:, HEADS:])
    for token, (block, offset) in {0: (1, 2), 2: (2, 3)}.items():
        stored = cache[block, :, :, offset].transpose(0, 1).reshape(2 * KV_HEADS, head_dim).float()
        torch.testing.assert_close(stored, plain[token, HEADS:], rtol=bound, atol=bound)
    assert cache.isfinite().sum() == 2 * 2 * KV_HEADS * head_dim
