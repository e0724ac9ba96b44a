"""Groups of layers that share block tables, and the blocks of the KV cache that a sequence takes.

Layers that see all tokens and layers with a sliding window are in different groups, so that blocks behind the window
are given back while a sequence runs. All groups have the same number of layers, so that any block of the pool can
belong to any group (as vLLM's hybrid KV cache manager does): where the kinds are unequal in number, the larger one is
divided into several groups, and the last group of a kind may have fewer layers than there is room for. Where the keys
of one kind are smaller, several of its layers count as one.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

_MOST_GROUPS = 12  # a step prepares block tables for each of them
_WINDOWS_OF_CONTEXT = 4  # a typical sequence is this many windows long: what padding costs in layers that see all


@dataclass(frozen=True, slots=True)
class BlockGroups:
    """A block holds the keys and values of `block_size` tokens in the `num_layers` layers of one group."""

    block_size: int
    num_layers: int
    windows: tuple[int | None, ...] = (None,)
    """Of each group: the tokens that its layers see, including the current one; None: all."""
    step_tokens: int = 1
    """Of one sequence in one step, at most: each of them sees a window of its own."""

    @classmethod
    def of(
        cls, block_size: int, num_layers: int, num_sliding: int, window: int | None, step_tokens: int
    ) -> BlockGroups:
        """For a model of `num_layers` layers, of which `num_sliding` have a window, of `window` tokens at most."""
        num_full = num_layers - num_sliding
        if window is None or not num_sliding:
            return cls(block_size, num_layers, (None,), step_tokens)
        if not num_full:
            return cls(block_size, num_layers, (window,), step_tokens)

        def groups(size: int) -> tuple[int, int]:
            return -(-num_full // size), -(-num_sliding // size)

        def cost(size: int) -> tuple[int, int]:
            full, sliding = groups(size)
            return size * (_WINDOWS_OF_CONTEXT * full + sliding), -size

        sizes = [size for size in range(1, max(num_full, num_sliding) + 1) if sum(groups(size)) <= _MOST_GROUPS]
        size = min(sizes, key=cost)
        full, sliding = groups(size)
        return cls(block_size, size, (None,) * full + (window,) * sliding, step_tokens)

    def __len__(self) -> int:
        return len(self.windows)

    @property
    def slides(self) -> bool:
        """Whether blocks of some group are given back while a sequence runs."""
        return any(window is not None for window in self.windows)

    def blocks(self, tokens: int) -> int:
        """Of a sequence of `tokens`, at most."""
        full = math.ceil(tokens / self.block_size)
        in_flight = min(tokens, self.step_tokens)
        return sum(full if window is None else min(full, self.of_window(window, in_flight)) for window in self.windows)

    def tokens(self, num_blocks: int, context: int) -> float:
        """That `num_blocks` hold of sequences of `context` tokens: more of longer ones, where layers have windows."""
        return num_blocks / self.blocks(context) * context

    def longest(self, num_blocks: int, most: int) -> int:
        """The longest sequence, of at most `most` tokens, that `num_blocks` hold."""
        return bisect_right(range(1, most + 1), num_blocks, key=self.blocks)

    def first_seen(self, group: int, start: int) -> int:
        """The first block of a group's table that a token at position `start`, or a later one, still sees."""
        window = self.windows[group]
        return 0 if window is None else max(0, start - window + 1) // self.block_size

    def of_window(self, window: int, in_flight: int) -> int:
        """Blocks of a group with a window, at most, while a step computes `in_flight` tokens."""
        return math.ceil((window - 1 + in_flight) / self.block_size) + 1
