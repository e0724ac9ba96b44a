"""Everything about graphs but the capture itself, which needs a card: what is recorded here is run again instead."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

import harness.triton_interpreter  # noqa: F401
from llmservice_server.attention.base import KVCacheShape, SequenceSlice
from llmservice_server.attention.triton_backend import TritonAttention
from llmservice_server.engine.decode_graphs import DecodeBuffers, DecodeGraphs, Replay, capture_sizes
from llmservice_server.engine.loader import Checkpoint
from llmservice_server.engine.step_in_flight import LateTokens
from llmservice_server.models.llama import LlamaModel
from llmservice_server.tiny.model import TinyModelSpec, write_tiny_model

CPU = torch.device("cpu")
BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder, TinyModelSpec(layers=1, hidden_size=32, heads=4, kv_heads=2, vocab_size=512))
    return Checkpoint.open(folder).load(torch.float32, CPU)


class Recorder:
    """Captures by remembering the work; a replay does it again, into the same tensor."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, work: Callable[[], torch.Tensor]) -> tuple[Replay, torch.Tensor]:
        answer = work()
        self.sizes.append(len(answer))

        def replay() -> None:
            answer.copy_(work())

        return replay, answer


def attention_of(model: LlamaModel) -> TritonAttention:
    config = model.config
    shape = KVCacheShape(
        config.num_heads, config.num_kv_heads, config.head_dim, config.windows, BLOCK_SIZE, torch.float32
    )
    backend = TritonAttention(shape, 12, CPU)
    for cache in backend.caches:
        cache.zero_()
        cache[0] = torch.nan  # the null block: nobody may read it
    return backend


@torch.inference_mode()
def plain(
    model: LlamaModel, attention: TritonAttention, tokens: list[int], slices: list[SequenceSlice]
) -> torch.Tensor:
    positions = [part.start for part in slices]
    return model.forward(torch.tensor(tokens), torch.tensor(positions), attention.prepare(slices))


def test_sizes_are_few_and_hold_every_batch() -> None:
    assert capture_sizes(1) == [1]
    assert capture_sizes(3) == [1, 2, 4]
    assert capture_sizes(8) == [1, 2, 4, 8]
    assert capture_sizes(9) == [1, 2, 4, 8, 16]
    assert capture_sizes(256) == [1, 2, 4, *range(8, 257, 8)]


@torch.inference_mode()
def test_a_batch_gets_what_it_gets_without_a_graph_whatever_ran_before(model: LlamaModel) -> None:
    attention, recorder = attention_of(model), Recorder()
    graphs = DecodeGraphs(model, attention, DecodeBuffers(4, 16, BLOCK_SIZE, CPU), [1, 2, 4], recorder)
    assert recorder.sizes == [4, 2, 1]  # the largest first
    other = attention_of(model)
    steps = [
        ([5, 6, 7, 8], [(0, [3]), (0, [5]), (0, [1]), (0, [9])]),
        ([9, 4, 3], [(1, [3]), (1, [1]), (1, [5])]),
        ([2], [(2, [1])]),
        ([8, 1], [(16, [3, 7]), (2, [5])]),
    ]
    for tokens, places in steps:
        slices = [SequenceSlice(start, 1, table) for start, table in places]
        assert graphs.takes(slices)
        torch.testing.assert_close(graphs.run(tokens, slices), plain(model, other, tokens, slices))
        for mine, theirs in zip(attention.caches, other.caches, strict=True):
            torch.testing.assert_close(mine, theirs, equal_nan=True)


@torch.inference_mode()
def test_only_the_columns_of_the_longest_sequence_are_copied_and_no_kernel_reads_another(model: LlamaModel) -> None:
    attention, other = attention_of(model), attention_of(model)
    buffers = DecodeBuffers(4, 32, BLOCK_SIZE, CPU)
    graphs = DecodeGraphs(model, attention, buffers, [4], Recorder())
    for backend in (attention, other):
        for cache in backend.caches:
            cache[11] = torch.nan
    buffers.tables.fill_(11)  # a block of NaN for whoever reads what no sequence has
    tokens, slices = [5, 6, 7], [SequenceSlice(0, 1, [3]), SequenceSlice(33, 1, [5, 1, 9]), SequenceSlice(15, 1, [7])]
    torch.testing.assert_close(graphs.run(tokens, slices), plain(model, other, tokens, slices))
    assert [row[:4] for row in buffers.tables.tolist()] == [[3, 0, 0, 0], [5, 1, 9, 0], [7, 0, 0, 0], [11] * 4]
    assert (buffers.tables[:, 16:] == 11).all()


@torch.inference_mode()
def test_a_graph_reads_the_tokens_that_only_the_device_knows(model: LlamaModel) -> None:
    attention, other = attention_of(model), attention_of(model)
    graphs = DecodeGraphs(model, attention, DecodeBuffers(4, 16, BLOCK_SIZE, CPU), [4], Recorder())
    slices = [SequenceSlice(0, 1, [block]) for block in (3, 5, 1)]
    late = LateTokens(np.array([0, 2]), np.array([1, 0]), torch.tensor([8, 5, -1]))
    torch.testing.assert_close(graphs.run([0, 6, 0], slices, late), plain(model, other, [5, 6, 8], slices))
    late = LateTokens(np.array([1]), np.array([2]), torch.tensor([8, 5, -1]))
    torch.testing.assert_close(graphs.run([5, 0, 8], slices, late), plain(model, other, [5, 0, 8], slices))


def test_steps_with_chunks_and_too_many_sequences_are_not_taken(model: LlamaModel) -> None:
    graphs = DecodeGraphs(model, attention_of(model), DecodeBuffers(2, 16, BLOCK_SIZE, CPU), [1, 2], Recorder())
    assert not graphs.takes([SequenceSlice(0, 2, [1])])
    assert not graphs.takes([SequenceSlice(0, 1, [1])] * 3)


@torch.inference_mode()
def test_a_graph_that_does_something_else_is_found_out(model: LlamaModel) -> None:
    attention = attention_of(model)
    slices = [SequenceSlice(0, 1, [1]), SequenceSlice(0, 1, [2])]

    def forgetful(work: Callable[[], torch.Tensor]) -> tuple[Replay, torch.Tensor]:
        return lambda: None, torch.zeros_like(work())

    buffers = DecodeBuffers(2, 16, BLOCK_SIZE, CPU)
    assert DecodeGraphs(model, attention, buffers, [1, 2], Recorder()).what_is_wrong(slices) is None
    problem = DecodeGraphs(model, attention, buffers, [1, 2], forgetful).what_is_wrong(slices)
    assert problem is not None
    assert "is off by" in problem


def test_the_parts_of_a_graph_do_not_depend_on_the_lengths(model: LlamaModel) -> None:
    attention = attention_of(model)
    buffers = DecodeBuffers(2, 16, BLOCK_SIZE, CPU)
    before = attention.decodes(buffers.rows, buffers.lengths, buffers.tables).splits
    buffers.fill([1, 2], [SequenceSlice(40, 1, [1, 2, 3]), SequenceSlice(0, 1, [4])], 2)
    assert attention.decodes(buffers.rows, buffers.lengths, buffers.tables).splits == before
