"""A step on its way through the device: launched, then sampled, then read; the host waits at the last alone.

Two steps may be on their way at once. The second is planned and launched while the first computes, on the assumption
that every request will be drawn one more token, which `expecting` lets the scheduler count. What that token is only the
device knows by then, so the device puts it in (`LateTokens`). The second is sampled once the first has been read, which
is long before its states are there: so whatever sampling asks for (penalties, grammars) is known to the host.

A request that the first step ends is computed once more in vain, and its row is dropped. Its blocks are free at once:
all work is in the order of one stream, so that whoever is given them writes later than whatever is in flight.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from llmservice_server.attention.base import Int64Array
from llmservice_server.engine.plan import Plan
from llmservice_server.engine.request import Request
from llmservice_server.engine.step_input import StepInput
from llmservice_server.messages import TokenLogprobs
from llmservice_server.sampling.prompt_logprobs import PromptLogprobs
from llmservice_server.sampling.sampler import Drawn, Draws
from llmservice_server.transfer import to_device

_UNKNOWN = 0  # any token of the vocabulary: nobody reads it


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step has found out."""

    sampling: Sequence[Request] = ()
    draws: Draws = field(default_factory=Draws)  # for each of them
    prompt_logprobs: dict[Request, list[TokenLogprobs]] = field(default_factory=dict)
    failed: dict[Request, str] = field(default_factory=dict)  # what the host could not tell, with a sentence each


@dataclass(frozen=True, slots=True)
class LateTokens:
    """Tokens of a step that the step before it draws."""

    places: Int64Array  # among the step's tokens
    rows: Int64Array  # among the tokens drawn
    drawn: torch.Tensor  # [num_rows], on the device

    def put(self, token_ids: torch.Tensor) -> None:
        """Put them into the step's `token_ids` `[num_tokens]`, on the device."""
        places, rows = to_device(np.stack((self.places, self.rows)), token_ids.device).unbind()
        known = self.drawn.index_select(0, rows).clamp_min(0)  # -1: its request is about to end with an error
        token_ids.index_copy_(0, places, known.to(token_ids.dtype))


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """The model is at work on it; nothing is drawn."""

    plan: Plan
    step: StepInput
    hidden: torch.Tensor  # [num_tokens, hidden_size]; valid until the next launch
    masks: Future[torch.Tensor] | None  # those of its grammars, where they could be begun with the launch


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """The host has told the device everything that it needs for this step."""

    sampling: Sequence[Request]
    drawn: Drawn | None  # a row for each of them
    prompt_logprobs: PromptLogprobs | None

    def wait(self) -> StepResult:
        """What the step has found out, once it is computed. Raises what the device does, which is then lost."""
        failed: dict[Request, str] = {}
        return StepResult(
            self.sampling,
            self.drawn.wait(failed) if self.drawn is not None else Draws(),
            self.prompt_logprobs.told(failed) if self.prompt_logprobs is not None else {},
            failed,
        )

    def late_tokens(self, step: StepInput) -> LateTokens | None:
        """Which of the next step's tokens this one draws; None where it draws none of them."""
        if self.drawn is None:
            return None
        row_of = {request: row for row, request in enumerate(self.sampling)}
        late = [(place, row_of[request]) for place, request in step.last_tokens() if request in row_of]
        if not late:
            return None
        places, rows = np.array(late, np.int64).T
        return LateTokens(places, rows, self.drawn.token_ids)


@contextmanager
def expecting(requests: Collection[Request]) -> Iterator[None]:
    """Within it each of `requests` has the token that the step in flight draws for it, whatever that may be."""
    for request in requests:
        request.token_ids.append(_UNKNOWN)
    try:
        yield
    finally:
        for request in requests:
            request.token_ids.pop()
