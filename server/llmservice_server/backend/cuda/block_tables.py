"""The block tables of sequences on the device, so that a step sends only what is new in them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from llmservice_server.backend.step_input import Int32Array, Int64Array
from llmservice_server.backend.transfer import tables_to_device

_WIDTH_STEP = 16  # blocks: Triton compiles other kernels for strides that are not multiples of 16


class BlockTables:
    """A row of `matrix` `[num_rows, width]` (int32) for each table that was in a recent step.

    A table may grow between steps; one that changes otherwise has to be another object (`Request.block_table`). What a
    row has beyond its table is of earlier ones, and no kernel reads it.
    """

    def __init__(self, device: torch.device) -> None:
        self.matrix = torch.zeros((0, _WIDTH_STEP), dtype=torch.int32, device=device)
        self._captured = False
        self._forget()

    @property
    def capacity(self) -> int:
        """Blocks of a table, at most, without another matrix."""
        return self.matrix.shape[1]

    def has_room(self, num_tables: int) -> bool:
        """For so many tables in a step, where graphs read the matrix."""
        return not self._captured or num_tables <= len(self.matrix)

    def reserve(self, num_tables: int, num_blocks: int) -> None:
        """Make room for so many tables in a step, each of so many blocks, for good: graphs may read the matrix.

        Raises RuntimeError where they do already and it is too small.
        """
        num_rows, width = self.matrix.shape
        if num_tables <= num_rows and num_blocks <= width:
            return
        if self._captured:
            raise RuntimeError(f"{num_tables} tables of {num_blocks} blocks exceed the {num_rows} of {width} captured")
        width = max(width, -(-num_blocks // _WIDTH_STEP) * _WIDTH_STEP)
        self.matrix = self.matrix.new_zeros((max(num_rows, num_tables), width))
        self._forget()

    def capture(self) -> None:
        """Keep the matrix where it is from now on."""
        self._captured = True

    def update(self, tables: Sequence[Sequence[int]]) -> Int32Array:
        """The rows of a step's tables, brought up to date in the order of the device's work."""
        lengths = np.fromiter(map(len, tables), np.int64, len(tables))
        self.reserve(len(tables), int(lengths.max(initial=0)))
        rows = self._rows_of(tables)
        grown = np.flatnonzero(lengths > self._sent[rows])
        if len(grown):
            self._send([(int(rows[place]), tables[place]) for place in grown.tolist()])
        return rows.astype(np.int32)

    def _forget(self) -> None:
        self._row_of: dict[int, int] = {}  # by the table's id, which nothing else has while the table is kept
        self._kept: list[Sequence[int]] = [()] * len(self.matrix)
        self._sent = np.zeros(len(self.matrix), np.int64)  # blocks of each row that are on the device
        self._free = list(range(len(self.matrix)))[::-1]
        self._last: tuple[list[int], Int64Array] = [], np.zeros(0, np.int64)

    def _rows_of(self, tables: Sequence[Sequence[int]]) -> Int64Array:
        keys = [id(table) for table in tables]
        if keys == self._last[0]:
            return self._last[1]
        for key, table in zip(keys, tables, strict=True):
            if key not in self._row_of:
                self._row_of[key] = row = self._free_row(keys)
                self._kept[row], self._sent[row] = table, 0
        rows = np.fromiter((self._row_of[key] for key in keys), np.int64, len(keys))
        self._last = keys, rows
        return rows

    def _free_row(self, keys: list[int]) -> int:
        if not self._free:
            needed = set(keys)
            for key in [key for key in self._row_of if key not in needed]:
                self._free.append(self._row_of.pop(key))
        return self._free.pop()

    def _send(self, grown: list[tuple[int, Sequence[int]]]) -> None:
        width = self.matrix.shape[1]
        places, blocks = [], []
        for row, table in grown:
            first = int(self._sent[row])
            places.append(np.arange(first, len(table)) + row * width)
            blocks.append(np.array(table[first:], np.int32))
        at, values = tables_to_device(
            [np.concatenate(places).astype(np.int32), np.concatenate(blocks)], self.matrix.device
        )
        self.matrix.view(-1).index_copy_(0, at.long(), values)
        for row, table in grown:
            self._sent[row] = len(table)
