"""Decode steps as CUDA graphs: the same kernels on the same memory in each step, launched together.

Graphs are captured for a few batch sizes; a step uses the next larger one, whose padding rows belong to the null block:
no key is read or stored for them. Everything that differs from step to step is a number in a static buffer, the list of
parts that long sequences are split into as well. Sampling is not captured. Steps with adapters (LoRA) have graphs of
their own, where a row's slot is such a number.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from llmservice_server.backend.base import Attend, Decoder, Model, RowAdapters
from llmservice_server.backend.cuda.attention import GraphAttention
from llmservice_server.backend.cuda.capture import Capture, CudaCapture, Replay
from llmservice_server.backend.cuda.mixed_graphs import MIXED_SIZES, MixedGraphs
from llmservice_server.backend.grouped import GroupedAttention
from llmservice_server.backend.step_input import StepInput
from llmservice_server.backend.torch.memory import cuda_free_bytes
from llmservice_server.types.errors import first_line

_LOG = logging.getLogger(__name__)

_TOLERANCE = 5e-2
"""Other batch sizes may use other matrix products, whose rounding errors grow over many layers of bfloat16; a single
wrong row of hundreds exceeds this as well."""
_CHECKED_TOKENS = 4608  # of the longest sequence: more than the window of most models that have one
_CHUNK = 512  # tokens of a step without graphs


def capture_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, then multiples of 8, up to the first that is at least `max_num_seqs`."""
    sizes = [1, 2, 4, *range(8, max_num_seqs + 8, 8)]
    enough = next(place for place, size in enumerate(sizes) if size >= max_num_seqs)
    return sizes[: enough + 1]


class DecodeBuffers:
    """The static int32 tensors that graphs of up to `max_num_seqs` sequences read, in one piece of memory.

    The tables of the sequences, of at most `max_num_blocks` blocks, are beside it: `BlockTables`.
    """

    def __init__(self, attention: GraphAttention, max_num_seqs: int, max_num_blocks: int) -> None:
        self._attention = attention
        sizes: list[tuple[int, ...]] = [(max_num_seqs,)] * 3
        self._num_parts = []  # of each part of the attention: of the memory
        for part in attention.parts:
            part.tables.reserve(max_num_seqs, max_num_blocks)
            items = (part.num_items(max_num_seqs), 4)
            own = [(max_num_seqs,), (max_num_seqs, 2), *([items, (max_num_seqs + 1,)] * len(part.windows))]
            self._num_parts.append(len(own))
            sizes += own
        self._memory = torch.zeros(sum(map(_aligned, sizes)), dtype=torch.int32, device=attention.device)
        self._parts = []
        first = 0
        for size in sizes:
            self._parts.append(self._memory[first : first + math.prod(size)].view(size))
            first += _aligned(size)
        self.token_ids, self.positions, self.adapter_slots, *_ = self._parts

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes + sum(part.tables.matrix.nbytes for part in self._attention.parts)

    def step(self, size: int) -> Attend:
        """The attention of a step of `size` sequences, which reads this memory."""
        steps, buffers = [], iter(self._parts[3:])
        for part, count in zip(self._attention.parts, self._num_parts, strict=True):
            slots, places, *work = islice(buffers, count)
            cut = [each[: size + 1] if each.dim() == 1 else each[: part.num_items(size)] for each in work]
            steps.append(part.step(slots[:size], part.decodes(places[:size], cut), None))
        return self._attention.joined(steps)

    def fill(self, step: StepInput | None, size: int) -> None:
        """Write one token of each sequence to the first rows, and the null block to the others up to `size`."""
        count = 0 if step is None else len(step)
        numbers = np.zeros((3, size), np.int64)
        numbers[2] = -1
        if step is not None:
            numbers[0, :count] = step.token_ids
            numbers[1, :count] = step.starts
            if step.adapter_slots is not None:
                numbers[2, :count] = step.adapter_slots
        filled: list[npt.NDArray[Any]] = [*numbers]
        inputs = [None] * len(self._num_parts) if step is None else self._attention.split(step)
        for part, each in zip(self._attention.parts, inputs, strict=True):
            slots, places, lengths = np.zeros(size, np.int64), np.zeros((size, 2), np.int32), np.zeros(size, np.int64)
            places[:, 0] = np.arange(size)
            if each is not None:
                slots[:count], lengths[:count] = each.slots(part.shape.block_size), each.starts + 1
                places[:count, 1] = part.tables.update(each.block_tables)
            filled += [slots, places, *part.work(lengths)]
        pinned = torch.empty_like(self._memory, device="cpu", pin_memory=self._memory.device.type == "cuda")
        host, first = pinned.numpy(), 0
        for target, values in zip(self._parts, filled, strict=True):
            host[first : first + values.size] = values.ravel()
            first += _aligned(target.shape)
        self._memory.copy_(pinned, non_blocking=True)  # torch reuses pinned memory only after the copy


def _aligned(size: Sequence[int]) -> int:
    """Numbers that an array takes, so that the next one begins at a multiple of 16 bytes."""
    return -(-math.prod(size) // 4) * 4


class DecodeGraphs:
    """A model's decode step, captured for `sizes`, with `adapters` or for steps without.

    The largest is captured first, so that the others reuse its memory.
    """

    def __init__(
        self,
        model: Model,
        attention: GraphAttention,
        buffers: DecodeBuffers,
        sizes: Sequence[int],
        capture: Capture,
        adapters: RowAdapters | None = None,
    ) -> None:
        self._model = model
        self._adapters = adapters
        self.buffers = buffers
        self._graphs: dict[int, tuple[Replay, torch.Tensor]] = {}
        for part in attention.parts:
            part.tables.capture()
        for size in sorted(sizes, reverse=True):
            buffers.fill(None, size)
            self._graphs[size] = capture(lambda size=size: self.forward(size))  # type: ignore[misc]
        self.sizes = sorted(sizes)

    def takes(self, step: StepInput) -> bool:
        is_adapted = step.adapter_slots is not None
        return step.is_decode and len(step) <= self.sizes[-1] and is_adapted == (self._adapters is not None)

    def run(self, step: StepInput) -> torch.Tensor:
        size = next(size for size in self.sizes if size >= len(step))
        self.buffers.fill(step, size)
        if step.pending is not None:
            step.pending.put(self.buffers.token_ids)
        replay, hidden = self._graphs[size]
        replay()
        return hidden[: len(step)]

    def forward(self, size: int) -> torch.Tensor:
        """The work that is captured: the model on the first `size` rows of the buffers."""
        buffers = self.buffers
        with nullcontext() if self._adapters is None else self._adapters.by_row(buffers.adapter_slots[:size]):
            return self._model.forward(buffers.token_ids[:size], buffers.positions[:size], buffers.step(size))


def graph_bytes(largest: int, another: int, num_graphs: int) -> int:
    """The memory of all graphs, from that of the first, the largest, and what the next one added."""
    return largest + another * (num_graphs - 1)


class StepGraphs:
    """Implements `DecodePath`: decode steps as one graph, others of few tokens as several, if the model has layers."""

    def __init__(
        self,
        model: Model,
        attention: GraphAttention,
        decodes: DecodeGraphs,
        capture: Capture,
        mixed: MixedGraphs | None = None,
    ) -> None:
        self._model = model
        self._attention = attention
        self._decodes = decodes
        self._capture = capture
        self._paths: list[DecodeGraphs | MixedGraphs] = [decodes, *([] if mixed is None else [mixed])]

    @torch.inference_mode()
    def adapt(self, adapters: RowAdapters) -> None:
        """Only decode steps; those with a longer piece of a prompt are launched kernel by kernel."""
        before, buffers, sizes = self._paths, self._decodes.buffers, self._decodes.sizes
        try:
            decodes = DecodeGraphs(self._model, self._attention, buffers, sizes, self._capture, adapters)
            self._paths = [*before, decodes]
            with adapters.trial():
                problem = self.why_wrong(len(self._attention.caches[0]), sizes[-1], adapters)
        except RuntimeError as error:  # as in `capture_graphs`
            problem = first_line(error)
        if problem is None:
            _LOG.info("captured CUDA graphs of 1 to %d decodes with adapters", sizes[-1])
        else:
            self._paths = before
            _LOG.warning("decodes with adapters are launched kernel by kernel, more slowly: %s", problem)

    def takes(self, step: StepInput) -> bool:
        return any(path.takes(step) for path in self._paths)

    def run(self, step: StepInput) -> torch.Tensor:
        return next(path for path in self._paths if path.takes(step)).run(step)

    def why_wrong(self, num_blocks: int, max_num_seqs: int, adapters: RowAdapters | None = None) -> str | None:
        """Compare steps with the model run without graphs: one sequence, as many as there may be, chunks among them.

        With `adapters` each token has another one, or none. One has many blocks, so that it is split and exceeds the
        windows of most models. None if all agree. Writes to the blocks from 1 on.
        """
        first, attention = self._attention.parts[0], self._attention
        groups = attention.num_groups if isinstance(attention, GroupedAttention) else 1
        each = (num_blocks - 1) // groups  # blocks of a group of layers, as two would overwrite each other's keys
        count = min(max_num_seqs, each)
        block_size = first.shape.block_size
        longest = min(_CHECKED_TOKENS, (each + 1 - count) * block_size, first.tables.capacity * block_size)
        long_table = range(1, 1 + -(-longest // block_size))
        others = [(0, 1, range(block, block + 1)) for block in range(1 + len(long_table), len(long_table) + count)]

        def step_of(runs: Sequence[tuple[int, int, range]]) -> StepInput:
            """With tokens that differ from their neighbours, and so do their keys."""
            tokens = 7 * np.arange(sum(number for _, number, _ in runs)) % self._model.config.vocab_size
            more = [
                [range(table.start + group * each, table.stop + group * each) for *_, table in runs]
                for group in range(1, groups)
            ]
            step = replace(StepInput.of(runs, tokens.tolist()), more_tables=more)
            if adapters is None:
                return step
            return replace(step, adapter_slots=np.arange(len(tokens)) % (adapters.num_slots + 1) - 1)

        for start in range(0, longest, _CHUNK):
            self._plain(step_of([(start, min(_CHUNK, longest - start), long_table)]), adapters)
        few = min(longest // 2, _CHUNK // 2)
        decode, chunk = (longest - 1, 1, long_table), (longest - few, few, long_table)
        for step in map(step_of, ([decode], [decode, *others], [chunk, *others[:8]])):
            if not self.takes(step):
                continue
            replayed, plain = self.run(step).float().clone(), self._plain(step, adapters).float()
            error = float((replayed - plain).norm() / plain.norm())
            if not error <= _TOLERANCE:
                return f"a graph of {len(step)} sequences differs by {error:.2g} from the same step without it"
        return None

    def _plain(self, step: StepInput, adapters: RowAdapters | None) -> torch.Tensor:
        def on_device(numbers: npt.NDArray[Any]) -> torch.Tensor:
            return torch.from_numpy(numbers).to(self._model.device)

        attend, slots = self._attention.prepare(step), step.adapter_slots
        with nullcontext() if adapters is None or slots is None else adapters.by_row(on_device(slots)):
            return self._model.forward(on_device(step.token_ids), on_device(step.positions), attend)


@torch.inference_mode()
def predict_graph_bytes(
    model: Model, attention: GraphAttention, max_num_seqs: int, max_model_len: int, *, adapts: bool
) -> int:
    """Capture the two largest graphs of each kind on a cache of any size, and measure and free them.

    Graphs of steps with adapters are counted like those without. Raises RuntimeError (torch's) where the model cannot
    be captured.
    """
    sizes = capture_sizes(max_num_seqs)
    buffers = _buffers(attention, sizes[-1], max_model_len)
    capture = CudaCapture()
    kept: list[object] = []
    taken = []
    for size in sizes[:-3:-1]:
        before = cuda_free_bytes(model.device)
        kept.append(DecodeGraphs(model, attention, buffers, [size], capture))
        taken.append(before - cuda_free_bytes(model.device))
    total = buffers.nbytes + graph_bytes(taken[0], max(0, taken[-1]), len(sizes)) * (2 if adapts else 1)
    if not isinstance(model, Decoder):
        return total
    mixed = []
    for size in MIXED_SIZES[:-3:-1]:
        before = cuda_free_bytes(model.device)
        kept.append(MixedGraphs(model, attention, [size], capture))
        mixed.append(before - cuda_free_bytes(model.device))
    return total + graph_bytes(mixed[0], max(0, mixed[-1]), len(MIXED_SIZES))


@torch.inference_mode()
def capture_graphs(model: Model, attention: GraphAttention, max_num_seqs: int, max_model_len: int) -> StepGraphs | str:
    """All graphs, compared with the same steps without them; a phrase that says why if they cannot be used.

    Writes to the blocks from 1 on, so nothing may be cached yet.
    """
    sizes = capture_sizes(max_num_seqs)
    try:
        capture = CudaCapture()
        decodes = DecodeGraphs(model, attention, _buffers(attention, sizes[-1], max_model_len), sizes, capture)
        mixed = MixedGraphs(model, attention, MIXED_SIZES, capture) if isinstance(model, Decoder) else None
        graphs = StepGraphs(model, attention, decodes, capture, mixed)
        problem = graphs.why_wrong(len(attention.caches[0]), max_num_seqs)
    except RuntimeError as error:  # torch's type for CUDA's errors; out of memory is one of them
        return first_line(error)
    if problem is not None:
        return problem
    others = "" if mixed is None else f", and of up to {MIXED_SIZES[-1]} tokens"
    _LOG.info("captured CUDA graphs of 1 to %d decodes%s", sizes[-1], others)
    return graphs


def _buffers(attention: GraphAttention, max_num_seqs: int, max_model_len: int) -> DecodeBuffers:
    return DecodeBuffers(attention, max_num_seqs, -(-max_model_len // attention.parts[0].shape.block_size))
