"""What is computed otherwise than by transformers' Llama 4, whose mixtures compute all experts of every token.

Its queries grow with positions that its code counts from the first token of a step.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers.models.llama4.modeling_llama4 import Llama4TextAttention, Llama4TextExperts, Llama4TextMoe


def adapt_llama4(model: torch.nn.Module) -> None:
    """Other models stay as they are."""
    for module in model.modules():
        if isinstance(module, Llama4TextExperts):
            _describe(module)
        elif isinstance(module, Llama4TextMoe):
            _replace_forward(module)
        elif isinstance(module, Llama4TextAttention) and module.attn_temperature_tuning and not module.use_rope:
            _scale_queries(module)


def _describe(experts: Any) -> None:
    """By the attributes that the experts of transformers' other models have."""
    experts.has_gate = experts.is_concatenated = experts.is_transposed = True
    experts.has_bias = False
    experts._apply_gate = partial(_gated, experts)


def _replace_forward(mixture: Any) -> None:
    mixture.forward = partial(_mixture, mixture)


def _scale_queries(attention: Any) -> None:
    """Leave it to our attention function."""
    attention.attn_temperature_tuning = False
    attention.query_scale = partial(_query_scale, attention.floor_scale, attention.attn_scale)


def _gated(experts: Any, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    gated: torch.Tensor = up * experts.act_fn(gate)
    return gated


def _mixture(module: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`[..., hidden_size]` to `[num_tokens, hidden_size]`, and the router's logits.

    An expert's input is multiplied by its score, and not its output: a token is a row for each of its experts.
    """
    rows = hidden.reshape(-1, hidden.shape[-1])
    _, logits = module.router(rows)
    highest, chosen = torch.topk(logits, module.top_k, dim=-1)
    scores = highest.float().sigmoid().to(rows.dtype)
    scaled = (rows[:, None] * scores[..., None]).flatten(0, 1)
    places = chosen.view(-1, 1)
    routed = module.experts(scaled, places, torch.ones(places.shape, device=rows.device))
    return module.shared_expert(rows) + routed.view(len(rows), module.top_k, -1).sum(dim=1), logits


def _query_scale(floor: float, slope: float, positions: torch.Tensor) -> torch.Tensor:
    """Of the queries at `positions`, `[num_tokens, 1, 1]` in float32 (arXiv:2501.19399)."""
    scale = torch.log1p(torch.floor((positions.float() + 1.0) / floor)) * slope + 1.0
    return scale[:, None, None]
