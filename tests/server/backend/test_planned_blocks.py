"""The planner's size of a block is that of a backend's tensors."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from llmservice_planner.model.shape import ModelShape
from llmservice_server.backend.base import Attention
from llmservice_server.backend.cache_shape import Heads, KVCacheShape
from llmservice_server.backend.cpu.attention import CpuAttention
from llmservice_server.backend.cuda.attention import TritonAttention
from llmservice_server.backend.cuda.kernels.jit import FP8
from llmservice_server.backend.grouped import by_group
from llmservice_server.backend.torch.attention import TorchAttention

CPU = torch.device("cpu")
NUM_BLOCKS = 3
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "fp8": FP8}
BACKENDS: dict[str, Callable[[KVCacheShape], Attention]] = {
    "cpu": lambda shape: CpuAttention(shape, NUM_BLOCKS),
    "torch": lambda shape: TorchAttention(shape, NUM_BLOCKS, CPU),
    "triton": lambda shape: by_group(shape, lambda of_group: TritonAttention(of_group, NUM_BLOCKS, CPU)),
}


def model_of(layers: int, heads: int, kv_heads: int, head_dim: int) -> ModelShape:
    rest: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 32}
    return ModelShape(layers=layers, heads=heads, kv_heads=kv_heads, head_dim=head_dim, **rest)


@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize(("layers", "heads", "kv_heads", "head_dim"), [(2, 32, 8, 128), (3, 14, 2, 64), (1, 4, 4, 96)])
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [(backend, dtype) for backend in BACKENDS for dtype in DTYPES if dtype != "fp8" or backend == "triton"],
)
def test_a_block_has_the_size_that_the_planner_computes(
    backend: str, dtype: str, layers: int, heads: int, kv_heads: int, head_dim: int, block_size: int
) -> None:
    shape = KVCacheShape(heads, kv_heads, head_dim, (None,) * layers, block_size, DTYPES[dtype])
    allocated = sum(cache.nbytes for cache in BACKENDS[backend](shape).caches)
    planned = model_of(layers, heads, kv_heads, head_dim).kv_bytes_per_token(dtype) * block_size
    assert allocated == NUM_BLOCKS * planned
    assert allocated == NUM_BLOCKS * shape.bytes_per_block


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("full", "sliding"), [((4, 512), (16, 256)), ((1, 512), (1, 256)), ((4, 192), (8, 192))])
def test_a_block_of_layers_that_differ_in_heads_has_the_planned_size(
    dtype: str, full: tuple[int, int], sliding: tuple[int, int]
) -> None:
    """As of Gemma 4 31B and E2B, and MiMo-V2-Flash."""
    model = replace(
        model_of(6, 16, *sliding),
        full_kv_heads=full[0],
        full_head_dim=full[1],
        sliding_window=20,
        sliding_layers=4,
    )
    shape = KVCacheShape(16, *full, (None, 20, 20, None, 20, 20), 16, DTYPES[dtype], sliding_heads=Heads(16, *sliding))
    planned = 16 * model.block_groups(16, 1).num_layers * model.place_bytes(dtype, 1)
    allocated = sum(cache.nbytes for cache in BACKENDS["triton"](shape).caches)
    assert NUM_BLOCKS * planned == NUM_BLOCKS * shape.bytes_per_block == allocated
