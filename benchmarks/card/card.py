"""What sections ask of the card that they measure, and nothing else of it: so that they can be walked without one."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from llmservice_planner.gpu import Device

Work = Callable[[], object]


class Card(Protocol):
    """A device, its clock, and what it can tell of the host."""

    name: str
    device: torch.device
    total_bytes: int
    settings: Mapping[str, Any]
    """Of every engine on it."""

    def for_the_plan(self) -> Device:
        """As the planner knows it."""

    def laps(self, work: Work, count: int, warm_ups: int = 2) -> list[float]:
        """Seconds from one end of `work` to the next, of `count` that the host queues one behind the other."""

    def alone_s(self, work: Work) -> float:
        """Seconds that the card takes for `work` when the host need not launch each of its kernels."""

    def busy_s(self, work: Work) -> float:
        """Seconds in which the card computes while `work` runs."""

    def host_waits(self, work: Work) -> list[str]:
        """Where (`file:line`) the host waited for the card during `work`, once for each time."""

    def crowded(self, left_bytes: int) -> AbstractContextManager[None]:
        """Somebody else has the card's memory meanwhile, but for so much."""

    def synchronize(self) -> None:
        """Wait until the card has done all its work. Raises RuntimeError where the card is lost."""

    def release(self) -> None:
        """Give back what torch only keeps for later."""


def seconds(card: Card, work: Work, repetitions: int = 5) -> float:
    """The median lap."""
    return statistics.median(card.laps(work, repetitions))
