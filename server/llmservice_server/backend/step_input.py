"""What the device computes in one step."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from llmservice_server.backend.transfer import to_device

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """Tokens of a step that the previous step samples: only the device has them when the step is launched."""

    positions: Int64Array  # in the step's tokens
    rows: Int64Array  # in the sampled tokens
    sampled: torch.Tensor  # [num_rows], on the device

    def put(self, token_ids: torch.Tensor) -> None:
        """Write them to the step's `token_ids` `[num_tokens]`, on the device."""
        positions, rows = to_device(np.stack((self.positions, self.rows)), token_ids.device).unbind()
        known = self.sampled.index_select(0, rows).clamp_min(0)  # -1: the request will end with an error
        token_ids.index_copy_(0, positions, known.to(token_ids.dtype))


@dataclass(frozen=True, eq=False)
class StepInput:
    """What the device computes in one step: runs of tokens of several sequences, concatenated.

    Run `i` is the tokens [starts[i], starts[i] + counts[i]) of its sequence; all earlier ones are in the cache. Arrays
    of all sequences, not objects of each, because this is built for every sequence of every step.
    """

    token_ids: Int64Array  # [num_tokens]
    starts: Int64Array  # [num_seqs]
    counts: Int64Array  # [num_seqs]
    block_tables: Sequence[Sequence[int]]  # [num_seqs]: token `j` is in block `table[j // block_size]`; array("i")
    pending: PendingTokens | None = None
    more_tables: Sequence[Sequence[Sequence[int]]] = ()  # of each further group of layers; none: they share the first's
    adapter_slots: Int64Array | None = None  # [num_tokens]: of the adapter of each, -1: none; None: no token has one

    @classmethod
    def of(cls, runs: Iterable[tuple[int, int, Sequence[int]]], token_ids: Sequence[int] | None = None) -> Self:
        """runs: start, number of tokens and block table of each. Without `token_ids` all are 0."""
        starts, counts, tables = zip(*runs, strict=True)
        ids = np.zeros(sum(counts), np.int64) if token_ids is None else np.array(token_ids, np.int64)
        return cls(ids, np.array(starts, np.int64), np.array(counts, np.int64), tables)

    def __len__(self) -> int:
        """The number of sequences."""
        return len(self.block_tables)

    @cached_property
    def is_decode(self) -> bool:
        """Whether every run is a single token."""
        return len(self.token_ids) == len(self.block_tables)

    @cached_property
    def rows(self) -> Int64Array:
        """`[num_seqs]`: the index of each run's first token."""
        return firsts_of(self.counts)

    @cached_property
    def blocks(self) -> Int32Array:
        """The block tables, concatenated."""
        return joined(self.block_tables)

    @cached_property
    def table_firsts(self) -> Int64Array:
        """`[num_seqs]`: the index of each table's first entry in `blocks`."""
        return firsts_of(np.fromiter(map(len, self.block_tables), np.int64, len(self.block_tables)))

    @property
    def positions(self) -> Int64Array:
        """`[num_tokens]`: each token's position in its sequence."""
        return self.starts if self.is_decode else positions_of(self.starts, self.counts)[1]

    def slots(self, block_size: int) -> Int64Array:
        """`[num_tokens]`: each token's slot in the cache, `block * block_size + offset`."""
        first_blocks, positions = self.table_firsts, self.starts
        if not self.is_decode:
            run, positions = positions_of(self.starts, self.counts)
            first_blocks = first_blocks[run]
        blocks = self.blocks[first_blocks + positions // block_size].astype(np.int64)
        slots: Int64Array = blocks * block_size + positions % block_size
        return slots


def joined(tables: Sequence[Sequence[int]]) -> Int32Array:
    """The block tables, concatenated."""
    return np.frombuffer(b"".join([each if isinstance(each, array) else array("i", each) for each in tables]), np.int32)


def firsts_of(counts: Int64Array) -> Int64Array:
    """The index of the first item of each of several concatenated runs of `counts` items."""
    return np.cumsum(counts) - counts


def positions_of(starts: Int64Array, counts: Int64Array) -> tuple[Int64Array, Int64Array]:
    """The run and the position of each token of the concatenated runs [start, start + count)."""
    run = np.repeat(np.arange(len(counts)), counts)
    return run, np.arange(len(run)) + (starts - firsts_of(counts))[run]
