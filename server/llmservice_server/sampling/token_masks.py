"""Which tokens a grammar allows next, worked out in a thread while the device computes the logits."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from llmservice_server.sampling.grammar import Grammar
from llmservice_server.transfer import to_device

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher


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
