"""From logits to tokens: greedy, temperature, min-p, top-k, top-p; one batch of rows, each with its own parameters.

Each row takes one uniform number, which depends only on its request's seed and the token's place in the answer, and
inverts the cumulative distribution with it. So a seeded request gets the same tokens whoever shares its batch, and
again after a preemption.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
import torch

from llmservice_server.engine.isolation import blame
from llmservice_server.engine.request import Request
from llmservice_server.messages import TokenLogprobs
from llmservice_server.sampling import torch_sampler
from llmservice_server.sampling.heaviest import Heaviest, heaviest
from llmservice_server.sampling.logit_adjustments import adjust
from llmservice_server.sampling.logprobs import Logprobs, token_logprobs
from llmservice_server.sampling.sampling_batch import SamplingBatch
from llmservice_server.sampling.token_masks import apply_masks
from llmservice_server.transfer import HostCopy, to_device


class Draws(NamedTuple):
    """A step's tokens, one for each row."""

    token_ids: Sequence[int] = ()  # -1: the row's logits are not finite
    logprobs: Sequence[TokenLogprobs | None] = ()  # where the request asks for them


class Drawn:
    """A batch's tokens on the device, on their way to the host together with the probabilities that are asked for."""

    def __init__(self, batch: SamplingBatch, token_ids: torch.Tensor, logprobs: Logprobs | None) -> None:
        self.token_ids = token_ids  # int64 [num_rows]; -1 where the logits are not finite
        self._batch = batch
        self._copy = HostCopy([token_ids, *(logprobs or ())])

    def wait(self, failed: dict[Request, str]) -> Draws:
        """In the order of the rows. Raises what the device does; whom the host cannot tell goes to `failed`."""
        copied, *logprobs = self._copy.wait()
        token_ids: list[int] = copied.tolist()
        told: list[TokenLogprobs | None] = [None] * len(token_ids)
        chosen, ids, values = (part.tolist() for part in logprobs) if logprobs else ([], [], [])
        for place, row in enumerate(self._batch.told):
            request = self._batch.requests[row]
            try:
                asked = request.sampling.logprobs or 0
                told[row] = token_logprobs(max(token_ids[row], 0), chosen[place], ids[place], values[place], asked)
            except Exception as error:
                failed[request] = blame(error)
        return Draws(token_ids, told)


class Sampler:
    """Keeps the last batch's columns, as most batches are of the same requests as the one before.

    `cut` is for top-k and top-p, and used on other devices than the CPU.
    """

    def __init__(self, cut: Heaviest = heaviest) -> None:
        self._batch = SamplingBatch.of([])
        self._cut = cut

    def draw(
        self, logits: torch.Tensor, requests: Sequence[Request], masks: Future[torch.Tensor] | None = None
    ) -> Drawn:
        """The next token of each request, from the model's float32 logits `[num_requests, vocab_size]`.

        Overwrites the logits. `masks` is for the requests with a grammar, in their order. Probabilities are told of the
        logits as they come. The host tells a GPU what to do, and waits for nothing.
        """
        if not self._batch.is_of(requests):
            self._batch = SamplingBatch.of(requests)
        batch = self._batch
        told = to_device(np.array(batch.told), logits.device) if batch.told else None
        raw = None if told is None else logits.index_select(0, told)
        if not batch.is_plain:
            adjust(logits, requests)
        if masks is not None:
            apply_masks(logits, batch.masked, masks.result())
        token_ids = self.choose(logits, batch)
        if told is None or raw is None:
            return Drawn(batch, token_ids, None)
        most = max(requests[row].sampling.logprobs or 0 for row in batch.told)
        return Drawn(batch, token_ids, Logprobs.of(raw, token_ids.index_select(0, told).clamp_min(0), most))

    def choose(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """The next token of each row of float32 logits `[num_rows, vocab_size]`, overwritten: int64 `[num_rows]`.

        -1 where a logit is NaN or infinite, or all are minus infinity.
        """
        if logits.device.type == "cpu":
            from llmservice_server.sampling import cpu_sampler  # brings a compiler along

            return cpu_sampler.choose(logits, batch)
        return torch_sampler.choose(logits, batch, self._cut)
