"""Norm, activation, rotary embedding and KV store agree with torch."""

import numpy as np
import pytest
import torch

from llmservice_server.backend.cpu.layer_ops import CpuLayerOps, rotate_and_store, store
from llmservice_server.backend.cpu.llvm import as_array
from llmservice_server.backend.layers import LayerOps
from llmservice_server.backend.torch.layer_ops import TorchLayerOps
from llmservice_server.models.rope import rotate

pytestmark = pytest.mark.slow

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
num_rows = pytest.mark.parametrize("num_rows", [1, 5, 3000])  # 3000: without threads, torch computes it

each = pytest.mark.parametrize("ops", [CpuLayerOps(), CpuLayerOps(threaded=True)], ids=["serial", "threaded"])


def assert_close(ours: torch.Tensor, exact: torch.Tensor) -> None:
    """`exact` is computed in float64 from the same numbers; ours is rounded once, torch's every time."""
    eps = torch.finfo(ours.dtype).eps
    torch.testing.assert_close(ours.double(), exact, rtol=8 * eps, atol=8 * eps)


@each
@dtypes
@num_rows
@pytest.mark.parametrize("with_delta", [False, True])
def test_norm_of_the_sum(ops: LayerOps, dtype: torch.dtype, num_rows: int, with_delta: bool) -> None:
    hidden, delta, weight = (torch.randn(rows, 96).to(dtype) for rows in (num_rows, num_rows, 1))
    total = hidden + delta if with_delta else hidden.clone()
    normed = ops.add_norm(hidden, delta if with_delta else None, weight[0], 1e-5)
    assert torch.equal(hidden, total)
    assert_close(normed, TorchLayerOps().add_norm(total.double(), None, weight[0].double(), 1e-5))


@each
@dtypes
@num_rows
def test_activation(ops: LayerOps, dtype: torch.dtype, num_rows: int) -> None:
    gate_up = 4 * torch.randn(num_rows, 2 * 70).to(dtype)
    gate_up[0, :4] = torch.tensor([-200.0, 200.0, -30.0, 30.0])
    exact = TorchLayerOps().gated(gate_up.double(), "silu")
    assert_close(ops.gated(gate_up, "silu"), exact)


@each
@dtypes
def test_nan_reaches_the_result(ops: LayerOps, dtype: torch.dtype) -> None:
    rows = torch.ones(2, 32, dtype=dtype)
    rows[0, 3] = torch.nan
    weight = torch.ones(32, dtype=dtype)
    for result in (ops.add_norm(rows.clone(), rows, weight, 1e-5), ops.gated(rows, "silu")):
        assert result[0].isnan().any()
        assert result[1].isfinite().all()


HEADS, KV_HEADS, BLOCK_SIZE, HEAD_DIM = 6, 2, 4, 24
SLOTS = np.array([6, 21, 13])


def stored(cache: torch.Tensor) -> torch.Tensor:
    """The keys and values in SLOTS, `[num_tokens, 2 * KV_HEADS, HEAD_DIM]`."""
    return torch.stack([cache[slot // BLOCK_SIZE, :, :, slot % BLOCK_SIZE].transpose(0, 1) for slot in SLOTS]).flatten(
        1, 2
    )


@dtypes
def test_store_writes_each_token_to_its_slot_and_nothing_else(dtype: torch.dtype) -> None:
    key_value = torch.randn(3, HEADS + 2 * KV_HEADS, HEAD_DIM).to(dtype)[:, HEADS:]
    cache = torch.full((6, KV_HEADS, 2, BLOCK_SIZE, HEAD_DIM), torch.nan, dtype=dtype)
    store(as_array(key_value), SLOTS, as_array(cache))
    assert torch.equal(stored(cache), key_value)
    assert cache.isfinite().sum() == key_value.numel()


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float16)],
)
@pytest.mark.parametrize("with_norm", [False, True])
def test_rotate_and_store_agrees_with_torch(dtype: torch.dtype, cache_dtype: torch.dtype, with_norm: bool) -> None:
    torch.manual_seed(0)
    heads, weight = torch.randn(3, HEADS + 2 * KV_HEADS, HEAD_DIM).to(dtype), torch.rand(HEADS + KV_HEADS, HEAD_DIM)
    weight = weight.to(dtype) if with_norm else torch.empty(0, 0, dtype=dtype)
    angles = 6 * torch.rand(3, 1, HEAD_DIM // 2)
    cos, sin = torch.cat([angles.cos()] * 2, -1).to(dtype), torch.cat([-angles.sin(), angles.sin()], -1).to(dtype)
    expected = heads.float()
    rotated = expected[:, : HEADS + KV_HEADS]
    if with_norm:
        rotated.copy_(torch.nn.functional.rms_norm(rotated, (HEAD_DIM,), eps=1e-5) * weight.float())
    rotate(rotated, cos.float(), sin.float())
    cache = torch.full((6, KV_HEADS, 2, BLOCK_SIZE, HEAD_DIM), torch.nan, dtype=cache_dtype)
    rotation = as_array(weight), np.float32(1e-5), as_array(cos.flatten(1)), as_array(sin.flatten(1))
    rotate_and_store(as_array(heads), rotation, SLOTS, HEADS, as_array(cache))
    bound = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(heads.float(), expected, rtol=bound, atol=bound)
    assert torch.equal(stored(cache), heads[:, HEADS:].to(cache_dtype))
