"""What a scheduler decides for one step, and what the engine may ask of any scheduler."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from llmservice_server.engine.request import Request


class Scheduled(msgspec.Struct, frozen=True, gc=False):
    """One request's share of a step: the tokens [start, start + num_tokens) of its `token_ids`.

    There is one per sequence and step: a struct that the garbage collector never sees is made in a fifth of the time
    that a tuple with names takes.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool  # the share reaches the last known token, so the step yields the next one

    @property
    def block_table(self) -> array[int]:
        return self.request.block_table


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A block's keys and values go from one place to another; one of the two is in the swap space."""

    source: int
    target: int


@dataclass(slots=True)
class Plan:
    """One step: first the copies `swap_out`, then `swap_in`; then the runner computes `scheduled` in this order."""

    scheduled: list[Scheduled] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    swap_out: list[BlockCopy] = field(default_factory=list)
    swap_in: list[BlockCopy] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum([share.num_tokens for share in self.scheduled])


class Scheduler(Protocol):
    """Decides who computes what in each step, and owns the queues. Deterministic; time is passed in (monotonic)."""

    @property
    def running(self) -> Sequence[Request]: ...

    @property
    def num_waiting(self) -> Mapping[str, int]:
        """Requests that wait, by lane."""

    @property
    def num_preemptions(self) -> Mapping[str, int]:
        """Since start, by mode."""

    @property
    def prefix_queries(self) -> int:
        """Prompt tokens looked up in the prefix cache since start."""

    @property
    def prefix_hits(self) -> int:
        """Prompt tokens found there."""

    def add(self, request: Request) -> None: ...

    def finish(self, request: Request) -> None:
        """Take a request out of wherever it is, whatever ended it, and give its blocks back; a second time is none."""

    def schedule(self, now: float) -> Plan:
        """Plan the next step and take the blocks it needs. `num_computed_tokens` advances here, not after the step."""

    def commit(self, plan: Plan, failed: Collection[Request]) -> None:
        """The step is computed, or will be before anything that is planned from now on; but for the `failed`.

        Every token that it computes is known by now.
        """

    def tokens_left(self, plan: Plan) -> int:
        """How many prompt tokens a step with this plan leaves to work of the batch lane that no scheduler sees."""

    def wait_s(self, now: float) -> float:
        """How long there is nothing to do, unless a request comes; 0 where a step can be taken."""
