"""A step's slices, column by column: as they are made, and as whatever computes them wants to have them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from llmservice_server.attention.base import Int64Array, JoinedTables, SequenceSlice


@dataclass(frozen=True, slots=True, eq=False)
class SliceColumns(Sequence[SequenceSlice]):
    """One entry of each column per slice. A `SequenceSlice` is made only where somebody asks for one."""

    starts: Int64Array
    counts: Int64Array  # of tokens
    block_tables: Sequence[Sequence[int]]

    @classmethod
    def of(cls, slices: Sequence[SequenceSlice]) -> SliceColumns:
        if isinstance(slices, cls):
            return slices
        return cls(
            starts=np.array([part.start for part in slices], np.int64),
            counts=np.array([part.num_tokens for part in slices], np.int64),
            block_tables=[part.block_table for part in slices],
        )

    @property
    def joined_tables(self) -> JoinedTables:
        return JoinedTables.of(self.block_tables)

    def __len__(self) -> int:
        return len(self.block_tables)

    def __iter__(self) -> Iterator[SequenceSlice]:
        return map(SequenceSlice, self.starts.tolist(), self.counts.tolist(), self.block_tables)

    @overload
    def __getitem__(self, place: int) -> SequenceSlice: ...
    @overload
    def __getitem__(self, place: slice) -> SliceColumns: ...
    def __getitem__(self, place: int | slice) -> SequenceSlice | SliceColumns:
        if isinstance(place, slice):
            return SliceColumns(self.starts[place], self.counts[place], self.block_tables[place])
        return SequenceSlice(int(self.starts[place]), int(self.counts[place]), self.block_tables[place])
