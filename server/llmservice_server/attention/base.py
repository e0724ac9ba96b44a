"""What a model and the runner may ask of an attention backend."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol, TypeGuard, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt
import torch

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class KVCacheShape:
    """The paged KV cache of a model. A layer's window is None where a query sees every earlier token."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]  # one per layer
    block_size: int
    dtype: torch.dtype

    @property
    def bytes_per_block(self) -> int:
        """Keys and values of `block_size` tokens in every layer, and an fp8 cache's scale for each of them."""
        scale_bytes = 4 if self.dtype.itemsize == 1 else 0
        bytes_each = self.head_dim * self.dtype.itemsize + scale_bytes
        return len(self.windows) * self.block_size * 2 * self.num_kv_heads * bytes_each


class SequenceSlice(msgspec.Struct, frozen=True, gc=False):
    """The tokens [start, start + num_tokens) of one sequence; all earlier ones are in the cache already."""

    start: int
    num_tokens: int
    block_table: Sequence[int]  # token `i` lives in block `block_table[i // block_size]`; an array("i") is fastest


class Attend(Protocol):
    """One step's attention, handed to the model's forward pass."""

    def __call__(self, layer: int, query: torch.Tensor, key_value: torch.Tensor) -> torch.Tensor:
        """Store the tokens' keys and values, then attend causally, each sequence to itself.

        query: `[num_tokens, num_heads, head_dim]`, rotated. key_value: `[num_tokens, 2 * num_kv_heads, head_dim]`,
        the rotated keys before the values. Both may be views of one fused product. Returns `[num_tokens, num_heads *
        head_dim]`.
        """


@dataclass(frozen=True, slots=True)
class Rotation:
    """What a step's queries and keys go through before they meet."""

    cos: torch.Tensor  # [num_tokens, 1, head_dim]
    sin: torch.Tensor  # likewise, the first half negated
    qk_norm: tuple[torch.Tensor, float] | None  # weights [num_heads + num_kv_heads, head_dim] and epsilon


@runtime_checkable
class RotatingAttend(Attend, Protocol):
    """One that norms, rotates and stores in one pass."""

    def rotate_and_attend(self, layer: int, heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """`heads` `[num_tokens, num_heads + 2 * num_kv_heads, head_dim]`: the fused product as it comes; changed."""


def rotates(attend: Attend) -> TypeGuard[RotatingAttend]:
    """Whether it is a `RotatingAttend`. Known by its class: to look at its methods takes as long as a small product."""
    return _is_rotating(type(attend))


@cache
def _is_rotating(kind: type[Attend]) -> bool:
    return issubclass(kind, RotatingAttend)


class AttentionBackend(Protocol):
    """Owns the KV cache and prepares each step once for all layers."""

    caches: list[torch.Tensor]  # one a layer, and what belongs to them; `[num_blocks, ...]` each
    device: torch.device

    def prepare(self, slices: Sequence[SequenceSlice]) -> Attend:
        """`slices` in the order in which their tokens are laid end to end; every token has its block in the table."""


@dataclass(frozen=True, slots=True)
class JoinedTables:
    """Several sequences' block tables, one behind the other."""

    blocks: Int32Array
    firsts: Int64Array  # [num_seqs]: where each table begins

    @classmethod
    def of(cls, tables: Sequence[Sequence[int]]) -> JoinedTables:
        lengths = np.fromiter(map(len, tables), np.int64, len(tables))
        return cls(joined(tables), firsts_of(lengths))


def joined(tables: Sequence[Sequence[int]]) -> Int32Array:
    """Block tables, one behind the other."""
    return np.frombuffer(b"".join([each if isinstance(each, array) else array("i", each) for each in tables]), np.int32)


def firsts_of(counts: Int64Array) -> Int64Array:
    """Where each of several runs of `counts` things begins, when they are laid end to end."""
    return np.cumsum(counts) - counts


def positions_of(starts: Int64Array, counts: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Of each token of the runs [start, start + count), laid end to end: its run's number, and its position."""
    run = np.repeat(np.arange(len(counts)), counts)
    return run, np.arange(len(run)) + (starts - firsts_of(counts))[run]


def slots_of(starts: Int64Array, counts: Int64Array, tables: JoinedTables, block_size: int) -> Int64Array:
    """The cache slot of each token, `block * block_size + offset`, in the order in which they are laid end to end."""
    first_blocks, positions = tables.firsts, starts
    if not (counts == 1).all():
        run, positions = positions_of(starts, counts)
        first_blocks = first_blocks[run]
    blocks = tables.blocks[first_blocks + positions // block_size].astype(np.int64)
    slots: Int64Array = blocks * block_size + positions % block_size
    return slots
