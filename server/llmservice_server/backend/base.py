"""The interface of a backend: what a model and the runner ask of the device that they compute on."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Protocol, Self, TypeGuard, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from llmservice_server.backend.sampling_batch import SamplingBatch
from llmservice_server.backend.transfer import to_device

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class KVCacheShape:
    """The paged KV cache of a model. A layer's window is None where a query sees every earlier token."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]  # one per layer
    block_size: int
    dtype: torch.dtype

    @property
    def bytes_per_block(self) -> int:
        """Keys and values of `block_size` tokens in every layer, and an fp8 cache's scale for each of them."""
        scale_bytes = 4 if self.dtype.itemsize == 1 else 0
        bytes_each = self.head_dim * self.dtype.itemsize + scale_bytes
        return len(self.windows) * self.block_size * 2 * self.num_kv_heads * bytes_each


@dataclass(frozen=True, slots=True)
class LateTokens:
    """Tokens of a step that the step before it draws: only the device knows them when the step is launched."""

    places: Int64Array  # among the step's tokens
    rows: Int64Array  # among the tokens drawn
    drawn: torch.Tensor  # [num_rows], on the device

    def put(self, token_ids: torch.Tensor) -> None:
        """Put them into the step's `token_ids` `[num_tokens]`, on the device."""
        places, rows = to_device(np.stack((self.places, self.rows)), token_ids.device).unbind()
        known = self.drawn.index_select(0, rows).clamp_min(0)  # -1: its request is about to end with an error
        token_ids.index_copy_(0, places, known.to(token_ids.dtype))


@dataclass(frozen=True, eq=False)
class StepInput:
    """What the device computes in one step: runs of tokens of several sequences, laid end to end.

    Run `i` is the tokens [starts[i], starts[i] + counts[i]) of its sequence; all earlier ones are in the cache. It is
    made column by column, not token by token, because that is done for every sequence of every step.
    """

    token_ids: Int64Array  # [num_tokens]
    starts: Int64Array  # [num_seqs]
    counts: Int64Array  # [num_seqs]
    block_tables: Sequence[Sequence[int]]  # [num_seqs]: token `j` is in block `table[j // block_size]`; array("i")
    late: LateTokens | None = None

    @classmethod
    def of(cls, runs: Iterable[tuple[int, int, Sequence[int]]], token_ids: Sequence[int] | None = None) -> Self:
        """Of each run: its start, its number of tokens and its sequence's block table. No `token_ids`: all are 0."""
        starts, counts, tables = zip(*runs, strict=True)
        ids = np.zeros(sum(counts), np.int64) if token_ids is None else np.array(token_ids, np.int64)
        return cls(ids, np.array(starts, np.int64), np.array(counts, np.int64), tables)

    def __len__(self) -> int:
        """The number of sequences."""
        return len(self.block_tables)

    @cached_property
    def is_decode(self) -> bool:
        """Every run is a single token."""
        return len(self.token_ids) == len(self.block_tables)

    @cached_property
    def rows(self) -> Int64Array:
        """`[num_seqs]`: each run's first token among the step's."""
        return firsts_of(self.counts)

    @cached_property
    def blocks(self) -> Int32Array:
        """The block tables, one behind the other."""
        return joined(self.block_tables)

    @cached_property
    def table_firsts(self) -> Int64Array:
        """`[num_seqs]`: where each table begins in `blocks`."""
        return firsts_of(np.fromiter(map(len, self.block_tables), np.int64, len(self.block_tables)))

    @property
    def positions(self) -> Int64Array:
        """`[num_tokens]`: each token's position in its sequence."""
        return self.starts if self.is_decode else positions_of(self.starts, self.counts)[1]

    def slots(self, block_size: int) -> Int64Array:
        """`[num_tokens]`: each token's slot in the cache, `block * block_size + offset`."""
        first_blocks, positions = self.table_firsts, self.starts
        if not self.is_decode:
            run, positions = positions_of(self.starts, self.counts)
            first_blocks = first_blocks[run]
        blocks = self.blocks[first_blocks + positions // block_size].astype(np.int64)
        slots: Int64Array = blocks * block_size + positions % block_size
        return slots


def joined(tables: Sequence[Sequence[int]]) -> Int32Array:
    """Block tables, one behind the other."""
    return np.frombuffer(b"".join([each if isinstance(each, array) else array("i", each) for each in tables]), np.int32)


def firsts_of(counts: Int64Array) -> Int64Array:
    """Where each of several runs of `counts` items begins, when they are laid end to end."""
    return np.cumsum(counts) - counts


def positions_of(starts: Int64Array, counts: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Of each token of the runs [start, start + count), laid end to end: its run's number, and its position."""
    run = np.repeat(np.arange(len(counts)), counts)
    return run, np.arange(len(run)) + (starts - firsts_of(counts))[run]


class Attend(Protocol):
    """One step's attention, given to the model's forward pass."""

    def __call__(self, layer: int, query: torch.Tensor, key_value: torch.Tensor) -> torch.Tensor:
        """Store the tokens' keys and values, then attend causally, each sequence to itself.

        query: `[num_tokens, num_heads, head_dim]`, rotated. key_value: `[num_tokens, 2 * num_kv_heads, head_dim]`,
        the rotated keys before the values. Both may be views of one fused product. Returns `[num_tokens, num_heads *
        head_dim]`.
        """


@dataclass(frozen=True, slots=True)
class Rotation:
    """What a step's queries and keys go through before they meet."""

    cos: torch.Tensor  # [num_tokens, 1, head_dim]
    sin: torch.Tensor  # likewise, the first half negated
    qk_norm: tuple[torch.Tensor, float] | None  # weights [num_heads + num_kv_heads, head_dim] and epsilon


@runtime_checkable
class RotatingAttend(Attend, Protocol):
    """One that norms, rotates and stores in one pass."""

    def rotate_and_attend(self, layer: int, heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """`heads` `[num_tokens, num_heads + 2 * num_kv_heads, head_dim]`: the fused product as it comes; changed."""


def rotates(attend: Attend) -> TypeGuard[RotatingAttend]:
    """Whether it is a `RotatingAttend`. Decided by its class, since inspecting methods costs as much as a product."""
    return _is_rotating(type(attend))


@cache
def _is_rotating(kind: type[Attend]) -> bool:
    return issubclass(kind, RotatingAttend)


class Attention(Protocol):
    """Owns the KV cache and prepares each step once for all layers."""

    caches: list[torch.Tensor]  # one a layer, and what belongs to them; `[num_blocks, ...]` each
    device: torch.device

    def prepare(self, step: StepInput) -> Attend:
        """Every token of the step has its block in its table."""


class Linear(Protocol):
    """A matrix that hidden states are multiplied with."""

    weight: torch.Tensor  # [out, in], in whatever layout
    bias: torch.Tensor | None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[num_rows, in]` to `[num_rows, out]`."""

    @property
    def nbytes(self) -> int:
        """Of the matrix, whatever its layout, and the bias."""


class LayerOps(Protocol):
    """What a decoder computes between its matrix products and its attention."""

    def add_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add `delta` to `hidden` `[num_tokens, size]` in place, where there is one; the sum's RMS norm."""

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`silu(gate) * up` `[num_tokens, size]` of `gate_up` `[num_tokens, 2 * size]`, which may be overwritten."""

    def logits(self, hidden: torch.Tensor, norm: torch.Tensor, eps: float, head: Linear) -> torch.Tensor:
        """Float32 `[num_rows, vocab_size]` of the last layer's states `[num_rows, size]`, not yet normed."""


@dataclass(slots=True)
class DecoderLayer:
    """The weights of one layer, which a fused decode path reads as well as the model."""

    input_norm: torch.Tensor
    qkv: Linear
    qk_norm: torch.Tensor | None  # [num_heads + num_kv_heads, head_dim]: the query heads' row, then the key heads'
    o: Linear
    post_attention_norm: torch.Tensor
    gate_up: Linear
    down: Linear


def linears_of(layer: DecoderLayer) -> tuple[Linear, Linear, Linear, Linear]:
    """Its matrices, in the order in which they are used."""
    return layer.qkv, layer.o, layer.gate_up, layer.down


class DecoderShape(Protocol):
    """The numbers of a model's config that a backend needs."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...


class Rotary(Protocol):
    @property
    def inverse_frequencies(self) -> torch.Tensor: ...
    @property
    def scale(self) -> float: ...


class Decoder(Protocol):
    """A model, as a backend sees it."""

    device: torch.device
    dtype: torch.dtype
    ops: LayerOps
    embed_tokens: torch.Tensor
    layers: list[DecoderLayer]
    lm_head: Linear

    @property
    def config(self) -> DecoderShape: ...
    @property
    def rotary(self) -> Rotary: ...

    def map_linears(self, convert: Callable[[Linear], Linear]) -> None:
        """Replace every matrix, one after the other."""

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """The last layer's states `[num_tokens, hidden_size]`, not yet normed."""


class DecodePath(Protocol):
    """A faster way to compute steps that are decodes only."""

    def takes(self, step: StepInput) -> bool:
        """Whether it can compute such a step."""

    def run(self, step: StepInput) -> torch.Tensor:
        """`Decoder.forward`'s states, `[num_seqs, hidden_size]`; valid until the next run."""


class Backend(Protocol):
    """How one device computes one model. Start-up and the runner ask it, and never compare its name."""

    name: str  # for the log
    reason: str  # why it was chosen
    device: torch.device
    shape: KVCacheShape

    @property
    def overlaps(self) -> bool:
        """A launch returns before its step is computed, so that planning the next one beside it saves time."""

    @property
    def prefill_tokens(self) -> int | None:
        """Of a step, beyond which the device computes no faster; None: no such bound."""

    @property
    def profile_limit_s(self) -> float | None:
        """A profiling step that would take longer is estimated instead; None: never."""

    @property
    def shares_memory(self) -> bool:
        """With the processes of this server and with others."""

    def prepare(self, model: Decoder) -> None:
        """Give a loaded model its layer operations, and its matrices the layout that is fastest here."""

    def attention(self, num_blocks: int) -> Attention:
        """With a cache of its own. Raises RuntimeError (torch's) where that cannot be allocated."""

    def decode_path(
        self, model: Decoder, attention: Attention, *, max_num_seqs: int, max_model_len: int
    ) -> DecodePath | None:
        """Made before anything is cached. None where there is none, or where its check failed, with a warning."""

    def decode_path_bytes(self, model: Decoder, *, max_num_seqs: int, max_model_len: int) -> int:
        """The memory that `decode_path` will take."""

    def choose_tokens(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """The next token of each row of float32 logits `[num_rows, vocab_size]`, overwritten: int64 `[num_rows]`.

        -1 where a logit is NaN or infinite, or all are minus infinity.
        """

    def total_bytes(self) -> int:
        """The memory that can be used."""

    def step_bytes(self, step: Callable[[], None], *, cache_bytes: int, weight_bytes: int) -> int | None:
        """What `step` takes beside weights and cache, with what else uses the device; None: it cannot be measured."""

    def synchronize(self) -> None:
        """Wait until all work is done. Raises RuntimeError where the device is lost."""

    def free_bytes(self) -> int:
        """The device's free memory, once its work is done and torch has given back what it keeps for later use."""

    def release_memory(self) -> None:
        """Give back what torch keeps for later use."""
