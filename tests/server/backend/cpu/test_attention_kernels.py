"""The kernels for decodes and for tiles of query tokens agree with torch, for all shapes of heads."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from llmservice_server.backend.cache_shape import KVCacheShape
from llmservice_server.backend.cpu import attention_kernels as kernels
from llmservice_server.backend.cpu.attention import CpuAttention
from llmservice_server.backend.cpu.attention_kernels import (
    LOWEST,
    add_tile,
    head_shape,
    multiply_tile,
    row_max,
    sum_tile,
)
from llmservice_server.backend.cpu.compiled import compiled
from llmservice_server.backend.cpu.linear_kernels import COLUMNS
from llmservice_server.backend.cpu.llvm import as_array
from llmservice_server.backend.step_input import StepInput
from llmservice_server.backend.torch.attention import TorchAttention

pytestmark = pytest.mark.slow

Spans = tuple[tuple[int, int], ...]

BLOCK_SIZE, NUM_BLOCKS = 16, 300
SPANS = ((0, 199), (0, 65), (37, 64), (300, 90), (129, 2), (0, 2), (70, 1), (0, 1), (511, 130))
"""Tokens in the cache before, and in the step: full, partial and several tiles of queries and of keys."""
MANY = tuple((length, 1) for length in range(70))
"""More decodes than a compiled step takes."""
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 5e-3}


def outputs(shape: KVCacheShape, spans: Spans = SPANS) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs of our kernel, and of torch in float64, for a step with all spans; block tables are fragmented."""
    torch.manual_seed(0)
    wide = KVCacheShape(
        shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.windows, shape.block_size, torch.float64
    )
    ours = CpuAttention(shape, NUM_BLOCKS, tiled=True)
    theirs = TorchAttention(wide, NUM_BLOCKS, torch.device("cpu"))
    ours.caches[0].fill_(torch.nan)  # what was never stored must not be read
    blocks = iter((1 + torch.randperm(NUM_BLOCKS - 1)).tolist())
    tables = [list(itertools.islice(blocks, -(-(start + count) // BLOCK_SIZE))) for start, count in spans]
    before = [(0, start, table) for (start, _), table in zip(spans, tables, strict=True) if start]
    step = [(start, count, table) for (start, count), table in zip(spans, tables, strict=True)]
    for runs in (before, step):
        num_tokens = sum(count for _, count, _ in runs)
        heads = torch.randn(num_tokens, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim).to(shape.dtype)
        query, key_value = heads[:, : shape.num_heads], heads[:, shape.num_heads :]
        given = StepInput.of(runs)
        output = ours.prepare(given)(0, query, key_value).double()
        expected = theirs.prepare(given)(0, query.double(), key_value.double())
    return output, expected


def largest_error(output: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest relative error of a token's output."""
    return float(((output - expected).norm(dim=1) / expected.norm(dim=1)).max())


@pytest.mark.parametrize(
    ("group", "head_dim", "dtype"),
    [
        (3, 64, torch.float32),
        (3, 64, torch.bfloat16),
        pytest.param(1, 80, torch.bfloat16, marks=pytest.mark.soak),
        (8, 128, torch.bfloat16),
    ],
)
def test_chunks_and_decodes_of_any_shape_agree_with_torch(group: int, head_dim: int, dtype: torch.dtype) -> None:
    output, expected = outputs(KVCacheShape(2 * group, 2, head_dim, (None,), BLOCK_SIZE, dtype))
    assert largest_error(output, expected) <= BOUNDS[dtype]


@pytest.mark.parametrize("window", [1, 5, 64, 100, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_window_hides_earlier_keys(window: int, dtype: torch.dtype) -> None:
    output, expected = outputs(KVCacheShape(6, 2, 64, (window,), BLOCK_SIZE, dtype))
    assert largest_error(output, expected) <= BOUNDS[dtype]


def test_many_decodes_are_computed_as_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "decode", None)  # it would be compiled while requests wait
    output, expected = outputs(KVCacheShape(6, 2, 64, (None,), BLOCK_SIZE, torch.bfloat16), MANY)
    assert largest_error(output, expected) <= BOUNDS[torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("part", [0, 2], ids=["key", "value"])
def test_nan_and_infinity_reach_the_output(dtype: torch.dtype, number: float, part: int) -> None:
    """The engine ends a request whose logits are NaN; attention must not turn them into numbers."""
    shape = KVCacheShape(6, 2, 64, (None,), BLOCK_SIZE, dtype)
    torch.manual_seed(0)
    query, key_value = torch.randn(90, 6, 64).to(dtype), torch.randn(90, 4, 64).to(dtype)
    key_value[40, part] = number
    output = CpuAttention(shape, 8, tiled=True).prepare(StepInput.of([(0, 90, range(1, 7))]))(0, query, key_value)
    heads = output.view(90, 6, 64)
    assert heads[:, 3:].isfinite().all()
    assert not heads[40:, :3].isfinite().all(dim=2).any()


def test_later_keys_change_nothing() -> None:
    """Scores of later keys are computed with those of earlier ones and masked."""
    shape = KVCacheShape(6, 2, 64, (None,), BLOCK_SIZE, torch.float32)
    torch.manual_seed(0)
    query, key_value = torch.randn(90, 6, 64), torch.randn(90, 4, 64)
    table = list(range(1, 7))
    step = CpuAttention(shape, 8, tiled=True).prepare(StepInput.of([(0, 90, table)]))
    before = step(0, query, key_value)
    key_value[80:] = 1e4
    after = step(0, query, key_value)
    torch.testing.assert_close(after[:80], before[:80], rtol=0, atol=0)
    assert not torch.equal(after[80:], before[80:])


shapes = pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (3, 96), (8, 128), (4, 6), (2, 3)])


@compiled()
def _score(queries: Any, keys: Any, parts: Any, scores: Any, maxima: Any, shape: Any) -> None:
    multiply_tile(queries, keys, keys, parts, shape)
    sum_tile(parts, len(keys), scores, maxima, shape)


@compiled()
def _add(weights: Any, values: Any, sums: Any, shape: Any) -> None:
    add_tile(weights, values, values, sums, shape)


@shapes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scores_and_weighted_sums_of_a_tile_agree_with_torch(group: int, head_dim: int, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    shape = head_shape(group, head_dim)
    lanes = shape.dtype["lanes"].shape[0]
    assert head_dim % lanes == 0
    for num_keys in {1, lanes // 2 + 1, lanes}:
        queries = torch.randn(group, head_dim, generator=random)
        keys, values = (torch.randn(num_keys, head_dim, generator=random).to(dtype) for _ in range(2))
        parts, scores = np.full((group, lanes, lanes), np.nan, np.float32), np.zeros((group, lanes), np.float32)
        maxima = np.empty(group, np.float32)
        _score(queries.numpy(), as_array(keys), parts, scores, maxima, shape)
        torch.testing.assert_close(torch.from_numpy(scores)[:, :num_keys], queries @ keys.float().T)
        assert (scores[:, num_keys:] == np.float32(LOWEST)).all()
        assert (maxima == scores.max(axis=1)).all()

        sums = torch.randn(group, head_dim, generator=random)
        expected = sums + torch.from_numpy(scores)[:, :num_keys] @ values.float()
        _add(scores, as_array(values), sums.numpy(), shape)
        torch.testing.assert_close(sums, expected)


@compiled()
def _row_max(rows: Any, maxima: Any) -> None:
    for number in range(len(rows)):
        maxima[number] = row_max(rows[number])


def test_row_max_finds_the_maximum_at_every_place() -> None:
    rows = np.random.default_rng(0).standard_normal((COLUMNS, COLUMNS)).astype(np.float32) - 10
    rows[np.arange(COLUMNS), np.arange(COLUMNS)] = np.arange(COLUMNS)
    rows = np.vstack((rows, np.full((1, COLUMNS), -np.inf, np.float32)))
    maxima = np.empty(len(rows), np.float32)
    _row_max(rows, maxima)
    np.testing.assert_array_equal(maxima, rows.max(axis=1))
