"""Paged attention in plain torch, on any device: the reference of the other backends.

A layer's cache is `[num_blocks, block_size, 2 * num_kv_heads, head_dim]`, keys before values (no values where they are
the keys): the fused projection yields the two side by side, so that storing is one indexed copy, and fetching the
step's sequences is one gather of whole blocks. Several query heads share a key head: for one token they are the rows of
one query, for a chunk a dimension along which the keys are broadcast; keys and values are never repeated in memory.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from llmservice_server.backend.cache_shape import KVCacheShape
from llmservice_server.backend.step_input import StepInput


@dataclass(frozen=True, slots=True)
class _Run:
    """A sequence's slots in the gathered keys and values, and its tokens in the step."""

    first_query: int
    start: int  # position of the first of them
    num_queries: int
    first_slot: int  # of position 0


class TorchAttention:
    """Implements `Attention`. The operating system allocates the caches' memory when blocks are first written."""

    def __init__(self, shape: KVCacheShape, num_blocks: int, device: torch.device) -> None:
        self.shape = shape
        self.device = device
        size = (num_blocks, *_block(shape))
        self.caches = [torch.empty(size, dtype=shape.dtype, device=device) for _ in shape.windows]

    def viewed(self, shape: KVCacheShape) -> TorchAttention:
        other = copy(self)
        other.shape = shape
        other.caches = [cache.view(-1, *_block(shape)) for cache in self.caches]
        return other

    def prepare(self, step: StepInput) -> TorchStep:
        block_size = self.shape.block_size
        columns = (step.rows, step.starts, step.counts, step.table_firsts * block_size)
        runs = [_Run(*numbers) for numbers in zip(*(column.tolist() for column in columns), strict=True)]
        return TorchStep(
            shape=self.shape,
            caches=self.caches,
            slots=torch.from_numpy(step.slots(block_size)).to(self.device),
            runs=runs,
            blocks=torch.tensor(step.blocks, device=self.device),
        )


def _block(shape: KVCacheShape) -> tuple[int, int, int]:
    return shape.block_size, shape.stored * shape.num_kv_heads, shape.head_dim


@dataclass(slots=True)
class TorchStep:
    """Implements `Attend` for one step."""

    shape: KVCacheShape
    caches: list[torch.Tensor]
    slots: torch.Tensor
    runs: list[_Run]
    blocks: torch.Tensor
    masks: dict[tuple[int, int | None], torch.Tensor] = field(default_factory=dict)  # by first query and window

    def __call__(
        self, layer: int, query: torch.Tensor, key_value: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        shape = self.shape
        cache = self.caches[layer]
        cache.view(-1, *cache.shape[2:]).index_copy_(0, self.slots, key_value[:, : cache.shape[2]].to(shape.dtype))
        gathered = _by_head(cache.index_select(0, self.blocks))
        window = shape.windows[layer]
        outputs = []
        for run in self.runs:
            queries = query[run.first_query : run.first_query + run.num_queries]
            keys, values = self._keys_values(run, gathered, window, query.dtype)
            if not shape.is_plain:
                mask, by_head = self._mask(run, window), queries.transpose(0, 1)
                output = attend_otherwise(by_head, keys, values, mask, softcap=shape.softcap, sinks=sinks)
                outputs.append(output.transpose(0, 1))
            elif run.num_queries == 1:  # it sees all keys: the heads that share some are the rows of one query
                grouped = queries.reshape(1, len(keys), -1, shape.head_dim)
                outputs.append(F.scaled_dot_product_attention(grouped, keys[None], values[None]).flatten(1, 2))
            else:
                is_causal = run.start == 0 and (window is None or run.num_queries <= window)
                outputs.append(attend_chunk(queries, keys, values, None if is_causal else self._mask(run, window)))
        return torch.cat(outputs).flatten(1)

    def _keys_values(
        self, run: _Run, gathered: torch.Tensor, window: int | None, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Each `[num_kv_heads, num_keys, head_dim]`: the keys that any of the run's queries sees."""
        first = first_key(run.start, window)
        seen = gathered.narrow(1, run.first_slot + first, run.start + run.num_queries - first)
        parts = seen.to(dtype).chunk(self.shape.stored)
        return parts[0], parts[-1]

    def _mask(self, run: _Run, window: int | None) -> torch.Tensor:
        """True if a query sees a key, `[num_queries, num_keys]`."""
        mask = self.masks.get((run.first_query, window))
        if mask is None:
            mask = visible(run.start, run.start + run.num_queries, window, self.slots.device)
            self.masks[run.first_query, window] = mask
        return mask


def first_key(start: int, window: int | None) -> int:
    """The first position that a token at `start` sees."""
    return 0 if window is None else max(0, start + 1 - window)


def visible(start: int, end: int, window: int | None, device: torch.device) -> torch.Tensor:
    """True if a query sees a key: of the tokens from `start` to `end`, and from `first_key` of `start` to `end`."""
    queries = torch.arange(start, end, device=device)[:, None]
    keys = torch.arange(first_key(start, window), end, device=device)
    return (keys <= queries) if window is None else (keys <= queries) & (keys > queries - window)


def attend_chunk(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Attention of several tokens of one sequence, `[num_tokens, num_heads, head_dim]`, as is `query`.

    keys and values: `[num_kv_heads, num_keys, head_dim]`, not repeated in memory for the heads that share them. mask:
    `[num_tokens, num_keys]`, as torch takes it; None: the keys are those of the tokens, and each sees those before it.
    """
    by_head = query.reshape(len(query), len(keys), -1, query.shape[-1]).permute(1, 2, 0, 3)
    keys, values = (part.to(query.dtype)[:, None].expand(-1, by_head.shape[1], -1, -1) for part in (keys, values))
    output = F.scaled_dot_product_attention(by_head, keys, values, attn_mask=mask, is_causal=mask is None)
    return output.permute(2, 0, 1, 3).flatten(1, 2)


def attend_otherwise(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    *,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with a bound on the scores (Gemma 2), or with a score of no value for each head (gpt-oss).

    query: `[..., num_heads, num_queries, head_dim]`, keys and values: `[..., num_kv_heads, num_keys, head_dim]`. mask:
    true where a query sees a key. sinks: `[num_heads]`.
    """
    group = query.shape[-3] // keys.shape[-3]
    keys, values = (part.repeat_interleave(group, dim=-3) for part in (keys, values))
    scores = (query @ keys.transpose(-1, -2)).float() * query.shape[-1] ** -0.5
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        of_heads = sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, of_heads), dim=-1)
    shares = scores.softmax(dim=-1)[..., : keys.shape[-2]]
    return torch.matmul(shares.to(values.dtype), values)


def _by_head(blocks: torch.Tensor) -> torch.Tensor:
    """Blocks as one row of slots, `[2 * num_kv_heads, num_slots, head_dim]`; a view."""
    return blocks.view(-1, *blocks.shape[2:]).transpose(0, 1)
