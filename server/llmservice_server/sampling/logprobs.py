"""How likely the model found the tokens that were drawn, and which it found likelier."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llmservice_server.messages import TokenLogprobs


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """One entry per row of float32 logits `[num_rows, vocab_size]`, for the row's token and its `num_top` likeliest."""
    logprobs = logits.log_softmax(dim=-1)
    wanted = torch.tensor(token_ids, device=logits.device)
    chosen = logprobs.gather(1, wanted[:, None])[:, 0].tolist()
    top = logprobs.topk(min(max(num_top), logits.shape[-1]), dim=-1)
    likeliest = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [
        TokenLogprobs(token_id, logprob, list(zip(ids[:count], values[:count], strict=True)))
        for token_id, logprob, (ids, values), count in zip(token_ids, chosen, likeliest, num_top, strict=True)
    ]
