"""What a model and the runner may ask of an attention backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


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
        """Keys and values of `block_size` tokens in every layer."""
        return len(self.windows) * self.block_size * 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """The tokens [start, start + num_tokens) of one sequence; all earlier ones are in the cache already."""

    start: int
    num_tokens: int
    block_table: Sequence[int]  # token `i` lives in block `block_table[i // block_size]`


class Attend(Protocol):
    """One step's attention, handed to the model's forward pass."""

    def __call__(self, layer: int, query: torch.Tensor, key_value: torch.Tensor) -> torch.Tensor:
        """Store the tokens' keys and values, then attend causally, each sequence to itself.

        query: `[num_tokens, num_heads, head_dim]`, rotated. key_value: `[num_tokens, 2 * num_kv_heads, head_dim]`,
        the rotated keys before the values. Both may be views of one fused product. Returns `[num_tokens, num_heads *
        head_dim]`.
        """


class AttentionBackend(Protocol):
    """Owns the KV cache and prepares each step once for all layers."""

    caches: list[torch.Tensor]  # one a layer, `[num_blocks, ...]`
    device: torch.device

    def prepare(self, slices: Sequence[SequenceSlice]) -> Attend:
        """`slices` in the order in which their tokens are laid end to end; every token has its block in the table."""


def slots_of(slices: Sequence[SequenceSlice], block_size: int) -> list[int]:
    """The cache slot of each token, `block * block_size + offset`, in the order in which they are laid end to end."""
    slots: list[int] = []
    for part in slices:
        blocks = part.block_table
        position, end = part.start, part.start + part.num_tokens
        while position < end:
            block, offset = divmod(position, block_size)
            count = min(block_size - offset, end - position)
            first = blocks[block] * block_size + offset
            slots.extend(range(first, first + count))
            position += count
    return slots
