"""Our attention in transformers' models: what their layers pass on goes to the step's `Attend`.

Layers with multi-head latent attention pass on their latents, as these are what is cached.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from llmservice_server.backend.base import Attend, no_changes
from llmservice_server.backend.cache_shape import Heads
from llmservice_server.types.errors import ModelLoadError

NAME = "llmservice_paged"
"""Of our attention function. There is no mask function of that name, so that transformers builds no masks."""

attend_of_pass: ContextVar[Attend | list[Call]] = ContextVar("attend")
"""Of the forward pass that this thread computes; while a model is examined, the calls of its layers."""
positions_of_pass: ContextVar[torch.Tensor] = ContextVar("positions")
"""Of its tokens, `[num_tokens]`."""


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
    in_chunks: bool  # its window is a chunk's size
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
                in_chunks=attention_mask is not None and attention_mask.shape[-2] == CHUNKS,
                settings={name: each for name, each in settings.items() if each is not None and each is not False},
            )
        )
        width = module.v_head_dim if is_latent else value.shape[-1]
        return value.new_empty(1, query.shape[2], query.shape[1], width), None
    if is_latent:
        plain, rotated = torch.split(query, [module.qk_nope_head_dim, module.qk_rope_head_dim], dim=-1)
        query = torch.cat((module.kv_b_proj.to_latents(plain), rotated), dim=-1)
    queries, keys, values = (part[0].transpose(0, 1) for part in (query, key, value))
    if (scale_of := getattr(module, "query_scale", None)) is not None:
        queries = (queries * scale_of(positions_of_pass.get())).to(query.dtype)
    head_dim, value_dim, scaling = query.shape[-1], value.shape[-1], settings.get("scaling")
    factor = 1.0 if scaling is None else scaling * head_dim**0.5
    if abs(factor - 1.0) > 1e-6:
        queries = queries * factor
    sinks = settings.get("s_aux")
    if value_dim < head_dim:
        values = torch.nn.functional.pad(values, (0, head_dim - value_dim))
    attended = attend(module.layer_idx, queries.contiguous(), torch.cat((keys, values), dim=1), sinks)
    output = attended.view(1, *queries.shape)
    if not is_latent:
        return output[..., :value_dim], None
    latents = output[..., : module.kv_lora_rank].transpose(1, 2)
    return module.kv_b_proj.from_latents(latents).transpose(1, 2), None


def has_latents(module: Any) -> bool:
    """Whether it has multi-head latent attention (arXiv:2405.04434), and passes its latents on."""
    return getattr(module, "expand_kv", None) is _keep_latents


def _keep_latents(latents: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In the place of `expand_kv`, which makes keys and values by head: one row of a token is both."""
    row = torch.cat((latents, rotated), dim=-1)
    return row, row


class LatentExpansion(torch.nn.Module):
    """Implements `PlainMatrix`, in the place of `kv_b_proj`: queries and sums of latents are multiplied with it."""

    def __init__(self, name: str, weight: torch.Tensor, sizes: Sequence[int]) -> None:
        """sizes: of a head's key and of its value, for each of which the weight has so many rows."""
        super().__init__()
        self.name = name
        self.weight = weight
        self.changes = no_changes
        self._sizes = [*sizes]

    def to_latents(self, queries: torch.Tensor) -> torch.Tensor:
        """Queries `[1, heads, num_tokens, key]` of latents: their products are those of the keys made of these."""
        keys, _ = self._by_head(self.weight)
        latents = queries @ keys
        for change in self.changes():
            keys, _ = self._by_head(change.up.t())
            latents[:, :, change.rows] += change.keep(queries[:, :, change.rows] @ keys) @ change.down
        return latents

    def from_latents(self, latents: torch.Tensor) -> torch.Tensor:
        """Sums of values `[1, heads, num_tokens, value]`, of the sums of latents."""
        _, values = self._by_head(self.weight)
        sums = latents @ values.transpose(1, 2)
        for change in self.changes():
            _, values = self._by_head(change.up.t())
            low = change.keep(latents[:, :, change.rows] @ change.down.t())
            sums[:, :, change.rows] += low @ values.transpose(1, 2)
        return sums

    def _by_head(self, matrix: torch.Tensor) -> Sequence[torch.Tensor]:
        """Its rows for keys and for values, `[heads, key or value, columns]`."""
        return torch.split(matrix.view(-1, sum(self._sizes), matrix.shape[1]), self._sizes, dim=1)


def pass_latents(model: Any) -> list[LatentExpansion]:
    """Have layers with latent attention pass on latents, as these are what is cached."""
    expansions = []
    for name, module in model.named_modules():
        if hasattr(module, "expand_kv") and hasattr(module, "kv_b_proj"):
            module.expand_kv = _keep_latents
            sizes = module.qk_nope_head_dim, module.v_head_dim
            module.kv_b_proj = LatentExpansion(f"{name}.kv_b_proj", module.kv_b_proj.weight, sizes)
            expansions.append(module.kv_b_proj)
    return expansions


CHUNKS = 2
"""The size `shape[-2]` of a `Mask` of layers that see chunks."""


class Mask(torch.Tensor):
    """A mask that is causal within the window `shape[-1]`; 0: without one. What a model computes of it is none.

    Of layers that see chunks of this size instead, `shape[-2]` is CHUNKS.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __getitem__(self, places: Any) -> torch.Tensor:
        """It stays one where only queries are chosen, as Gemma does for layers that share keys."""
        chooses_queries = isinstance(places, tuple) and places[:2] + places[3:] == (slice(None),) * 3
        return self if chooses_queries else super().__getitem__(places)


def _window_of(mask: torch.Tensor) -> int | None:
    if not isinstance(mask, Mask):
        raise ModelLoadError("its attention is not causal, or has a mask of its own")
    return mask.shape[-1] or None
