"""Our attention in transformers' models: what their layers pass on goes to the step's `Attend`.

Layers with multi-head latent attention pass on their latents, as these are what is cached.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from llmservice_server.backend.base import Attend
from llmservice_server.backend.cache_shape import Heads
from llmservice_server.types.errors import ModelLoadError

NAME = "llmservice_paged"
"""Of our attention function. There is no mask function of that name, so that transformers builds no masks."""

attend_of_pass: ContextVar[Attend | list[Call]] = ContextVar("attend")
"""Of the forward pass that this thread computes; while a model is examined, the calls of its layers."""


@dataclass(frozen=True, slots=True)
class Call:
    """What an attention layer passes to its attention function."""

    layer: int | None
    heads: Heads
    keys: torch.Tensor
    is_latent: bool
    value_dim: int
    is_causal: bool
    window: int | None
    settings: Mapping[str, Any]


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    is_causal: bool | None = None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of transformers' interface: `[1, heads, num_tokens, head_dim]` each.

    Returns `[1, num_tokens, heads, head_dim]`.
    """
    attend, is_latent = attend_of_pass.get(), has_latents(module)
    if isinstance(attend, list):
        attend.append(
            Call(
                layer=getattr(module, "layer_idx", None),
                heads=Heads(query.shape[1], key.shape[1], key.shape[-1]),
                keys=key,
                is_latent=is_latent,
                value_dim=value.shape[-1],
                is_causal=bool(getattr(module, "is_causal", True) if is_causal is None else is_causal),
                window=settings.get("sliding_window") if attention_mask is None else _window_of(attention_mask),
                settings={name: each for name, each in settings.items() if each is not None and each is not False},
            )
        )
        width = module.v_head_dim if is_latent else value.shape[-1]
        return value.new_empty(1, query.shape[2], query.shape[1], width), None
    if is_latent:
        query = _to_latents(module, query)
    queries, keys, values = (part[0].transpose(0, 1) for part in (query, key, value))
    head_dim, value_dim, scaling = query.shape[-1], value.shape[-1], settings.get("scaling")
    factor = 1.0 if scaling is None else scaling * head_dim**0.5
    if abs(factor - 1.0) > 1e-6:
        queries = queries * factor
    sinks = settings.get("s_aux")
    if value_dim < head_dim:
        values = torch.nn.functional.pad(values, (0, head_dim - value_dim))
    attended = attend(module.layer_idx, queries.contiguous(), torch.cat((keys, values), dim=1), sinks)
    output = attended.view(1, *queries.shape)
    return _from_latents(module, output) if is_latent else output[..., :value_dim], None


def has_latents(module: Any) -> bool:
    """Whether it has multi-head latent attention (arXiv:2405.04434), and passes its latents on."""
    return getattr(module, "expand_kv", None) is _keep_latents


def _keep_latents(latents: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In the place of `expand_kv`, which makes keys and values by head: one row of a token is both."""
    row = torch.cat((latents, rotated), dim=-1)
    return row, row


def _expansions(module: Any) -> Sequence[torch.Tensor]:
    """From a latent to a head's keys, and to its values, `[heads, keys or values, latent]`."""
    weight: torch.Tensor = module.kv_b_proj.weight
    sizes = [module.qk_nope_head_dim, module.v_head_dim]
    return torch.split(weight.view(-1, sum(sizes), weight.shape[1]), sizes, dim=1)


def _to_latents(module: Any, query: torch.Tensor) -> torch.Tensor:
    """Queries `[1, heads, num_tokens, head_dim]` of latents: their products are those of the keys made of these."""
    plain, rotated = torch.split(query, [module.qk_nope_head_dim, module.qk_rope_head_dim], dim=-1)
    return torch.cat((plain @ _expansions(module)[0], rotated), dim=-1)


def _from_latents(module: Any, output: torch.Tensor) -> torch.Tensor:
    """Sums of values, of the sums of latents `[1, num_tokens, heads, row]`."""
    latents = output[..., : module.kv_lora_rank].transpose(1, 2)
    return (latents @ _expansions(module)[1].transpose(1, 2)).transpose(1, 2)


def pass_latents(model: Any) -> None:
    """Have layers with latent attention pass on latents, as these are what is cached."""
    for module in model.modules():
        if hasattr(module, "expand_kv") and hasattr(module, "kv_b_proj"):
            module.expand_kv = _keep_latents


class Mask(torch.Tensor):
    """A mask that is causal within the window `shape[-1]`; 0: without one. What a model computes of it is none."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __getitem__(self, places: Any) -> torch.Tensor:
        """It stays one where only queries are chosen, as Gemma does for layers that share keys."""
        chooses_queries = isinstance(places, tuple) and places[:2] + places[3:] == (slice(None),) * 3
        return self if chooses_queries else super().__getitem__(places)


def _window_of(mask: torch.Tensor) -> int | None:
    if not isinstance(mask, Mask):
        raise ModelLoadError("its attention is not causal, or has a mask of its own")
    return mask.shape[-1] or None
