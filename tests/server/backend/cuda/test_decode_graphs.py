"""Captures and replays, with doubles of CUDA, because there is no GPU."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from harness.checkpoints.families import OTHERS, save
from harness.gpu.late_device import CUDA, Stream, late_device
from llmservice_server.backend.cache_shape import KVCacheShape
from llmservice_server.backend.cuda.attention import TritonAttention
from llmservice_server.backend.cuda.capture import CudaCapture, Replay
from llmservice_server.backend.cuda.decode_graphs import (
    DecodeBuffers,
    DecodeGraphs,
    StepGraphs,
    capture_sizes,
    graph_bytes,
)
from llmservice_server.backend.cuda.mixed_graphs import MixedGraphs
from llmservice_server.backend.grouped import by_group
from llmservice_server.backend.step_input import PendingTokens, StepInput
from llmservice_server.models.decoder import DecoderModel
from llmservice_server.models.lora import Adaptables, AdapterSlots, LowRank, SlotRows, can_apply_by_row
from llmservice_server.runtime.loader import Checkpoint
from llmservice_server.tiny.model import TinyModelSpec, write_tiny_model

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder, TinyModelSpec(layers=2, hidden_size=32, heads=4, kv_heads=2, vocab_size=512))
    return Checkpoint.open(folder).load(torch.float32, CPU)


class Recorder:
    """Captures by storing the work; a replay repeats it into the same tensor."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, work: Callable[[], torch.Tensor]) -> tuple[Replay, torch.Tensor]:
        output = work()
        self.sizes.append(len(output))

        def replay() -> None:
            output.copy_(work())

        return replay, output


SPLIT_BLOCKS = 7
"""With as many the check's longest sequence is just long enough to be split: the interpreter needs 10 ms a token."""


def attention_of(
    model: DecoderModel, windows: tuple[int | None, ...] = (None, None), num_blocks: int = 12
) -> TritonAttention:
    config = model.config
    shape = KVCacheShape(config.num_heads, config.num_kv_heads, config.head_dim, windows, BLOCK_SIZE, torch.float32)
    backend = TritonAttention(shape, num_blocks, CPU)
    for cache in backend.caches:
        cache.zero_()
        cache[0] = torch.nan  # the null block: never read
    return backend


@torch.inference_mode()
def plain(model: DecoderModel, attention: TritonAttention, step: StepInput) -> torch.Tensor:
    positions = torch.from_numpy(step.positions)
    return model.forward(torch.from_numpy(step.token_ids), positions, attention.prepare(step))


def test_sizes_are_few_and_hold_every_batch() -> None:
    assert capture_sizes(1) == [1]
    assert capture_sizes(3) == [1, 2, 4]
    assert capture_sizes(8) == [1, 2, 4, 8]
    assert capture_sizes(9) == [1, 2, 4, 8, 16]
    assert capture_sizes(256) == [1, 2, 4, *range(8, 257, 8)]


@torch.inference_mode()
def test_a_batch_gets_what_it_gets_without_a_graph_whatever_ran_before(model: DecoderModel) -> None:
    attention, recorder = attention_of(model), Recorder()
    graphs = DecodeGraphs(model, attention, DecodeBuffers(attention, 4, 16), [1, 2, 4], recorder)
    assert recorder.sizes == [4, 2, 1]  # the largest first
    other = attention_of(model)
    steps = [
        ([5, 6, 7, 8], [(0, [3]), (0, [5]), (0, [1]), (0, [9])]),
        ([9, 4, 3], [(1, [3]), (1, [1]), (1, [5])]),
        ([2], [(2, [1])]),
        ([8, 1], [(16, [3, 7]), (2, [5])]),
    ]
    for tokens, places in steps:
        step = StepInput.of([(start, 1, table) for start, table in places], tokens)
        assert graphs.takes(step)
        torch.testing.assert_close(graphs.run(step), plain(model, other, step))
        for mine, theirs in zip(attention.caches, other.caches, strict=True):
            torch.testing.assert_close(mine, theirs, equal_nan=True)


@torch.inference_mode()
def test_a_graph_reads_the_tokens_that_only_the_device_knows(model: DecoderModel) -> None:
    attention, other = attention_of(model), attention_of(model)
    graphs = DecodeGraphs(model, attention, DecodeBuffers(attention, 4, 16), [4], Recorder())
    runs = [(0, 1, [block]) for block in (3, 5, 1)]
    drawn = torch.tensor([8, 5, -1])
    pending = PendingTokens(np.array([0, 2]), np.array([1, 0]), drawn)
    step = replace(StepInput.of(runs, [0, 6, 0]), pending=pending)
    torch.testing.assert_close(graphs.run(step), plain(model, other, StepInput.of(runs, [5, 6, 8])))
    step = replace(StepInput.of(runs, [5, 0, 8]), pending=PendingTokens(np.array([1]), np.array([2]), drawn))
    torch.testing.assert_close(graphs.run(step), plain(model, other, StepInput.of(runs, [5, 0, 8])))


def test_steps_with_chunks_and_too_many_sequences_are_not_taken(model: DecoderModel) -> None:
    attention = attention_of(model)
    graphs = DecodeGraphs(model, attention, DecodeBuffers(attention, 2, 16), [1, 2], Recorder())
    assert not graphs.takes(StepInput.of([(0, 2, [1])]))
    assert not graphs.takes(StepInput.of([(0, 1, [1])] * 3))


def step_graphs(model: DecoderModel, attention: TritonAttention, capture: Any) -> StepGraphs:
    decode = DecodeGraphs(model, attention, DecodeBuffers(attention, 2, 5), [1, 2], capture)
    return StepGraphs(model, attention, decode, capture, MixedGraphs(model, attention, [64], capture))


@pytest.mark.parametrize("forgets", ["nothing", "decodes", "chunks"])
@torch.inference_mode()
def test_a_graph_that_does_something_else_is_found_out(model: DecoderModel, forgets: str) -> None:
    attention, right = attention_of(model, num_blocks=SPLIT_BLOCKS), Recorder()

    def capture(work: Callable[[], torch.Tensor]) -> tuple[Replay, torch.Tensor]:
        replay, output = right(work)
        is_decode = len(output) <= 2
        return (lambda: None) if forgets == ("decodes" if is_decode else "chunks") else replay, output

    problem = step_graphs(model, attention, capture).why_wrong(len(attention.caches[0]), 2)
    assert problem is None if forgets == "nothing" else problem is not None and "differs by" in problem


def with_adapters(folder: Path) -> tuple[DecoderModel, AdapterSlots]:
    """A model with three empty slots."""
    write_tiny_model(folder, TinyModelSpec(layers=2, hidden_size=32, heads=4, kv_heads=2, vocab_size=512))
    model = Checkpoint.open(folder).load(torch.float32, CPU)
    slots = AdapterSlots(Adaptables.of(model), 3, 8, torch.float32, CPU, with_experts=False)
    slots.install(model)
    return model, slots


@torch.inference_mode()
def test_rows_of_a_graph_have_the_adapters_that_they_have_without_it(tmp_path: Path) -> None:
    model, adapters = with_adapters(tmp_path)
    attention, other = attention_of(model, num_blocks=SPLIT_BLOCKS), attention_of(model)
    graphs = step_graphs(model, attention, Recorder())
    without = StepInput.of([(0, 1, [3]), (0, 1, [5])], [5, 6])
    assert not graphs.takes(replace(without, adapter_slots=np.array([-1, 0])))
    graphs.adapt(adapters)
    random = torch.Generator().manual_seed(0)
    for slot, rank, parts in ((0, 8, ("q_proj", "v_proj", "down_proj")), (2, 3, ("k_proj", "gate_proj", "o_proj"))):
        modules = {
            name: LowRank(*(torch.randn(*size, generator=random) / 8 for size in ((rank, inputs), (outputs, rank))))
            for name, (outputs, inputs) in adapters.modules.items()
            if name.endswith(parts)
        }
        adapters.put(slot, adapters.pack(modules))
    attention.caches[0].zero_()
    for slots in ([-1, 0], [0, 2], [2, -1], [2, 2]):
        step = replace(without, adapter_slots=np.array(slots))
        assert graphs.takes(step)
        rows = [SlotRows(slot, slice(row, row + 1)) for row, slot in enumerate(slots) if slot >= 0]
        with adapters.applied(rows):
            expected = plain(model, other, step)
        torch.testing.assert_close(graphs.run(step), expected)
        assert not torch.allclose(expected, plain(model, other, without), rtol=0.1)
        torch.testing.assert_close(graphs.run(without), plain(model, other, without))
    adapters.put(2, adapters.pack({}))
    torch.testing.assert_close(graphs.run(step), plain(model, other, without))


def test_adapters_of_experts_and_of_many_ranks_have_no_graphs() -> None:
    assert can_apply_by_row(4, 64, with_experts=False)
    assert not can_apply_by_row(5, 64, with_experts=False)
    assert not can_apply_by_row(4, 8, with_experts=True)


@torch.inference_mode()
def test_graphs_with_adapters_that_do_something_else_are_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, adapters = with_adapters(tmp_path)
    attention, right, forgets = attention_of(model, num_blocks=SPLIT_BLOCKS), Recorder(), False

    def capture(work: Callable[[], torch.Tensor]) -> tuple[Replay, torch.Tensor]:
        replay, output = right(work)
        return (lambda: None) if forgets else replay, output

    graphs = step_graphs(model, attention, capture)
    forgets = True
    graphs.adapt(adapters)
    step = StepInput.of([(0, 1, [3])], [5])
    assert graphs.takes(step)
    assert not graphs.takes(replace(step, adapter_slots=np.array([0])))
    assert "launched kernel by kernel, more slowly: a graph of 1 sequences differs" in caplog.text


@torch.inference_mode()
def test_a_mixed_step_gets_what_it_gets_without_graphs(model: DecoderModel) -> None:
    attention, other, recorder = attention_of(model), attention_of(model), Recorder()
    graphs = MixedGraphs(model, attention, [16, 64], recorder)
    layers = len(model.layers)
    assert recorder.sizes == [64] * (layers + 1) + [16] * (layers + 1)
    drawn = torch.tensor([8, 5])
    steps = [
        StepInput.of([(0, 20, [3, 4]), (0, 1, [5])], range(21)),
        replace(
            StepInput.of([(20, 1, [3, 4]), (0, 9, [7]), (1, 1, [5])], [0, *range(9), 0]),
            pending=PendingTokens(np.array([0, 10]), np.array([1, 0]), drawn),
        ),
    ]
    known = [steps[0], StepInput.of([(20, 1, [3, 4]), (0, 9, [7]), (1, 1, [5])], [5, *range(9), 8])]
    for step, same in zip(steps, known, strict=True):
        assert graphs.takes(step)
        torch.testing.assert_close(graphs.run(step), plain(model, other, same))
    assert not graphs.takes(StepInput.of([(0, 65, [1, 2, 3, 4, 5])]))


@torch.inference_mode()
def test_a_layer_of_a_mixed_step_is_at_most_five_launches(model: DecoderModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph, and four kernels of attention, or three where no sequence is split."""
    attention, launches = attention_of(model), list[str]()

    def capture(work: Callable[[], torch.Tensor]) -> tuple[Replay, torch.Tensor]:
        return lambda: launches.append("graph"), work()

    graphs = MixedGraphs(model, attention, [64], capture)
    run = InterpretedFunction.run

    def counting(kernel: Any, *arguments: Any, **settings: Any) -> Any:
        launches.append(kernel.fn.__name__)
        return run(kernel, *arguments, **settings)

    monkeypatch.setattr(InterpretedFunction, "run", counting)
    graphs.run(StepInput.of([(0, 20, [3, 4]), (0, 1, [5])], range(21)))
    layer = ["_rotate_and_store", "_decode", "_prefill", "graph"]
    assert launches == ["graph", *layer * len(model.layers)]
    launches.clear()
    graphs.run(StepInput.of([(0, 20, [6, 7]), (70, 1, [*range(1, 6)])], range(21)))
    assert launches == ["graph", *[*layer[:2], "_combine", *layer[2:]] * len(model.layers)]


@torch.inference_mode()
def test_a_graph_splits_the_sequences_that_are_long_now(model: DecoderModel) -> None:
    attention, other = attention_of(model), attention_of(model)
    graphs = DecodeGraphs(model, attention, DecodeBuffers(attention, 2, 16), [2], Recorder())
    table = [*range(1, 6)]
    prompt = StepInput.of([(0, 70, table)], range(70))
    plain(model, attention, prompt)
    plain(model, other, prompt)
    for step in (
        StepInput.of([(70, 1, table), (0, 1, [11])], [7, 8]),
        StepInput.of([(1, 1, [11]), (71, 1, table)], [5, 6]),
    ):
        torch.testing.assert_close(graphs.run(step), plain(model, other, step))
        decodes = graphs.buffers.step(2).decodes
        assert decodes.work[None].firsts.tolist() in ([0, 2, 3], [0, 1, 3])


@torch.inference_mode()
def test_groups_of_layers_have_tables_of_their_own(model: DecoderModel) -> None:
    """The second layer sees 20 tokens; what is behind them is given back."""
    other = attention_of(model, windows=(None, 20))
    attention = by_group(other.shape, lambda of_group: attention_of(model, of_group.windows))
    capture = Recorder()
    decodes = DecodeGraphs(model, attention, DecodeBuffers(attention, 2, 16), [2], capture)
    graphs = StepGraphs(model, attention, decodes, capture, MixedGraphs(model, attention, [64], capture))
    steps = [(0, 40, [1, 2, 3], [4, 5, 6]), (40, 9, [1, 2, 3, 7], [0, 5, 6, 8]), (49, 1, [1, 2, 3, 7], [0, 5, 6, 8])]
    for start, count, full, sliding in steps:
        same = StepInput.of([(start, count, full)], range(count))
        step = replace(same, more_tables=[[sliding]])
        torch.testing.assert_close(graphs.run(step), plain(model, other, same))


@torch.inference_mode()
def test_layers_that_see_chunks_have_lengths_of_their_own(model: DecoderModel) -> None:
    """And a table for each chunk of a prompt, which may be more than the sequences of the largest graph."""
    shape = replace(attention_of(model, windows=(None, 32)).shape, in_chunks=True)
    attention, other = (by_group(shape, lambda of_group: attention_of(model, of_group.windows)) for _ in range(2))
    graphs = DecodeGraphs(model, attention, DecodeBuffers(attention, 1, 16), [1], Recorder())
    full, sliding = [1, 2, 3, 4, 5], [6, 7, 8, 9, 10]
    for start, count in ((0, 62), *((start, 1) for start in range(62, 67))):
        step = replace(StepInput.of([(start, count, full)], range(count)), more_tables=[[sliding]])
        expected = plain(model, other, step)
        torch.testing.assert_close(graphs.run(step) if count == 1 else plain(model, attention, step), expected)


def test_the_first_graph_takes_the_memory_that_the_others_share() -> None:
    assert graph_bytes(largest=1000, another=10, num_graphs=35) == 1340
    assert graph_bytes(largest=1000, another=1000, num_graphs=1) == 1000


def test_what_is_captured_has_run_before_on_the_same_stream_whichever_graph_it_is() -> None:
    """What a library makes when it first runs, and keeps for each stream, is neither captured nor made twice."""
    with late_device() as device:
        main, capture = device.current, CudaCapture()
        numbers, ran = torch.ones(1, device=CUDA), list[tuple[Stream, bool]]()

        def work() -> torch.Tensor:
            ran.append((device.current, device.is_capturing))
            return numbers.add_(1)

        for _ in range(2):
            replay, output = capture(work)
            numbers.mul_(3)  # on the stream that replays
            replay()
            assert output is numbers
        side = ran[0][0]
        assert ran == [(side, False), (side, True)] * 2
        assert side is not main
        assert numbers.tolist() == [((1 + 1) * 3 + 1 + 1) * 3 + 1]


@torch.inference_mode()
def test_the_check_keeps_the_keys_of_two_kinds_of_heads_apart(tmp_path: Path) -> None:
    """A model of transformers' code, whose layers without a window have fewer and larger heads."""
    save(OTHERS["gemma4-moe, fewer keys in layers without a window"], tmp_path)
    model = Checkpoint.open(tmp_path, "transformers").load(torch.float32, CPU)
    shape = KVCacheShape.of(model.config, BLOCK_SIZE, torch.float32)
    attention = by_group(shape, lambda of_group: TritonAttention(of_group, 12, CPU))
    graphs = DecodeGraphs(model, attention, DecodeBuffers(attention, 2, 5), [1, 2], Recorder())
    assert StepGraphs(model, attention, graphs, Recorder()).why_wrong(12, 2) is None
