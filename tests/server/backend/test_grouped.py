"""Layers that differ in heads, that share keys and values, or whose values are their keys."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from llmservice_server.backend.agreement import Case, why_wrong
from llmservice_server.backend.base import Attention
from llmservice_server.backend.cache_shape import Heads, KVCacheShape
from llmservice_server.backend.cpu.attention import CpuAttention
from llmservice_server.backend.cuda.attention import TritonAttention
from llmservice_server.backend.cuda.backend import why_triton_is_unusable
from llmservice_server.backend.cuda.kernels.jit import FP8
from llmservice_server.backend.grouped import by_group
from llmservice_server.backend.step_input import StepInput
from llmservice_server.backend.torch.attention import TorchAttention

CPU = torch.device("cpu")
WINDOWS = (None, 20, 20, None, 20, None, 20)
FEW_KEYS, MANY_KEYS = Heads(4, 1, 32), Heads(4, 4, 16)
BACKENDS = {
    "cpu": CpuAttention,
    "cpu, tiled": lambda shape, num_blocks: CpuAttention(shape, num_blocks, tiled=True),
    "torch": lambda shape, num_blocks: TorchAttention(shape, num_blocks, CPU),
    "triton": lambda shape, num_blocks: TritonAttention(shape, num_blocks, CPU),
}


def shape_of(full: Heads, sliding: Heads, dtype: torch.dtype = torch.float32) -> KVCacheShape:
    return KVCacheShape(*full, WINDOWS, 16, dtype, sliding_heads=sliding)


def inputs_of(heads: Heads, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    num_heads, num_kv_heads, head_dim = heads
    return torch.randn(num_tokens, num_heads, head_dim), torch.randn(num_tokens, 2 * num_kv_heads, head_dim)


@pytest.mark.parametrize(
    ("of", "dtype", "full", "sliding"),
    [
        *(
            pytest.param(of, torch.float32, *heads, id=f"{order}-{name}")
            for name, of in BACKENDS.items()
            for order, heads in {"few": (FEW_KEYS, MANY_KEYS), "many": (MANY_KEYS, FEW_KEYS)}.items()
        ),
        pytest.param(BACKENDS["triton"], FP8, FEW_KEYS, MANY_KEYS, id="few-triton, fp8"),
        pytest.param(BACKENDS["triton"], FP8, MANY_KEYS, FEW_KEYS, id="many-triton, fp8", marks=pytest.mark.soak),
    ],
)
def test_every_layer_keeps_its_keys_where_layers_differ_in_heads(
    of: Callable[[KVCacheShape, int], Attention], dtype: torch.dtype, full: Heads, sliding: Heads
) -> None:
    """Two sequences, all layers of a prompt before any layer of what follows it."""
    torch.manual_seed(3)
    shape = shape_of(full, sliding, dtype)
    num_groups = len(shape.block_groups(1))
    blocks = iter((torch.randperm(12 * num_groups) + 1).tolist())
    tables = [[[next(blocks) for _ in range(5)] for _ in range(2)] for _ in range(num_groups)]
    attention = by_group(shape, lambda of_group: of(of_group, 1 + 12 * num_groups))
    assert sum(cache.nbytes for cache in attention.caches) == (1 + 12 * num_groups) * shape.bytes_per_block
    for cache in attention.caches:
        cache[1:] = torch.full((), torch.nan)  # what was never stored must not be read
    ours: dict[int, list[torch.Tensor]] = {layer: [] for layer in range(len(WINDOWS))}
    expected = {layer: list[torch.Tensor]() for layer in ours}
    alone = {
        layer: BACKENDS["triton" if dtype == FP8 else "torch"](shape.with_heads(shape.heads(window), [window]), 64)
        for layer, window in enumerate(WINDOWS)
    }
    for runs in ([(0, 40), (0, 9)], [(40, 1), (9, 12)], [(41, 1), (21, 1)]):
        tables_of = [[(*run, table) for run, table in zip(runs, each, strict=True)] for each in tables]
        first, *more = (StepInput.of(each) for each in tables_of)
        step = attention.prepare(replace(first, more_tables=tuple(each.block_tables for each in more)))
        for layer, window in enumerate(WINDOWS):
            inputs = inputs_of(shape.heads(window), sum(count for _, count in runs))
            ours[layer].append(step(layer, *inputs))
            expected[layer].append(alone[layer].prepare(first)(0, *inputs))
    for layer, outputs in ours.items():
        torch.testing.assert_close(torch.cat(outputs), torch.cat(expected[layer]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("of", BACKENDS.values(), ids=[*BACKENDS])
def test_a_query_sees_no_more_than_its_chunk(of: Callable[[KVCacheShape, int], Attention]) -> None:
    """Runs within chunks, from one to another and over several; what is behind a chunk is given back."""
    torch.manual_seed(3)
    heads, chunks = FEW_KEYS, (32, None, 32, None)
    shape = KVCacheShape(*heads, chunks, 16, torch.float32, in_chunks=True)
    attention = by_group(shape, lambda of_group: of(of_group, 40))
    for cache in attention.caches:
        cache[:] = torch.full((), torch.nan)
    full, sliding = [*range(1, 9)], [*range(11, 19)]
    stored: dict[int, list[torch.Tensor]] = {layer: [] for layer in range(len(chunks))}
    for start, end in ((0, 20), (20, 70), (70, 71), (71, 96), (96, 97), (97, 128)):
        unseen = shape.block_groups(1).first_seen(1, start)
        seen = [*[0] * unseen, *sliding[unseen:]]
        runs = StepInput.of([(start, end - start, full), (0, 1, [20])])
        step = attention.prepare(replace(runs, more_tables=[[seen, [21]]]))
        for layer, size in enumerate(chunks):
            queries, key_values = inputs_of(heads, end - start + 1)
            stored[layer].append(key_values[:-1])
            ours = step(layer, queries, key_values)[:-1]
            keys, values = torch.cat(stored[layer]).transpose(0, 1).chunk(2)
            places, own = torch.arange(end), torch.arange(start, end)[:, None]
            mask = (places <= own) & (True if size is None else places // size == own // size)
            expected = torch.nn.functional.scaled_dot_product_attention(
                queries[:-1].transpose(0, 1), keys, values, mask, enable_gqa=True
            )
            torch.testing.assert_close(ours, expected.transpose(0, 1).flatten(1), rtol=1e-4, atol=1e-5)


def test_layers_with_small_keys_share_a_place_and_blocks_take_what_they_say() -> None:
    shape = shape_of(FEW_KEYS, MANY_KEYS)
    assert shape.layer_groups == [[[0, 3], [5]], [[1], [2]], [[4], [6]]]
    attention = by_group(shape, lambda of_group: TorchAttention(of_group, 9, CPU))
    assert sum(cache.nbytes for cache in attention.caches) == 9 * shape.bytes_per_block
    assert shape.bytes_per_block == 2 * 16 * 2 * MANY_KEYS.row * 4


def test_a_layer_that_shares_keys_sees_those_of_its_source() -> None:
    shape = KVCacheShape(*FEW_KEYS, (None, None, None), 16, torch.float32, sources=(0, 1, 0))
    attention = by_group(shape, lambda of_group: TorchAttention(of_group, 4, CPU))
    assert len(attention.caches) == 2
    first = attention.prepare(StepInput.of([(0, 10, [1])]))
    keys = inputs_of(FEW_KEYS, 10)
    for layer, inputs in enumerate((keys, inputs_of(FEW_KEYS, 10), keys)):
        first(layer, *inputs)
    query, key_value = inputs_of(FEW_KEYS, 1)
    step = attention.prepare(StepInput.of([(10, 1, [1])]))
    assert torch.equal(step(0, query, key_value), step(2, query, key_value))
    assert not torch.equal(step(0, query, key_value), step(1, query, key_value))


def of_latents(dtype: torch.dtype) -> KVCacheShape:
    """Of 288 numbers, as MiniCPM3's."""
    return KVCacheShape(6, 1, 288, (None,), 16, dtype, is_latent=True)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("cpu", torch.bfloat16), ("cpu, tiled", torch.float32), ("cpu, tiled", torch.bfloat16)],  # each compiles a kernel
)
def test_a_row_that_is_key_and_value_is_stored_once(name: str, dtype: torch.dtype) -> None:
    shape = of_latents(dtype)
    caches = BACKENDS[name](shape, 5).caches
    assert sum(cache.nbytes for cache in caches) == 5 * shape.bytes_per_block == 5 * 16 * 288 * dtype.itemsize
    case = Case(shape, dtype)
    assert why_wrong([case], lambda shape, num_blocks, _: BACKENDS[name](shape, num_blocks), CPU) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tritons_kernels_take_a_row_that_is_key_and_value(dtype: torch.dtype) -> None:
    assert why_triton_is_unusable(of_latents(dtype), dtype, CPU) is None
