"""From logits to tokens: greedy, temperature, min-p, top-k, top-p; one batch of rows, each with its own parameters.

Each row takes one uniform number, which depends only on its request's seed and the token's place in the answer, and
inverts the cumulative distribution with it. So a seeded request gets the same tokens whoever shares its batch, and
again after a preemption.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import msgspec
import torch

from llmservice_server.engine.request import Request
from llmservice_server.messages import TokenLogprobs
from llmservice_server.sampling import torch_sampler
from llmservice_server.sampling.logit_adjustments import adjust
from llmservice_server.sampling.logprobs import token_logprobs
from llmservice_server.sampling.sampling_batch import SamplingBatch
from llmservice_server.sampling.token_masks import apply_masks


class Draw(msgspec.Struct, frozen=True):
    """One step's token of one request."""

    token_id: int | None  # None: the logits are not finite
    logprobs: TokenLogprobs | None = None  # where the request asks for them


class Sampler:
    """Keeps the last batch's columns, as most batches are of the same requests as the one before."""

    def __init__(self) -> None:
        self._batch = SamplingBatch.of([])

    def draw(
        self, logits: torch.Tensor, requests: Sequence[Request], masks: Future[torch.Tensor] | None = None
    ) -> list[Draw]:
        """The next token of each request, from the model's float32 logits `[num_requests, vocab_size]`.

        Overwrites the logits. `masks` is for the requests with a grammar, in their order. Probabilities are told of the
        logits as they come.
        """
        if not self._batch.is_of(requests):
            self._batch = SamplingBatch.of(requests)
        told = self._batch.told
        raw = logits[told] if told else None
        adjust(logits, requests)
        if masks is not None:
            apply_masks(logits, self._batch.masked, masks.result())
        draws = [Draw(None if token_id < 0 else token_id) for token_id in choose(logits, self._batch)]
        if raw is not None:
            drawn = [draws[row].token_id or 0 for row in told]
            asked = [requests[row].sampling.logprobs or 0 for row in told]
            for row, logprobs in zip(told, token_logprobs(raw, drawn, asked), strict=True):
                draws[row] = Draw(draws[row].token_id, logprobs)
        return draws


def choose(logits: torch.Tensor, batch: SamplingBatch) -> list[int]:
    """The next token of each row of float32 logits `[num_rows, vocab_size]`, which are overwritten.

    -1 where a logit is NaN or infinite, or all are minus infinity.
    """
    if logits.device.type == "cpu":
        from llmservice_server.sampling import cpu_sampler  # brings a compiler along

        return cpu_sampler.choose(logits, batch)
    return torch_sampler.choose(logits, batch)
