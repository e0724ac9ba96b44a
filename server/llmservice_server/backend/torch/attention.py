"""Paged attention in plain torch, on any device: the reference of the other backends.

A layer's cache is `[num_blocks, block_size, 2 * num_kv_heads, head_dim]`, keys before values (no values where they are
the keys): the fused projection yields the two side by side, so that storing is one indexed copy, and fetching the
step's sequences is one gather of whole blocks. Several query heads share a key head: for one token they are the rows of
one query, for a chunk a dimension along which the keys are broadcast; keys and values are never repeated in memory.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

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


class TorchStep:
    """Implements `Attend` for one step."""

    def __init__(
        self,
        shape: KVCacheShape,
        caches: list[torch.Tensor],
        slots: torch.Tensor,
        runs: list[_Run],
        blocks: torch.Tensor,
    ) -> None:
        self.shape = shape
        self.caches = caches
        self.slots = slots
        self.runs = runs
        self.blocks = blocks
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}  # by first query and window

    def __call__(
        self, layer: int, query: torch.Tensor, key_value: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        shape = self.shape
        cache = self.caches[layer]
        cache.view(-1, *cache.shape[2:]).index_copy_(0, self.slots, key_value[:, : cache.shape[2]].to(shape.dtype))
        gathered = _by_head(cache.index_select(0, self.blocks))
        grouped = query.view(query.shape[0], shape.num_kv_heads, -1, shape.head_dim)
        window = shape.windows[layer]
        outputs = []
        for run in self.runs:
            queries = grouped[run.first_query : run.first_query + run.num_queries]
            if not shape.is_plain:
                outputs.append(self._attend_otherwise(run, queries, gathered, window, sinks))
                continue
            attend = self._attend_one if run.num_queries == 1 else self._attend_chunk
            outputs.append(attend(run, queries, gathered, window))
        return torch.cat(outputs).flatten(1)

    def _attend_one(self, run: _Run, query: torch.Tensor, gathered: torch.Tensor, window: int | None) -> torch.Tensor:
        """One token, `[1, num_kv_heads, group, head_dim]`: it sees all keys, so the group is the rows of one query."""
        keys, values = self._keys_values(run, gathered, window, query.dtype)
        return F.scaled_dot_product_attention(query, keys[None], values[None])

    def _attend_otherwise(
        self, run: _Run, query: torch.Tensor, gathered: torch.Tensor, window: int | None, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        keys, values = self._keys_values(run, gathered, window, query.dtype)
        output = attend_otherwise(
            query.permute(1, 2, 0, 3).flatten(0, 1),
            keys,
            values,
            self._mask(run, window),
            softcap=self.shape.softcap,
            sinks=sinks,
        )
        return output.view(*query.shape[1:3], *query.shape[::3]).permute(2, 0, 1, 3)

    def _attend_chunk(self, run: _Run, query: torch.Tensor, gathered: torch.Tensor, window: int | None) -> torch.Tensor:
        """Several tokens, `[num_queries, num_kv_heads, group, head_dim]`."""
        keys, values = self._keys_values(run, gathered, window, query.dtype)
        group = query.shape[2]
        keys, values = (part[:, None].expand(-1, group, -1, -1) for part in (keys, values))
        by_head = query.permute(1, 2, 0, 3)  # the heads of a group see the same keys
        if run.start == 0 and (window is None or run.num_queries <= window):
            output = F.scaled_dot_product_attention(by_head, keys, values, is_causal=True)
        else:
            output = F.scaled_dot_product_attention(by_head, keys, values, attn_mask=self._mask(run, window))
        return output.permute(2, 0, 1, 3)

    def _keys_values(
        self, run: _Run, gathered: torch.Tensor, window: int | None, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Each `[num_kv_heads, num_keys, head_dim]`: the keys that any of the run's queries sees."""
        first = _first_key(run, window)
        visible = gathered.narrow(1, run.first_slot + first, run.start + run.num_queries - first)
        parts = visible.to(dtype).chunk(self.shape.stored)
        return parts[0], parts[-1]

    def _mask(self, run: _Run, window: int | None) -> torch.Tensor:
        """True if a query sees a key, `[num_queries, num_keys]`."""
        mask = self._masks.get((run.first_query, window))
        if mask is None:
            end = run.start + run.num_queries
            queries = torch.arange(run.start, end, device=self.slots.device)[:, None]
            keys = torch.arange(_first_key(run, window), end, device=self.slots.device)
            mask = keys <= queries
            if window is not None:
                mask &= keys > queries - window
            self._masks[run.first_query, window] = mask
        return mask


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


def _first_key(run: _Run, window: int | None) -> int:
    return 0 if window is None else max(0, run.start + 1 - window)


def _by_head(blocks: torch.Tensor) -> torch.Tensor:
    """Blocks as one row of slots, `[2 * num_kv_heads, num_slots, head_dim]`; a view."""
    return blocks.view(-1, *blocks.shape[2:]).transpose(0, 1)
