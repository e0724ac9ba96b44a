"""Changes of logits before sampling: penalties, bias, banned tokens, and the token masks of grammars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from llmservice_server.backend.sampling_batch import SampledRequest
from llmservice_server.backend.transfer import to_device
from llmservice_server.sampling.grammar import Grammar
from llmservice_server.sampling.penalties import Penalties

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher


def adjust(logits: torch.Tensor, requests: Sequence[SampledRequest], penalties: Penalties) -> None:
    """Change float32 logits `[num_requests, vocab_size]` in place, row by row, as its request specifies."""
    numbered = [(row, request) for row, request in enumerate(requests) if not request.is_plain]
    if penalized := [(row, request) for row, request in numbered if request.history is not None]:
        penalties.apply(logits, penalized)
    if biased := [(row, request) for row, request in numbered if request.sampling.logit_bias]:
        _add_bias(logits, biased)
    if limited := [(row, ids) for row, request in numbered if (ids := request.allowed_token_ids) is not None]:
        _allow_only(logits, limited)
    if bad := [(row, token_ids) for row, request in numbered if len(token_ids := _bad_next_tokens(request))]:
        _ban(logits, bad)
    if short := [(row, each) for row, each in numbered if each.num_output_tokens < each.sampling.min_tokens]:
        _ban(logits, [(row, _stop_tokens(request, logits.shape[-1])) for row, request in short])


def _add_bias(logits: torch.Tensor, biased: Sequence[tuple[int, SampledRequest]]) -> None:
    index = _index([(row, np.fromiter(request.sampling.logit_bias, np.int64)) for row, request in biased], logits)
    values = np.array([bias for _, request in biased for bias in request.sampling.logit_bias.values()], np.float32)
    # `index_put_` that accumulates waits for the device.
    logits.view(-1).scatter_add_(0, index, to_device(values, logits.device))


def _allow_only(logits: torch.Tensor, limited: Sequence[tuple[int, npt.NDArray[np.int64]]]) -> None:
    """Set all but the allowed tokens of each row to minus infinity."""
    index = _index(limited, logits)
    flat = logits.view(-1)
    kept = flat[index]
    rows = to_device(np.array([row for row, _ in limited], np.int64), logits.device)
    logits.index_fill_(0, rows, -math.inf)
    flat[index] = kept


def _bad_next_tokens(request: SampledRequest) -> npt.NDArray[np.int64]:
    """Tokens that would complete one of the request's `bad_words`, unless no other token would be left."""
    answer = request.token_ids[request.num_prompt_tokens :] if request.sampling.bad_words else []
    bad = {
        word[-1] for word in request.sampling.bad_words if len(word) == 1 or tuple(answer[1 - len(word) :]) == word[:-1]
    }
    is_short = request.num_output_tokens < request.sampling.min_tokens
    barred = bad | request.stop_token_ids if is_short else bad
    if bad and barred.issuperset(request.sampling.allowed_token_ids or (-1,)):
        bad = set()
    return np.fromiter(bad, np.int64, len(bad))


def _stop_tokens(request: SampledRequest, vocab_size: int) -> npt.NDArray[np.int64]:
    return np.array([token for token in request.stop_token_ids if token < vocab_size], np.int64)


def _ban(logits: torch.Tensor, banned: Sequence[tuple[int, npt.NDArray[np.int64]]]) -> None:
    """Set the tokens of each row to minus infinity."""
    logits.view(-1).index_fill_(0, _index(banned, logits), -math.inf)


def _index(tokens: Sequence[tuple[int, npt.NDArray[np.int64]]], logits: torch.Tensor) -> torch.Tensor:
    """Of some rows' tokens in the `logits` laid end to end: int64 `[num_tokens]`."""
    return to_device(np.concatenate([row * logits.shape[-1] + ids for row, ids in tokens]), logits.device)


_ROWS_AT_ONCE = 64  # a bit becomes an int32 on the way: half a megabyte a row of the largest vocabularies


class TokenMasks:
    """Bit masks over a vocabulary. The library holds no lock of the interpreter while it fills them."""

    def __init__(self, vocab_size: int) -> None:
        self._num_words = (vocab_size + 31) // 32
        self._thread = ThreadPoolExecutor(1, "token-masks")

    def begin(self, grammars: Sequence[Grammar]) -> Future[torch.Tensor]:
        """Masks as int32 `[num_grammars, vocab_size / 32]` on the CPU; bit `i % 32` of word `i // 32` is token `i`."""
        return self._thread.submit(self._fill, [grammar.matcher for grammar in grammars])

    def _fill(self, matchers: Sequence[LLMatcher]) -> torch.Tensor:
        masks = torch.empty(len(matchers), self._num_words, dtype=torch.int32)
        numbered = [(matcher, row) for row, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(numbered, masks.data_ptr(), 4 * self._num_words, len(matchers))
        return masks

    @cached_property
    def _executor(self) -> LLExecutor:
        from llguidance import LLExecutor

        return LLExecutor()


def apply_masks(logits: torch.Tensor, rows: Sequence[int], masks: torch.Tensor) -> None:
    """Set what `masks` forbid to minus infinity in the given rows of `logits` `[num_rows, vocab_size]`."""
    device = logits.device
    bits = torch.arange(32, dtype=torch.int32, device=device)
    words, index = to_device(masks.numpy(), device), to_device(np.array(rows, np.int64), device)
    for some, places in zip(torch.split(words, _ROWS_AT_ONCE), torch.split(index, _ROWS_AT_ONCE), strict=True):
        allowed = (some[:, :, None] >> bits).bitwise_and_(1)
        forbidden = allowed.flatten(1)[:, : logits.shape[-1]] == 0
        logits[places] = logits[places].masked_fill_(forbidden, -torch.inf)
