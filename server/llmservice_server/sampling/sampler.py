"""From logits to tokens: greedy, temperature, min-p, top-k, top-p; one batch of rows, each with its own parameters.

Each row takes one uniform number, which depends only on its request's seed and the token's place in the answer, and
inverts the cumulative distribution with it. So a seeded request gets the same tokens whatever shares its batch, and
again after a preemption.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch

from llmservice_server.backend.sampling_batch import PenalizedRows, SampledRequest, SamplingBatch
from llmservice_server.backend.transfer import HostCopy, to_device
from llmservice_server.sampling.logit_adjustments import adjust, apply_masks
from llmservice_server.sampling.penalties import Penalties
from llmservice_server.types.errors import request_failure
from llmservice_server.types.messages import TokenLogprobs


class Draws(NamedTuple):
    """A step's tokens, one for each row."""

    token_ids: Sequence[int] = ()  # -1: the row's logits are not finite
    logprobs: Sequence[TokenLogprobs | None] = ()  # where the request asks for them
    failed: Mapping[int, str] = MappingProxyType({})
    """By row: what the host could not compute, with the message for the client."""


class Drawn:
    """A batch's tokens on the device, being copied to the host with the log-probabilities that were requested."""

    def __init__(self, batch: SamplingBatch, token_ids: torch.Tensor, logprobs: Logprobs | None) -> None:
        self.token_ids = token_ids  # int64 [num_rows]; -1 where the logits are not finite
        self._batch = batch
        self._copy = HostCopy([token_ids, *(logprobs or ())])

    def wait(self) -> Draws:
        """In the order of the rows. Raises what the device raises."""
        copied, *logprobs = self._copy.wait()
        token_ids: list[int] = copied.tolist()
        by_row: list[TokenLogprobs | None] = [None] * len(token_ids)
        failed: dict[int, str] = {}
        chosen, ids, values = (part.tolist() for part in logprobs) if logprobs else ([], [], [])
        for place, row in enumerate(self._batch.with_logprobs):
            count = self._batch.requests[row].sampling.logprobs or 0
            try:
                by_row[row] = token_logprobs(max(token_ids[row], 0), chosen[place], ids[place], values[place], count)
            except Exception as error:
                failed[row] = request_failure(error)
        return Draws(token_ids, by_row, failed)


class Sampler:
    """Keeps the last batch's columns, as most batches are of the same requests as the one before.

    `choose` and `penalize` are the backend's.
    """

    def __init__(
        self,
        choose: Callable[[torch.Tensor, SamplingBatch], torch.Tensor],
        penalize: Callable[[torch.Tensor, PenalizedRows], None],
    ) -> None:
        self._batch = SamplingBatch.of([])
        self.choose = choose
        self._penalties = Penalties(penalize)

    def draw(
        self, logits: torch.Tensor, requests: Sequence[SampledRequest], masks: Future[torch.Tensor] | None = None
    ) -> Drawn:
        """The next token of each request, from the model's float32 logits `[num_requests, vocab_size]`.

        Overwrites the logits. `masks` is for the requests with a grammar, in their order. Probabilities are of the
        logits as they come. On a GPU nothing is waited for.
        """
        if not self._batch.is_of(requests):
            self._batch = SamplingBatch.of(requests)
        batch = self._batch
        rows = to_device(np.array(batch.with_logprobs), logits.device) if batch.with_logprobs else None
        raw = None if rows is None else logits.index_select(0, rows)
        if not batch.is_plain:
            adjust(logits, requests, self._penalties)
        if masks is not None:
            apply_masks(logits, batch.masked, masks.result())
        token_ids = self.choose(logits, batch)
        if rows is None or raw is None:
            return Drawn(batch, token_ids, None)
        most = max(requests[row].sampling.logprobs or 0 for row in batch.with_logprobs)
        return Drawn(batch, token_ids, Logprobs.of(raw, token_ids.index_select(0, rows).clamp_min(0), most))


class Logprobs(NamedTuple):
    """One row of each for every row of logits; on the device, or copied from there."""

    chosen: torch.Tensor  # float32 [num_rows], of the row's token
    top_ids: torch.Tensor  # [num_rows, most], in descending order
    top_values: torch.Tensor  # float32 [num_rows, most]

    @classmethod
    def of(cls, logits: torch.Tensor, token_ids: torch.Tensor, most: int) -> Logprobs:
        """Of float32 logits `[num_rows, vocab_size]`, for the row's token and its top `most` tokens."""
        logprobs = logits.log_softmax(dim=-1)
        top = logprobs.topk(min(most, logits.shape[-1]), dim=-1)
        return cls(logprobs.gather(1, token_ids[:, None])[:, 0], top.indices, top.values)

    def as_messages(self, token_ids: Iterable[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
        """Each row's token with its top `num_top` tokens. Waits for the device."""
        top = zip(self.top_ids.tolist(), self.top_values.tolist(), strict=True)
        return [
            token_logprobs(token_id, logprob, ids, values, count)
            for token_id, logprob, (ids, values), count in zip(
                token_ids, self.chosen.tolist(), top, num_top, strict=True
            )
        ]


def token_logprobs(
    token_id: int, logprob: float, ids: Sequence[int], values: Sequence[float], count: int
) -> TokenLogprobs:
    """Of one token, with the first `count` of `ids`."""
    return TokenLogprobs(token_id, logprob, list(zip(ids[:count], values[:count], strict=True)))
