"""How likely the model found the tokens that were drawn, and which it found likelier."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from llmservice_server.types.messages import TokenLogprobs


class Logprobs(NamedTuple):
    """One row of each for every row of logits; on the device, or copied from there."""

    chosen: torch.Tensor  # float32 [num_rows], of the row's token
    top_ids: torch.Tensor  # [num_rows, most]; the likeliest first
    top_values: torch.Tensor  # float32 [num_rows, most]

    @classmethod
    def of(cls, logits: torch.Tensor, token_ids: torch.Tensor, most: int) -> Logprobs:
        """Of float32 logits `[num_rows, vocab_size]`, for the row's token and its `most` likeliest."""
        logprobs = logits.log_softmax(dim=-1)
        top = logprobs.topk(min(most, logits.shape[-1]), dim=-1)
        return cls(logprobs.gather(1, token_ids[:, None])[:, 0], top.indices, top.values)

    def as_messages(self, token_ids: Iterable[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
        """Each row's token, and as many of its likeliest as it asks for. Waits for a device."""
        likeliest = zip(self.top_ids.tolist(), self.top_values.tolist(), strict=True)
        return [
            token_logprobs(token_id, logprob, ids, values, count)
            for token_id, logprob, (ids, values), count in zip(
                token_ids, self.chosen.tolist(), likeliest, num_top, strict=True
            )
        ]


def token_logprobs(
    token_id: int, logprob: float, ids: Sequence[int], values: Sequence[float], count: int
) -> TokenLogprobs:
    """Of one token, with the `count` likeliest of `ids`."""
    return TokenLogprobs(token_id, logprob, list(zip(ids[:count], values[:count], strict=True)))
