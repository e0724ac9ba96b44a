"""Attention of a model whose layers are in several groups, each with block tables of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic, TypeVar, cast

import torch

from llmservice_server.backend.base import (
    Attend,
    Attention,
    KVCacheShape,
    RotatingAttend,
    Rotation,
    StepInput,
    rotates,
)

A = TypeVar("A", bound=Attention)


def by_group(shape: KVCacheShape, attention_of: Callable[[KVCacheShape], A]) -> A | GroupedAttention[A]:
    """What `attention_of` makes of a model's layers, or of those of one group."""
    groups = shape.layer_groups
    return attention_of(shape) if len(groups) == 1 else GroupedAttention(shape, groups, attention_of)


class GroupedAttention(Generic[A]):
    """Implements `Attention`: layers of different groups share a cache, as a block belongs to one group at a time."""

    def __init__(
        self,
        shape: KVCacheShape,
        groups: Sequence[Sequence[int]],
        attention_of: Callable[[KVCacheShape], A],
    ) -> None:
        size = max(map(len, groups))
        windows = [tuple(shape.windows[layer] for layer in layers) for layers in groups]
        first = attention_of(replace(shape, windows=(windows[0] + windows[0][:1] * size)[:size]))
        self.parts: list[A] = [first, *(cast("A", first.with_windows(each)) for each in windows[1:])]
        self.caches, self.device = first.caches, first.device
        places = {layer: (group, place) for group, layers in enumerate(groups) for place, layer in enumerate(layers)}
        self._places = [places[layer] for layer in range(len(shape.windows))]

    def with_windows(self, windows: Sequence[int | None]) -> Attention:
        raise NotImplementedError("its layers are in groups already")

    def prepare(self, step: StepInput) -> GroupedStep:
        return self.joined([part.prepare(each) for part, each in zip(self.parts, self.split(step), strict=True)])

    def split(self, step: StepInput) -> list[StepInput]:
        """What each part prepares."""
        tables = (step.block_tables, *step.more_tables) if step.more_tables else (step.block_tables,) * len(self.parts)
        return [replace(step, block_tables=each, more_tables=()) for each in tables]

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
