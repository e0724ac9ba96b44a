"""What the parameters of a request do to its logits before a token is drawn: penalties, bias, barred stop tokens.

Everything is a list of places (row, token) over the whole batch: a step costs a few gathers and scatters, however many
requests ask for it, and no request keeps anything of the size of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from llmservice_server.engine.request import Request
from llmservice_server.transfer import to_device


@dataclass(frozen=True, slots=True)
class Places:
    """Entries of `logits`, each with its row's value of a parameter."""

    index: torch.Tensor  # int64 [num_places], into the logits laid end to end
    values: torch.Tensor  # float32 [num_places]

    @classmethod
    def of(
        cls, parts: Sequence[tuple[int, npt.NDArray[np.int64], float | Sequence[float]]], logits: torch.Tensor
    ) -> Places:
        """Each part: a row, its tokens, and one value for all of them or one for each."""
        index = np.concatenate([row * logits.shape[-1] + token_ids for row, token_ids, _ in parts])
        values = np.concatenate(
            [np.broadcast_to(np.asarray(value, dtype=np.float32), token_ids.shape) for _, token_ids, value in parts]
        )
        return cls(to_device(index, logits.device), to_device(values, logits.device))


def adjust(logits: torch.Tensor, requests: Sequence[Request]) -> None:
    """Change float32 logits `[num_requests, vocab_size]` in place, row by row as its request asks."""
    numbered = [(row, request) for row, request in enumerate(requests) if not request.is_plain]
    if penalized := [(row, request) for row, request in numbered if request.history is not None]:
        _penalize(logits, penalized)
    if biased := [(row, request) for row, request in numbered if request.sampling.logit_bias]:
        _add_bias(logits, biased)
    if barred := [
        (row, request) for row, request in numbered if request.num_output_tokens < request.sampling.min_tokens
    ]:
        _bar_stop_tokens(logits, barred)


def _penalize(logits: torch.Tensor, penalized: Sequence[tuple[int, Request]]) -> None:
    """Repetition over prompt and answer (CTRL, Keskar et al., 2019): positive logits are divided, negative multiplied.

    Then over the answer, as OpenAI defines them: minus presence, once; minus frequency, as often as the token occurs.
    """
    everything, once, each_time = [], [], []
    for row, request in penalized:
        sampling, history = request.sampling, request.history
        assert history is not None  # noqa: S101  # chosen for it
        if sampling.repetition_penalty != 1:
            everything.append((row, history.everything, sampling.repetition_penalty))
        if sampling.presence_penalty != 0:
            once.append((row, history.answer, sampling.presence_penalty))
        if sampling.frequency_penalty != 0:
            each_time.append((row, history.answer, -sampling.frequency_penalty))
    flat = logits.view(-1)
    if everything:
        places = Places.of(everything, logits)
        before = flat[places.index]
        flat[places.index] = torch.where(before > 0, before / places.values, before * places.values)
    if once:
        places = Places.of(once, logits)
        flat[places.index] = flat[places.index] - places.values  # not -=: a place named twice is changed once
    if each_time:
        places = Places.of(each_time, logits)
        flat.scatter_add_(0, places.index, places.values)


def _add_bias(logits: torch.Tensor, biased: Sequence[tuple[int, Request]]) -> None:
    parts = [
        (row, np.fromiter(bias, dtype=np.int64), list(bias.values()))
        for row, request in biased
        if (bias := request.sampling.logit_bias)
    ]
    places = Places.of(parts, logits)
    logits.view(-1).scatter_add_(0, places.index, places.values)  # `index_put_` that accumulates waits for the device


def _bar_stop_tokens(logits: torch.Tensor, barred: Sequence[tuple[int, Request]]) -> None:
    vocab_size = logits.shape[-1]
    parts = [
        (row, np.array([token for token in request.stop_token_ids if token < vocab_size], dtype=np.int64), -math.inf)
        for row, request in barred
    ]
    places = Places.of(parts, logits)
    logits.view(-1)[places.index] = places.values
