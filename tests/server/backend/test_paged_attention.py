"""Paged attention agrees with plain attention: any mix of chunks and decodes, any order of blocks."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmservice_server.backend.base import Attention
from llmservice_server.backend.cache_shape import KVCacheShape
from llmservice_server.backend.cpu.attention import CpuAttention
from llmservice_server.backend.grouped import by_group
from llmservice_server.backend.step_input import StepInput
from llmservice_server.backend.torch.attention import TorchAttention

pytestmark = pytest.mark.slow

BLOCK_SIZE, KV_HEADS, HEADS, HEAD_DIM = 4, 2, 6, 8
NUM_BLOCKS = 64
WINDOWS = (None, 5)


@dataclass
class Sequence:
    """All of one sequence's queries, keys and values, of which `start` are in the cache before the step."""

    start: int
    num_tokens: int
    query: torch.Tensor
    key_value: torch.Tensor
    block_table: list[int]

    @classmethod
    def random(cls, start: int, num_tokens: int, blocks: list[int]) -> "Sequence":
        total = start + num_tokens
        table = blocks[: -(-total // BLOCK_SIZE)]
        query, key_value = torch.randn(total, HEADS, HEAD_DIM), torch.randn(total, 2 * KV_HEADS, HEAD_DIM)
        return cls(start, num_tokens, query, key_value, table)

    def expected(
        self, window: int | None, softcap: float | None = None, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`[num_tokens, HEADS * HEAD_DIM]`: all scores, of which those of keys that a query does not see are masked."""
        keys, values = self.key_value.transpose(0, 1).repeat_interleave(HEADS // KV_HEADS, dim=0).chunk(2)
        scores = self.query[self.start :].transpose(0, 1) @ keys.mT / math.sqrt(HEAD_DIM)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        places, own = torch.arange(len(self.query)), torch.arange(self.start, len(self.query))[:, None]
        seen = (places <= own) & (places > own - (len(self.query) if window is None else window))
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, self.num_tokens, 1)), -1)
        return (scores.softmax(-1)[..., : len(places)] @ values).transpose(0, 1).flatten(1)


def torch_attention(shape: KVCacheShape, num_blocks: int) -> Attention:
    return TorchAttention(shape, num_blocks, torch.device("cpu"))


def tiled_attention(shape: KVCacheShape, num_blocks: int) -> Attention:
    return CpuAttention(shape, num_blocks, tiled=True)


backends = pytest.mark.parametrize("of", [CpuAttention, tiled_attention, torch_attention])
BackendOf = Callable[[KVCacheShape, int], Attention]


def attention(
    of: BackendOf, dtype: torch.dtype = torch.float32, *, softcap: float | None = None, has_sinks: bool = False
) -> Attention:
    shape = KVCacheShape(HEADS, KV_HEADS, HEAD_DIM, WINDOWS, BLOCK_SIZE, dtype, softcap, has_sinks)
    backend = of(shape, NUM_BLOCKS)
    for cache in backend.caches:
        cache.fill_(torch.nan)  # what was never stored must not be read
    return backend


def run(backend: Attention, sequences: list[Sequence], layer: int, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Two steps: the first stores the cached tokens, the second is tested."""
    before = [sequence for sequence in sequences if sequence.start]
    if before:
        step = backend.prepare(StepInput.of([(0, sequence.start, sequence.block_table) for sequence in before]))
        step(
            layer,
            torch.cat([sequence.query[: sequence.start] for sequence in before]),
            torch.cat([sequence.key_value[: sequence.start] for sequence in before]),
            sinks,
        )
    runs = [(sequence.start, sequence.num_tokens, sequence.block_table) for sequence in sequences]
    step = backend.prepare(StepInput.of(runs))
    return step(
        layer,
        torch.cat([sequence.query[sequence.start :] for sequence in sequences]),
        torch.cat([sequence.key_value[sequence.start :] for sequence in sequences]),
        sinks,
    )


@backends
@settings(max_examples=40, deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 18), st.sampled_from([1, 1, 2, 7, 16])), min_size=1, max_size=5),
    scatter=st.randoms(use_true_random=False),
    scattered=st.booleans(),
    layer=st.sampled_from(range(len(WINDOWS))),
    softcap=st.sampled_from([None, None, 1.5]),
    has_sinks=st.booleans(),
)
def test_any_mix_of_chunks_and_decodes_agrees_with_plain_attention(
    of: BackendOf,
    spans: list[tuple[int, int]],
    scatter: object,
    scattered: bool,
    layer: int,
    softcap: float | None,
    has_sinks: bool,
) -> None:
    torch.manual_seed(len(spans))
    blocks = list(range(1, NUM_BLOCKS))
    if scattered:
        scatter.shuffle(blocks)  # type: ignore[attr-defined]
    sequences = [
        Sequence.random(start, num_tokens, blocks[10 * index : 10 * index + 10])
        for index, (start, num_tokens) in enumerate(spans)
    ]
    sinks = torch.randn(HEADS) if has_sinks else None
    expected = torch.cat([sequence.expected(WINDOWS[layer], softcap, sinks) for sequence in sequences])
    backend = attention(of, softcap=softcap, has_sinks=has_sinks)
    torch.testing.assert_close(run(backend, sequences, layer, sinks), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("of", "dtype"),
    [
        *itertools.product([CpuAttention, torch_attention], [torch.bfloat16, torch.float16]),
        (tiled_attention, torch.float16),  # each compiles a kernel
    ],
)
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_a_cache_of_lower_precision_rounds_only_keys_and_values(
    of: BackendOf, dtype: torch.dtype, num_tokens: int
) -> None:
    torch.manual_seed(0)
    sequence = Sequence.random(9, num_tokens, [3, 1, 2])
    sequence.key_value[3] *= 1e-6  # float16's subnormals
    sequence.key_value[4] *= 1e4
    output = run(attention(of, dtype), [sequence], layer=0)
    sequence.key_value = sequence.key_value.to(dtype).float()
    torch.testing.assert_close(output, sequence.expected(None), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("of", [CpuAttention, torch_attention])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nan_and_infinity_reach_the_output(of: BackendOf, dtype: torch.dtype) -> None:
    """The engine ends a request whose logits are NaN; attention must not turn them into numbers."""
    for poison in (torch.nan, torch.inf):
        for part in (0, KV_HEADS):
            sequences = [Sequence.random(9, 1, [3, 1, 2]), Sequence.random(6, 1, [4, 5])]
            sequences[0].key_value[5, part] = poison
            output = run(attention(of, dtype), sequences, layer=0).view(2, HEADS, HEAD_DIM)
            group = HEADS // KV_HEADS
            assert not output[0, :group].isfinite().all()
            assert output[0, group:].isfinite().all()
            assert output[1].isfinite().all()


@pytest.mark.parametrize("num_threads", [1, 2])
def test_sequences_of_different_lengths_are_balanced_over_threads(num_threads: int) -> None:
    shape = KVCacheShape(8, 2, 64, (None,), 16, torch.bfloat16)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        backend = CpuAttention(shape, 400)
        lengths = [1, 200, 16, 17, 500, 3, 90, 64, 33, 250, 2, 129]
        tables, first = [], 1
        for length in lengths:
            tables.append(range(first, first + -(-length // 16)))
            first += len(tables[-1])
        key_values = [torch.randn(length, 4, 64).bfloat16() for length in lengths]
        whole = [(0, length, table) for length, table in zip(lengths, tables, strict=True)]
        store = backend.prepare(StepInput.of(whole))
        store(0, torch.randn(sum(lengths), 8, 64).bfloat16(), torch.cat(key_values))
        query = torch.randn(len(lengths), 8, 64).bfloat16()
        step = backend.prepare(StepInput.of([(n - 1, 1, table) for n, table in zip(lengths, tables, strict=True)]))
        output = step(0, query, torch.stack([each[-1] for each in key_values]))
        assert torch.get_num_threads() == num_threads  # numba sets OpenMP's number, which may be torch's as well
    finally:
        torch.set_num_threads(before)
    for row, key_value in enumerate(key_values):
        keys, values = key_value.float().transpose(0, 1).repeat_interleave(4, dim=0).chunk(2)
        scores = torch.einsum("hd,hld->hl", query[row].float(), keys) / 8
        expected = torch.einsum("hl,hld->hd", scores.softmax(-1), values).flatten()
        torch.testing.assert_close(output[row].float(), expected, rtol=1e-2, atol=1e-2)


@backends
def test_bytes_per_block_is_what_the_tensors_take(of: BackendOf) -> None:
    shape = KVCacheShape(HEADS, KV_HEADS, HEAD_DIM, WINDOWS, BLOCK_SIZE, torch.bfloat16)
    attention = by_group(shape, lambda of_group: of(of_group, NUM_BLOCKS))
    allocated = sum(cache.nbytes for cache in attention.caches)
    assert shape.bytes_per_block * NUM_BLOCKS == allocated
