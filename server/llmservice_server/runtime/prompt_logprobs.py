"""How likely the model found the tokens of a prompt: for requests that have their prompt echoed with probabilities."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from llmservice_server.backend.transfer import HostCopy, to_device
from llmservice_server.engine.plan import Plan, Scheduled
from llmservice_server.engine.request import Request
from llmservice_server.models.llama import LlamaModel
from llmservice_server.sampling.logprobs import Logprobs
from llmservice_server.types.errors import request_failure
from llmservice_server.types.messages import TokenLogprobs

_ROWS_AT_ONCE = 64  # float32 logits of a whole chunk over a large vocabulary would take hundreds of MB


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some successive tokens of one prompt."""

    request: Request
    token_ids: list[int]
    copy: HostCopy

    @classmethod
    def of(cls, model: LlamaModel, request: Request, token_ids: list[int], hidden: torch.Tensor) -> Self:
        """`hidden` are the states that predict them."""
        wanted = to_device(np.array(token_ids, np.int64), hidden.device)
        return cls(request, token_ids, HostCopy(Logprobs.of(model.logits(hidden), wanted, _num_top(request))))

    def as_messages(self, logprobs: Logprobs) -> list[TokenLogprobs]:
        return logprobs.as_messages(self.token_ids, [_num_top(self.request)] * len(self.token_ids))


class PromptLogprobs:
    """What a step's states `[num_tokens, hidden_size]` say about the prompts' next tokens, for requests that ask."""

    def __init__(self, model: LlamaModel, plan: Plan, hidden: torch.Tensor) -> None:
        self._pieces: list[_Piece] = []
        row = 0
        for share in plan.scheduled:
            if share.request.sampling.prompt_logprobs is not None:
                self._score(model, share, hidden[row : row + share.num_tokens])
            row += share.num_tokens

    def _score(self, model: LlamaModel, share: Scheduled, hidden: torch.Tensor) -> None:
        """The state of token `i` predicts token `i + 1`; what a preempted request has received is not sent again."""
        request = share.request
        first = max(share.start, len(request.prompt_logprobs))
        last = min(share.start + share.num_tokens, request.num_prompt_tokens - 1)
        for start in range(first, last, _ROWS_AT_ONCE):
            end = min(start + _ROWS_AT_ONCE, last)
            states = hidden[start - share.start : end - share.start]
            self._pieces.append(_Piece.of(model, request, request.token_ids[start + 1 : end + 1], states))

    def wait(self, failed: dict[Request, str]) -> dict[Request, list[TokenLogprobs]]:
        """Waits for the device. Requests that the host fails to compute are added to `failed`."""
        by_request: defaultdict[Request, list[TokenLogprobs]] = defaultdict(list)
        for piece in self._pieces:
            logprobs = Logprobs(*piece.copy.wait())
            try:
                by_request[piece.request] += piece.as_messages(logprobs)
            except Exception as error:
                failed[piece.request] = request_failure(error)
        return by_request


def _num_top(request: Request) -> int:
    return request.sampling.prompt_logprobs or 0
