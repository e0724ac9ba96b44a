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


@dataclass(frozen=True, slots=True)
class Places:
    """Entries of `logits`, each with its row's value of a parameter."""

    rows: torch.Tensor  # int64 [num_places]
    token_ids: torch.Tensor  # int64 [num_places]
    values: torch.Tensor  # float32 [num_places]

    @classmethod
    def of(
        cls, parts: Sequence[tuple[int, npt.NDArray[np.int64], float | Sequence[float]]], device: torch.device
    ) -> Places:
        """Each part: a row, its tokens, and one value for all of them or one for each."""
        rows = np.repeat([row for row, _, _ in parts], [len(ids) for _, ids, _ in parts])
        values = np.concatenate(
            [np.broadcast_to(np.asarray(value, dtype=np.float32), ids.shape) for _, ids, value in parts]
        )
        token_ids = np.concatenate([ids for _, ids, _ in parts])
        return cls(*(torch.from_numpy(array).to(device) for array in (rows, token_ids, values)))

    @property
    def index(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rows, self.token_ids


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
    if everything:
        places = Places.of(everything, logits.device)
        before = logits[places.index]
        logits[places.index] = torch.where(before > 0, before / places.values, before * places.values)
    if once:
        places = Places.of(once, logits.device)
        logits[places.index] = logits[places.index] - places.values  # not -=: a place named twice is changed once
    if each_time:
        places = Places.of(each_time, logits.device)
        logits.index_put_(places.index, places.values, accumulate=True)


def _add_bias(logits: torch.Tensor, biased: Sequence[tuple[int, Request]]) -> None:
    parts = [
        (row, np.fromiter(bias, dtype=np.int64), list(bias.values()))
        for row, request in biased
        if (bias := request.sampling.logit_bias)
    ]
    places = Places.of(parts, logits.device)
    logits.index_put_(places.index, places.values, accumulate=True)


def _bar_stop_tokens(logits: torch.Tensor, barred: Sequence[tuple[int, Request]]) -> None:
    vocab_size = logits.shape[-1]
    parts = [
        (row, np.array([token for token in request.stop_token_ids if token < vocab_size], dtype=np.int64), -math.inf)
        for row, request in barred
    ]
    places = Places.of(parts, logits.device)
    logits[places.index] = places.values
