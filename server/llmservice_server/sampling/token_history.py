"""The tokens of one request that its penalties count."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class TokenHistory:
    """Ids in one buffer, so that a step gathers them without touching each: the prompt's once each, then the answer's.

    ```
    ids   | distinct tokens of the prompt | tokens of the answer ... |   room   |
    ```
    """

    def __init__(self, prompt_token_ids: Sequence[int], max_tokens: int) -> None:
        prompt = np.unique(np.array(prompt_token_ids, dtype=np.int64))
        self._num_prompt = len(prompt)
        self._num_ids = len(prompt)
        self._ids = np.empty(len(prompt) + max_tokens, dtype=np.int64)
        self._ids[: len(prompt)] = prompt

    def append(self, token_id: int) -> None:
        """Count a token of the answer; there may be `max_tokens` of them."""
        self._ids[self._num_ids] = token_id
        self._num_ids += 1

    @property
    def everything(self) -> npt.NDArray[np.int64]:
        """Prompt and answer; a token may stand here more than once."""
        return self._ids[: self._num_ids]

    @property
    def answer(self) -> npt.NDArray[np.int64]:
        """A token stands here as often as it was generated."""
        return self._ids[self._num_prompt : self._num_ids]
