"""Decode steps as CUDA graphs: the same kernels on the same memory every time, launched as one.

A graph is captured for a few batch sizes; a step takes the next larger one, and its surplus rows belong to the null
block: no key is read for them, none is stored. Everything that differs from step to step is a number in a static
buffer, so nothing in a graph may depend on the lengths of the sequences at hand. Sampling stays outside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from llmservice_server.attention.base import Int32Array, Int64Array, SequenceSlice, slots_of
from llmservice_server.attention.slice_columns import SliceColumns
from llmservice_server.attention.step_tables import padded_tables
from llmservice_server.attention.triton_backend import TritonAttention
from llmservice_server.engine.step_in_flight import LateTokens
from llmservice_server.models.llama import LlamaModel

Replay = Callable[[], None]
Capture = Callable[[Callable[[], torch.Tensor]], tuple[Replay, torch.Tensor]]
"""Records work and returns what repeats it, and the tensor that holds the work's answer after each repetition."""

_AGREEMENT = 5e-2
"""Other batch sizes may take other matrix products, whose rounding many layers of bfloat16 enlarge; a single row that
is wrong, of hundreds, shows all the same."""


def capture_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, then by 8, up to the first that holds `max_num_seqs`."""
    sizes = [1, 2, 4, *range(8, max_num_seqs + 8, 8)]
    enough = next(place for place, size in enumerate(sizes) if size >= max_num_seqs)
    return sizes[: enough + 1]


class DecodeBuffers:
    """The static tensors that a graph reads: one row for each sequence, int32.

    `block_table_width` is the most blocks that a sequence may have.
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

    def fill(self, token_ids: Sequence[int] | Int64Array, slices: Sequence[SequenceSlice], size: int) -> None:
        """Put one token of each sequence into the first rows, and the null block's into the others up to `size`.

        Of the tables only the columns are written that the step's longest sequence has. What stands behind them is of
        earlier steps, and no kernel reads it: a sequence's length says how much of its row is its own.
        """
        if self._copied is not None:
            self._copied.synchronize()  # the copies of the last step still read the host's side; they are long done
        count = len(slices)
        numbers = self._host.numpy()
        numbers[:, count:size] = 0
        if count:
            columns = SliceColumns.of(slices)
            starts, joined = columns.starts, columns.joined_tables
            numbers[0, :count] = token_ids
            numbers[1, :count] = starts
            numbers[2, :count] = slots_of(starts, np.ones_like(starts), joined, self.block_size)
            numbers[3, :count] = starts + 1
            self._fill_tables(padded_tables(joined)[:, : self.tables.shape[1]])
        self._device.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def _fill_tables(self, tables: Int32Array) -> None:
        """They go over end to end and are spread out there: rows of a wider matrix would be a copy each."""
        count, width = tables.shape
        used = slice(tables.size)
        self._host_tables.numpy()[used] = tables.ravel()
        self._moved_tables[used].copy_(self._host_tables[used], non_blocking=True)
        self.tables[:count, :width].copy_(self._moved_tables[used].view(count, width))


class DecodeGraphs:
    """A model's decode step, captured for `sizes`; the largest first, so that the others fit into its memory."""

    def __init__(
        self,
        model: LlamaModel,
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
            buffers.fill([], [], size)
            self._graphs[size] = capture(lambda size=size: self.forward(size))  # type: ignore[misc]
        self._sizes = sorted(sizes)

    def takes(self, slices: Sequence[SequenceSlice]) -> bool:
        """Whether a step is one of decodes only, and not too many."""
        return len(slices) <= self._sizes[-1] and bool((SliceColumns.of(slices).counts == 1).all())

    def run(
        self,
        token_ids: Sequence[int] | Int64Array,
        slices: Sequence[SequenceSlice],
        late: LateTokens | None = None,
    ) -> torch.Tensor:
        """`LlamaModel.forward`'s states, `[num_seqs, hidden_size]`; valid until the next run."""
        size = next(size for size in self._sizes if size >= len(slices))
        self.buffers.fill(token_ids, slices, size)
        if late is not None:
            late.put(self.buffers.token_ids)
        replay, hidden = self._graphs[size]
        replay()
        return hidden[: len(slices)]

    def forward(self, size: int) -> torch.Tensor:
        """The work that is captured: the model on the first `size` rows of the buffers."""
        buffers = self.buffers
        decodes = self._attention.decodes(buffers.rows[:size], buffers.lengths[:size], buffers.tables[:size])
        step = self._attention.step(buffers.slots[:size], decodes, None)
        return self._model.forward(buffers.token_ids[:size], buffers.positions[:size], step)

    def what_is_wrong(self, slices: Sequence[SequenceSlice]) -> str | None:
        """Compares graphs with the model run plainly on `slices`, and of fewer of them; None where they agree.

        Writes into the blocks of `slices`.
        """
        for count in {1, len(slices)}:
            token_ids = list(range(count))
            replayed = self.run(token_ids, slices[:count]).float().clone()
            plain = self._model.forward(
                torch.tensor(token_ids, device=self._model.device),
                torch.tensor([part.start for part in slices[:count]], device=self._model.device),
                self._attention.prepare(slices[:count]),
            ).float()
            off_by = float((replayed - plain).norm() / plain.norm())
            if not off_by <= _AGREEMENT:
                return f"a graph of {count} sequences is off by {off_by:.2g} from the same step without it"
        return None
