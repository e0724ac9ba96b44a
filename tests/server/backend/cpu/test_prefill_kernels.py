"""The kernel for chunks computes what torch does with the same keys and values, whatever the shape of the heads."""

import itertools

import pytest
import torch

from llmservice_server.backend.base import KVCacheShape, StepInput
from llmservice_server.backend.cpu import attention_kernels as cpu_kernels
from llmservice_server.backend.cpu.attention import CpuAttention
from llmservice_server.backend.torch.attention import TorchAttention

pytestmark = pytest.mark.slow

Spans = tuple[tuple[int, int], ...]

BLOCK_SIZE, NUM_BLOCKS = 16, 300
SPANS = ((0, 199), (0, 65), (37, 64), (300, 90), (129, 2), (0, 2), (70, 1), (0, 1), (511, 130))
"""Tokens in the cache before, and in the step: of tiles and panels that are full, and less and more than that."""
MANY = tuple((length, 1) for length in range(70))
"""Decodes, more than a compiled step takes."""
LARGEST = {torch.float32: 1e-5, torch.bfloat16: 5e-3}


def answers(shape: KVCacheShape, met: Spans = SPANS) -> tuple[torch.Tensor, torch.Tensor]:
    """Ours, and torch's in float64 of the same numbers, of a step in which all spans meet; blocks are scattered."""
    torch.manual_seed(0)
    wide = KVCacheShape(
        shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.windows, shape.block_size, torch.float64
    )
    ours = CpuAttention(shape, NUM_BLOCKS, tiled=True)
    theirs = TorchAttention(wide, NUM_BLOCKS, torch.device("cpu"))
    ours.caches[0].fill_(torch.nan)  # what nobody stored must not be read
    blocks = iter((1 + torch.randperm(NUM_BLOCKS - 1)).tolist())
    tables = [list(itertools.islice(blocks, -(-(start + count) // BLOCK_SIZE))) for start, count in met]
    before = [(0, start, table) for (start, _), table in zip(met, tables, strict=True) if start]
    step = [(start, count, table) for (start, count), table in zip(met, tables, strict=True)]
    for spans in (before, step):
        num_tokens = sum(count for _, count, _ in spans)
        heads = torch.randn(num_tokens, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim).to(shape.dtype)
        query, key_value = heads[:, : shape.num_heads], heads[:, shape.num_heads :]
        given = StepInput.of(spans)
        answer = ours.prepare(given)(0, query, key_value).double()
        expected = theirs.prepare(given)(0, query.double(), key_value.double())
    return answer, expected


def furthest(answer: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest relative error of a token's answer."""
    return float(((answer - expected).norm(dim=1) / expected.norm(dim=1)).max())


@pytest.mark.parametrize(
    ("group", "head_dim", "dtype"),
    [
        (3, 64, torch.float32),
        (3, 64, torch.bfloat16),
        (1, 80, torch.bfloat16),
        (8, 128, torch.bfloat16),
    ],
)
def test_chunks_and_decodes_of_any_shape_are_what_torch_makes_of_them(
    group: int, head_dim: int, dtype: torch.dtype
) -> None:
    answer, expected = answers(KVCacheShape(2 * group, 2, head_dim, (None,), BLOCK_SIZE, dtype))
    assert furthest(answer, expected) <= LARGEST[dtype]


@pytest.mark.parametrize("window", [1, 5, 64, 100, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_window_hides_what_is_behind_it(window: int, dtype: torch.dtype) -> None:
    answer, expected = answers(KVCacheShape(6, 2, 64, (window,), BLOCK_SIZE, dtype))
    assert furthest(answer, expected) <= LARGEST[dtype]


def test_many_decodes_are_tiles_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernels, "decode", None)  # it would have to be compiled while they wait
    answer, expected = answers(KVCacheShape(6, 2, 64, (None,), BLOCK_SIZE, torch.bfloat16), MANY)
    assert furthest(answer, expected) <= LARGEST[torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("part", [0, 2], ids=["key", "value"])
def test_what_is_not_finite_is_not_hidden(dtype: torch.dtype, poison: float, part: int) -> None:
    """The engine ends a request whose logits are NaN; attention must not turn them into numbers."""
    shape = KVCacheShape(6, 2, 64, (None,), BLOCK_SIZE, dtype)
    torch.manual_seed(0)
    query, key_value = torch.randn(90, 6, 64).to(dtype), torch.randn(90, 4, 64).to(dtype)
    key_value[40, part] = poison
    answer = CpuAttention(shape, 8, tiled=True).prepare(StepInput.of([(0, 90, range(1, 7))]))(0, query, key_value)
    heads = answer.view(90, 6, 64)
    assert heads[:, 3:].isfinite().all()
    assert not heads[40:, :3].isfinite().all(dim=2).any()


def test_a_token_that_nobody_may_see_yet_changes_nothing() -> None:
    """Scores of later keys are computed with those of earlier ones, and must weigh nothing."""
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
