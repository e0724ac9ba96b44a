"""Attention of a model whose layers are in several groups, each with block tables of its own.

Layers with small keys share a place: their blocks are parts of the group's, and their block tables follow from its.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar, cast

import numpy as np
import torch

from llmservice_server.backend.base import Attend, Attention, RotatingAttend, Rotation, rotates
from llmservice_server.backend.cache_shape import KVCacheShape
from llmservice_server.backend.step_input import StepInput, positions_of

A = TypeVar("A", bound=Attention)


def by_group(shape: KVCacheShape, attention_of: Callable[[KVCacheShape], A]) -> A | GroupedAttention[A]:
    """What `attention_of` makes of a model's layers, or of those of one group."""
    if shape.is_uniform and len(shape.layer_groups) == 1:
        return attention_of(shape)
    return GroupedAttention(shape, attention_of)


@dataclass(frozen=True, slots=True)
class _Part:
    """The layers that one block table is for, one of each place of a group."""

    group: int
    together: int  # the layers in a place, each of which has a block of its own within the group's block
    number: int  # of these layers
    chunk: int | None  # the size of those that its queries see no further than; None: they see all, or a window

    def tables(self, of_groups: Sequence[Sequence[Sequence[int]]]) -> Sequence[Sequence[int]]:
        """Of its blocks, given those of all groups."""
        tables = of_groups[self.group]
        if self.together == 1:
            return tables
        blocks = (np.asarray(table, np.int32) * self.together + self.number for table in tables)
        return [array("i", each.tobytes()) for each in blocks]


def in_chunks(step: StepInput, size: int, block_size: int) -> StepInput:
    """A step as one of shorter sequences: each run is divided at multiples of `size`, and sees nothing before them.

    `size` is a multiple of `block_size`.
    """
    firsts, lasts = step.starts // size, (step.starts + step.counts - 1) // size
    run, chunks = positions_of(firsts, lasts - firsts + 1)
    starts = np.maximum(step.starts[run], chunks * size)
    ends = np.minimum((step.starts + step.counts)[run], (chunks + 1) * size)
    begins = (chunks * (size // block_size)).tolist()
    whole = (step.block_tables[which] for which in run.tolist())
    tables = [table[begin:] if begin else table for table, begin in zip(whole, begins, strict=True)]
    return replace(step, starts=starts - chunks * size, counts=ends - starts, block_tables=tables)


class GroupedAttention(Generic[A]):
    """Implements `Attention`: layers of different groups share a cache, as a block belongs to one group at a time."""

    def __init__(self, shape: KVCacheShape, attention_of: Callable[[KVCacheShape], A]) -> None:
        groups, largest = shape.layer_groups, shape.largest_heads
        whole = attention_of(shape.with_heads(largest, (None,) * max(map(len, groups))))
        self.caches, self.device, self.num_groups = whole.caches, whole.device, len(groups)
        self._block_size = shape.block_size
        self.parts: list[A] = []
        self._parts: list[_Part] = []
        places: dict[int, tuple[int, int]] = {}
        for group, layers in enumerate(groups):
            heads = shape.heads(shape.windows[layers[0][0]])
            together = largest.row // heads.row
            for number in range(min(together, len(layers[0]))):
                of_part = [each[number] for each in layers if number < len(each)]
                places |= {layer: (len(self.parts), place) for place, layer in enumerate(of_part)}
                windows = [None if shape.in_chunks else shape.windows[layer] for layer in of_part]
                self.parts.append(cast("A", whole.viewed(shape.with_heads(heads, windows))))
                chunk = shape.windows[of_part[0]] if shape.in_chunks else None
                self._parts.append(_Part(group, together, number, chunk))
        self._places = [places[shape.source(layer)] for layer in range(len(shape.windows))]

    def viewed(self, shape: KVCacheShape) -> Attention:
        raise NotImplementedError("its layers are in groups already")

    def prepare(self, step: StepInput) -> GroupedStep:
        return self.joined([part.prepare(each) for part, each in zip(self.parts, self.split(step), strict=True)])

    def split(self, step: StepInput) -> list[StepInput]:
        """What each part prepares."""
        tables = (step.block_tables, *step.more_tables) if step.more_tables else (step.block_tables,) * len(self._parts)
        steps = [replace(step, block_tables=part.tables(tables), more_tables=()) for part in self._parts]
        return [
            each if part.chunk is None else in_chunks(each, part.chunk, self._block_size)
            for part, each in zip(self._parts, steps, strict=True)
        ]

    def joined(self, steps: Sequence[Attend]) -> GroupedStep:
        """One step of what each part has prepared."""
        return (RotatingGroupedStep if rotates(steps[0]) else GroupedStep)(steps, self._places)


class GroupedStep:
    """Implements `Attend` for one step."""

    def __init__(self, steps: Sequence[Attend], places: Sequence[tuple[int, int]]) -> None:
        self._steps = steps
        self._places = places

    def __call__(
        self, layer: int, query: torch.Tensor, key_value: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        group, place = self._places[layer]
        return self._steps[group](place, query, key_value, sinks)


class RotatingGroupedStep(GroupedStep):
    """Implements `RotatingAttend` for one step."""

    def rotate_and_attend(
        self, layer: int, heads: torch.Tensor, rotation: Rotation, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Implements `RotatingAttend`."""
        group, place = self._places[layer]
        return cast("RotatingAttend", self._steps[group]).rotate_and_attend(place, heads, rotation, sinks)
