"""The paged KV cache of a model: heads, windows, groups of layers, and the bytes of a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, Self

import torch

from llmservice_planner.model.block_groups import BlockGroups


class Heads(NamedTuple):
    """Of a layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def row(self) -> int:
        """Numbers in the keys of a token."""
        return self.num_kv_heads * self.head_dim


class CausalShape(Protocol):
    """The sizes in a model's config that a backend needs."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def mlp_width(self) -> int:
        """The numbers of a token that its MLP holds at a time, at most."""

    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def windows(self) -> tuple[int | None, ...]: ...
    @property
    def in_chunks(self) -> bool:
        """Whether a query sees the tokens of its own chunk alone, in the place of those in a window."""

    @property
    def softcap(self) -> float | None: ...
    @property
    def has_sinks(self) -> bool: ...
    @property
    def sliding_heads(self) -> Heads | None:
        """Of the layers with a window, where they differ from the others."""

    @property
    def sources(self) -> tuple[int, ...]:
        """Of each layer, the one whose keys and values it sees; empty: its own."""

    @property
    def is_latent(self) -> bool:
        """Whether values are keys."""

    @property
    def max_context(self) -> int: ...


@dataclass(frozen=True, slots=True)
class KVCacheShape:
    """The paged KV cache of a model. A layer's window is None if a query sees all earlier tokens."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]  # one per layer
    block_size: int
    dtype: torch.dtype
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    has_sinks: bool = False  # each head, at least of some layers, has a score of no value that the softmax counts
    sliding_heads: Heads | None = None  # of the layers with a window, where they differ from the others
    sources: tuple[int, ...] = ()  # of each layer, the one whose keys and values it sees; empty: its own
    is_latent: bool = False  # the values are the keys, and are not stored
    in_chunks: bool = False  # a layer's window is the size of the chunks outside of which a query sees nothing

    @classmethod
    def of(cls, config: CausalShape, block_size: int, dtype: torch.dtype) -> Self:
        """Of a model."""
        return cls(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            windows=config.windows,
            block_size=block_size,
            dtype=dtype,
            in_chunks=config.in_chunks,
            softcap=config.softcap,
            has_sinks=config.has_sinks,
            sliding_heads=config.sliding_heads,
            sources=config.sources,
            is_latent=config.is_latent,
        )

    def heads(self, window: int | None) -> Heads:
        """Of the layers with such a window."""
        if window is None or self.sliding_heads is None:
            return Heads(self.num_heads, self.num_kv_heads, self.head_dim)
        return self.sliding_heads

    @property
    def largest_heads(self) -> Heads:
        """Those with the largest keys."""
        return max(map(self.heads, self.windows or (None,)), key=lambda heads: heads.row)

    def with_heads(self, heads: Heads, windows: Sequence[int | None]) -> Self:
        """Of layers that have keys and values of their own, and the same heads."""
        return replace(self, **heads._asdict(), windows=tuple(windows), sliding_heads=None, sources=(), in_chunks=False)

    def kinds(self) -> list[Self]:
        """For each kind of heads, a shape with each of its windows once."""
        windows: dict[Heads, dict[int | None, None]] = {}
        for window in self.windows:
            windows.setdefault(self.heads(window), {})[window] = None
        return [self.with_heads(heads, [*each]) for heads, each in windows.items()]

    @property
    def is_uniform(self) -> bool:
        """Whether all layers have keys and values of their own, of one size, and none sees chunks."""
        return self.sliding_heads is None and not self.sources and not self.in_chunks

    def source(self, layer: int) -> int:
        """The layer whose keys and values it sees."""
        return self.sources[layer] if self.sources else layer

    @property
    def is_plain(self) -> bool:
        """Whether its attention is a softmax of the scores and no more."""
        return self.softcap is None and not self.has_sinks

    @property
    def bytes_per_block(self) -> int:
        """What is stored of `block_size` tokens in a group's layers.

        An fp8 cache has scales for the rows of each kind of heads, as a block may have either.
        """
        row = self.largest_heads.row
        kinds = {self.heads(window) for window in self.windows}
        scales = sum(row // heads.row * heads.num_kv_heads for heads in kinds) if self.dtype.itemsize == 1 else 0
        token_bytes = self.stored * (row * self.dtype.itemsize + 4 * scales)
        return self.block_groups(1).num_layers * self.block_size * token_bytes

    @property
    def stored(self) -> int:
        """Rows of a token and a key head."""
        return 1 if self.is_latent else 2

    def block_groups(self, step_tokens: int) -> BlockGroups:
        """How many blocks a sequence takes, of which a step computes at most `step_tokens` tokens."""
        full, sliding = map(len, self._places)
        longest = max((window for window in self.windows if window is not None), default=None)
        return BlockGroups.of(self.block_size, full + sliding, sliding, longest, step_tokens)

    @property
    def layer_groups(self) -> list[list[list[int]]]:
        """Of each of the `block_groups`, the layers in each of its places; in one are several with small keys."""
        full, sliding = self._places
        if len(groups := self.block_groups(1)) == 1:
            return [sorted(full + sliding)]
        size = groups.num_layers
        return [kind[first : first + size] for kind in (full, sliding) for first in range(0, len(kind), size)]

    @property
    def _places(self) -> tuple[list[list[int]], list[list[int]]]:
        """The layers with keys and values of their own: those without a window, and those with one."""
        own = [layer for layer in range(len(self.windows)) if self.source(layer) == layer]
        full = [layer for layer in own if self.windows[layer] is None]
        sliding = [layer for layer in own if self.windows[layer] is not None]
        return _in_places(full, self._together(None)), _in_places(sliding, self._together(1))

    def _together(self, window: int | None) -> int:
        return self.largest_heads.row // self.heads(window).row


def _in_places(layers: list[int], together: int) -> list[list[int]]:
    return [layers[first : first + together] for first in range(0, len(layers), together)]
