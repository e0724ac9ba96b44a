"""Paged attention against attention written out: any mix of chunks and single tokens, any order of blocks."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmservice_server.attention.base import KVCacheShape, SequenceSlice
from llmservice_server.attention.torch_backend import TorchAttention
from llmservice_server.engine.request import BlockTable

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
    block_table: BlockTable

    @classmethod
    def random(cls, start: int, num_tokens: int, blocks: list[int]) -> "Sequence":
        total = start + num_tokens
        table = BlockTable()
        table.extend(blocks[: -(-total // BLOCK_SIZE)])
        query, key_value = torch.randn(total, HEADS, HEAD_DIM), torch.randn(total, 2 * KV_HEADS, HEAD_DIM)
        return cls(start, num_tokens, query, key_value, table)

    def expected(self, window: int | None) -> torch.Tensor:
        """`[num_tokens, HEADS * HEAD_DIM]`, one query and one head at a time."""
        rows = []
        for position in range(self.start, self.start + self.num_tokens):
            first = 0 if window is None else max(0, position + 1 - window)
            for head in range(HEADS):
                kv_head = head // (HEADS // KV_HEADS)
                keys = self.key_value[first : position + 1, kv_head]
                values = self.key_value[first : position + 1, KV_HEADS + kv_head]
                rows.append((keys @ self.query[position, head] / math.sqrt(HEAD_DIM)).softmax(-1) @ values)
        return torch.stack(rows).view(self.num_tokens, HEADS * HEAD_DIM)


def attention(dtype: torch.dtype = torch.float32) -> TorchAttention:
    shape = KVCacheShape(HEADS, KV_HEADS, HEAD_DIM, WINDOWS, BLOCK_SIZE, dtype)
    backend = TorchAttention(shape, NUM_BLOCKS, torch.device("cpu"))
    for cache in backend.caches:
        cache.fill_(torch.nan)  # what nobody stored must not be read
    return backend


def run(backend: TorchAttention, sequences: list[Sequence], layer: int) -> torch.Tensor:
    """Two steps: the first stores what comes before, the second is the one in question."""
    before = [sequence for sequence in sequences if sequence.start]
    if before:
        step = backend.prepare([SequenceSlice(0, sequence.start, sequence.block_table) for sequence in before])
        step(
            layer,
            torch.cat([sequence.query[: sequence.start] for sequence in before]),
            torch.cat([sequence.key_value[: sequence.start] for sequence in before]),
        )
    slices = [SequenceSlice(sequence.start, sequence.num_tokens, sequence.block_table) for sequence in sequences]
    step = backend.prepare(slices)
    return step(
        layer,
        torch.cat([sequence.query[sequence.start :] for sequence in sequences]),
        torch.cat([sequence.key_value[sequence.start :] for sequence in sequences]),
    )


@settings(max_examples=60, deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 18), st.sampled_from([1, 1, 2, 7, 16])), min_size=1, max_size=5),
    scatter=st.randoms(use_true_random=False),
    scattered=st.booleans(),
    layer=st.sampled_from(range(len(WINDOWS))),
)
def test_any_mix_of_chunks_and_decodes_equals_attention_written_out(
    spans: list[tuple[int, int]], scatter: object, scattered: bool, layer: int
) -> None:
    torch.manual_seed(len(spans))
    blocks = list(range(1, NUM_BLOCKS))
    if scattered:
        scatter.shuffle(blocks)  # type: ignore[attr-defined]
    sequences = [
        Sequence.random(start, num_tokens, blocks[10 * index : 10 * index + 10])
        for index, (start, num_tokens) in enumerate(spans)
    ]
    expected = torch.cat([sequence.expected(WINDOWS[layer]) for sequence in sequences])
    torch.testing.assert_close(run(attention(), sequences, layer), expected, rtol=1e-5, atol=1e-5)


def test_scattered_and_neighbouring_sequences_share_a_step() -> None:
    torch.manual_seed(0)
    sequences = [
        Sequence.random(9, 1, [1, 2, 3]),
        Sequence.random(9, 1, [30, 7, 21]),
        Sequence.random(4, 6, [10, 11, 12]),
        Sequence.random(6, 5, [40, 5, 50]),
    ]
    assert [sequence.block_table.contiguous for sequence in sequences] == [True, False, True, False]
    expected = torch.cat([sequence.expected(None) for sequence in sequences])
    torch.testing.assert_close(run(attention(), sequences, layer=0), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrower_cache_rounds_keys_and_values_and_nothing_else(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    sequence = Sequence.random(9, 3, [3, 1, 2])
    answer = run(attention(dtype), [sequence], layer=0)
    sequence.key_value = sequence.key_value.to(dtype).float()
    torch.testing.assert_close(answer, sequence.expected(None), rtol=1e-5, atol=1e-5)


def test_a_block_costs_keys_and_values_of_every_layer() -> None:
    shape = KVCacheShape(HEADS, KV_HEADS, HEAD_DIM, WINDOWS, BLOCK_SIZE, torch.bfloat16)
    allocated = sum(cache.nbytes for cache in TorchAttention(shape, NUM_BLOCKS, torch.device("cpu")).caches)
    assert shape.bytes_per_block * NUM_BLOCKS == allocated
