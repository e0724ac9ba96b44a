"""How likely the model found the tokens of a prompt: for requests that have their prompt echoed with probabilities."""

from __future__ import annotations

import torch

from llmservice_server.engine.plan import Plan, Scheduled
from llmservice_server.engine.request import Request
from llmservice_server.messages import TokenLogprobs
from llmservice_server.models.llama import LlamaModel
from llmservice_server.sampling.logprobs import token_logprobs

_ROWS_AT_ONCE = 64  # float32 logits of a whole chunk over a large vocabulary would take hundreds of MB


def prompt_logprobs(model: LlamaModel, plan: Plan, hidden: torch.Tensor) -> dict[Request, list[TokenLogprobs]]:
    """What a step's states `[num_tokens, hidden_size]` say about the prompts' next tokens, for requests that ask."""
    found = {}
    row = 0
    for share in plan.scheduled:
        if share.request.sampling.prompt_logprobs is not None:
            found[share.request] = _score(model, share, hidden[row : row + share.num_tokens])
        row += share.num_tokens + share.num_padding
    return found


def _score(model: LlamaModel, share: Scheduled, hidden: torch.Tensor) -> list[TokenLogprobs]:
    """The state of token `i` predicts token `i + 1`; what a preempted request was told already is not told again."""
    request = share.request
    first = max(share.start, len(request.prompt_logprobs))
    last = min(share.start + share.num_tokens, request.num_prompt_tokens - 1)
    scores: list[TokenLogprobs] = []
    for start in range(first, last, _ROWS_AT_ONCE):
        end = min(start + _ROWS_AT_ONCE, last)
        logits = model.logits(hidden[start - share.start : end - share.start])
        num_top = [request.sampling.prompt_logprobs or 0] * (end - start)
        scores += token_logprobs(logits, request.token_ids[start + 1 : end + 1], num_top)
    return scores
