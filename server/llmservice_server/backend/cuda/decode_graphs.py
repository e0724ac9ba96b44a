"""Decode steps as CUDA graphs: the same kernels on the same memory in each step, launched together.

Graphs are captured for a few batch sizes; a step uses the next larger one, whose padding rows belong to the null block:
no key is read or stored for them. Everything that differs from step to step is a number in a static buffer, so nothing
in a graph may depend on the lengths of a step's sequences. Sampling is not captured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from llmservice_server.backend.base import Decoder, Int32Array, StepInput
from llmservice_server.backend.cuda.attention import TritonAttention, padded_tables, table_width
from llmservice_server.backend.torch.memory import cuda_free_bytes

_LOG = logging.getLogger(__name__)

Replay = Callable[[], None]
Capture = Callable[[Callable[[], torch.Tensor]], tuple[Replay, torch.Tensor]]
"""Records work; returns a function that repeats it, and the tensor with the result of each repetition."""
_TOLERANCE = 5e-2
"""Other batch sizes may use other matrix products, whose rounding errors grow over many layers of bfloat16; a single
wrong row of hundreds exceeds this as well."""


def capture_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, then multiples of 8, up to the first that is at least `max_num_seqs`."""
    sizes = [1, 2, 4, *range(8, max_num_seqs + 8, 8)]
    enough = next(place for place, size in enumerate(sizes) if size >= max_num_seqs)
    return sizes[: enough + 1]


class DecodeBuffers:
    """The static tensors that a graph reads: int32, one row for each sequence.

    `block_table_width`: the maximum number of blocks of a sequence.
    """

    def __init__(self, max_num_seqs: int, block_table_width: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        pinned = device.type == "cuda"
        self._host = torch.zeros((4, max_num_seqs), dtype=torch.int32, pin_memory=pinned)
        self._host_tables = torch.zeros(max_num_seqs * block_table_width, dtype=torch.int32, pin_memory=pinned)
        self._copied: torch.cuda.Event | None = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]
        self._device = self._host.to(device)
        self.token_ids, self.positions, self.slots, self.lengths = self._device.unbind()
        self._moved_tables = self._host_tables.to(device)
        self.tables = torch.zeros((max_num_seqs, block_table_width), dtype=torch.int32, device=device)
        self.rows = torch.arange(max_num_seqs, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        return self._device.nbytes + self._moved_tables.nbytes + self.tables.nbytes + self.rows.nbytes

    def fill(self, step: StepInput | None, size: int) -> None:
        """Write one token of each sequence to the first rows, and the null block to the others up to `size`.

        Only as many columns of the tables are written as the step's longest sequence has. The others are of earlier
        steps, and no kernel reads a table beyond the sequence's length.
        """
        if self._copied is not None:
            self._copied.synchronize()  # the last step's copies read the host's memory; they have usually finished
        count = 0 if step is None else len(step)
        numbers = self._host.numpy()
        numbers[:, count:size] = 0
        if step is not None:
            numbers[0, :count] = step.token_ids
            numbers[1, :count] = step.starts
            numbers[2, :count] = step.slots(self.block_size)
            numbers[3, :count] = step.starts + 1
            self._fill_tables(padded_tables(step)[:, : self.tables.shape[1]])
        self._device.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def _fill_tables(self, tables: Int32Array) -> None:
        """In one contiguous copy, which the device writes to the rows of the wider matrix."""
        count, width = tables.shape
        used = slice(tables.size)
        self._host_tables.numpy()[used] = tables.ravel()
        self._moved_tables[used].copy_(self._host_tables[used], non_blocking=True)
        self.tables[:count, :width].copy_(self._moved_tables[used].view(count, width))


class DecodeGraphs:
    """Implements `DecodePath`: a model's decode step, captured for `sizes`.

    The largest is captured first, so that the others reuse its memory.
    """

    def __init__(
        self,
        model: Decoder,
        attention: TritonAttention,
        buffers: DecodeBuffers,
        sizes: Sequence[int],
        capture: Capture,
    ) -> None:
        self._model = model
        self._attention = attention
        self.buffers = buffers
        self._graphs: dict[int, tuple[Replay, torch.Tensor]] = {}
        for size in sorted(sizes, reverse=True):
            buffers.fill(None, size)
            self._graphs[size] = capture(lambda size=size: self.forward(size))  # type: ignore[misc]
        self._sizes = sorted(sizes)

    def takes(self, step: StepInput) -> bool:
        return step.is_decode and len(step) <= self._sizes[-1]

    def run(self, step: StepInput) -> torch.Tensor:
        size = next(size for size in self._sizes if size >= len(step))
        self.buffers.fill(step, size)
        if step.pending is not None:
            step.pending.put(self.buffers.token_ids)
        replay, hidden = self._graphs[size]
        replay()
        return hidden[: len(step)]

    def forward(self, size: int) -> torch.Tensor:
        """The work that is captured: the model on the first `size` rows of the buffers."""
        buffers = self.buffers
        decodes = self._attention.decodes(buffers.rows[:size], buffers.lengths[:size], buffers.tables[:size])
        step = self._attention.step(buffers.slots[:size], decodes, None)
        return self._model.forward(buffers.token_ids[:size], buffers.positions[:size], step)

    def why_wrong(self, blocks: Sequence[int]) -> str | None:
        """Compare graphs with the model run without them, for a sequence in each of `blocks` and for one sequence.

        None if they agree. Writes to the blocks.
        """
        for count in {1, len(blocks)}:
            step = StepInput.of([(0, 1, [block]) for block in blocks[:count]], range(count))
            replayed = self.run(step).float().clone()
            plain = self._model.forward(
                torch.from_numpy(step.token_ids).to(self._model.device),
                torch.from_numpy(step.positions).to(self._model.device),
                self._attention.prepare(step),
            ).float()
            error = float((replayed - plain).norm() / plain.norm())
            if not error <= _TOLERANCE:
                return f"a graph of {count} sequences differs by {error:.2g} from the same step without it"
        return None


class CudaCapture:
    """Implements `Capture`; all graphs share one pool of memory.

    What cannot be captured (cuBLAS's workspace, Triton's compiler) is done by a first run, on the same stream: cuBLAS
    allocates a workspace of tens of megabytes for each stream and never frees it.
    """

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, work: Callable[[], torch.Tensor]) -> tuple[Replay, torch.Tensor]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            answer = work()
        return graph.replay, answer


def graph_bytes(largest: int, another: int, num_graphs: int) -> int:
    """The memory of all graphs, from that of the first, the largest, and what the next one added."""
    return largest + another * (num_graphs - 1)


@torch.inference_mode()
def predict_graph_bytes(model: Decoder, attention: TritonAttention, max_num_seqs: int, max_model_len: int) -> int:
    """Capture the two largest graphs on a cache of any size, and measure and free them."""
    sizes = capture_sizes(max_num_seqs)
    attention.max_length = max_model_len
    buffers = _buffers(attention, sizes[-1], max_model_len)
    capture = CudaCapture()
    kept, taken = [], []
    for size in sizes[:-3:-1]:
        before = cuda_free_bytes(model.device)
        kept.append(DecodeGraphs(model, attention, buffers, [size], capture))
        taken.append(before - cuda_free_bytes(model.device))
    return buffers.nbytes + graph_bytes(taken[0], max(0, taken[-1]), len(sizes))


@torch.inference_mode()
def capture_graphs(
    model: Decoder, attention: TritonAttention, max_num_seqs: int, max_model_len: int
) -> DecodeGraphs | str:
    """All graphs, compared with the same steps without them; a phrase that says why if they cannot be used.

    Writes to the blocks from 1 on, so nothing may be cached yet.
    """
    sizes = capture_sizes(max_num_seqs)
    attention.max_length = max_model_len
    try:
        graphs = DecodeGraphs(model, attention, _buffers(attention, sizes[-1], max_model_len), sizes, CudaCapture())
        num_blocks = len(attention.caches[0])
        problem = graphs.why_wrong(range(1, min(max_num_seqs, num_blocks - 1) + 1))
    except RuntimeError as error:  # torch's type for CUDA's errors; out of memory is one of them
        return str(error).splitlines()[0]
    if problem is not None:
        return problem
    _LOG.info("captured %d CUDA graphs for 1 to %d sequences", len(sizes), sizes[-1])
    return graphs


def _buffers(attention: TritonAttention, max_num_seqs: int, max_model_len: int) -> DecodeBuffers:
    block_size = attention.shape.block_size
    return DecodeBuffers(max_num_seqs, table_width(-(-max_model_len // block_size)), block_size, attention.device)
