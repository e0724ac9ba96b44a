"""The interface of a backend: what a model and the runner need of the device that they compute on."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Literal, NamedTuple, Protocol, Self, TypeGuard, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from llmservice_planner.block_groups import BlockGroups
from llmservice_server.backend.quantized import QuantizedWeight
from llmservice_server.backend.sampling_batch import PenalizedRows, SamplingBatch
from llmservice_server.backend.transfer import to_device
from llmservice_server.types.messages import Fallback

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


class Heads(NamedTuple):
    """Of a layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def row(self) -> int:
        """Numbers in the keys of a token."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class KVCacheShape:
    """The paged KV cache of a model. A layer's window is None if a query sees all earlier tokens."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]  # one per layer
    block_size: int
    dtype: torch.dtype
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    has_sinks: bool = False  # each head, at least of some layers, has a score of no value that the softmax counts
    sliding_heads: Heads | None = None  # of the layers with a window, where they differ from the others
    sources: tuple[int, ...] = ()  # of each layer, the one whose keys and values it sees; empty: its own
    is_latent: bool = False  # the values are the keys, and are not stored

    @classmethod
    def of(cls, config: CausalShape, block_size: int, dtype: torch.dtype) -> Self:
        """Of a model."""
        return cls(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            windows=config.windows,
            block_size=block_size,
            dtype=dtype,
            softcap=config.softcap,
            has_sinks=config.has_sinks,
            sliding_heads=config.sliding_heads,
            sources=config.sources,
            is_latent=config.is_latent,
        )

    def heads(self, window: int | None) -> Heads:
        """Of the layers with such a window."""
        if window is None or self.sliding_heads is None:
            return Heads(self.num_heads, self.num_kv_heads, self.head_dim)
        return self.sliding_heads

    @property
    def largest_heads(self) -> Heads:
        """Those with the largest keys."""
        return max(map(self.heads, self.windows or (None,)), key=lambda heads: heads.row)

    def with_heads(self, heads: Heads, windows: Sequence[int | None]) -> Self:
        """Of layers that have keys and values of their own, and the same heads."""
        return replace(self, **heads._asdict(), windows=tuple(windows), sliding_heads=None, sources=())

    def kinds(self) -> list[Self]:
        """For each kind of heads, a shape with each of its windows once."""
        windows: dict[Heads, dict[int | None, None]] = {}
        for window in self.windows:
            windows.setdefault(self.heads(window), {})[window] = None
        return [self.with_heads(heads, [*each]) for heads, each in windows.items()]

    @property
    def is_uniform(self) -> bool:
        """Whether all layers have keys and values of their own, of one size."""
        return self.sliding_heads is None and not self.sources

    def source(self, layer: int) -> int:
        """The layer whose keys and values it sees."""
        return self.sources[layer] if self.sources else layer

    @property
    def is_plain(self) -> bool:
        """Whether its attention is a softmax of the scores and no more."""
        return self.softcap is None and not self.has_sinks

    @property
    def bytes_per_block(self) -> int:
        """What is stored of `block_size` tokens in a group's layers, and in an fp8 cache a scale for each row of it."""
        scale_bytes = 4 if self.dtype.itemsize == 1 else 0
        heads = self.largest_heads
        bytes_each = heads.head_dim * self.dtype.itemsize + scale_bytes
        return self.block_groups(1).num_layers * self.block_size * self.stored * heads.num_kv_heads * bytes_each

    @property
    def stored(self) -> int:
        """Rows of a token and a key head."""
        return 1 if self.is_latent else 2

    def block_groups(self, step_tokens: int) -> BlockGroups:
        """How many blocks a sequence takes, of which a step computes at most `step_tokens` tokens."""
        full, sliding = map(len, self._places)
        longest = max((window for window in self.windows if window is not None), default=None)
        return BlockGroups.of(self.block_size, full + sliding, sliding, longest, step_tokens)

    @property
    def layer_groups(self) -> list[list[list[int]]]:
        """Of each of the `block_groups`, the layers in each of its places; in one are several with small keys."""
        full, sliding = self._places
        if len(groups := self.block_groups(1)) == 1:
            return [sorted(full + sliding)]
        size = groups.num_layers
        return [kind[first : first + size] for kind in (full, sliding) for first in range(0, len(kind), size)]

    @property
    def _places(self) -> tuple[list[list[int]], list[list[int]]]:
        """The layers with keys and values of their own: those without a window, and those with one."""
        own = [layer for layer in range(len(self.windows)) if self.source(layer) == layer]
        full = [layer for layer in own if self.windows[layer] is None]
        sliding = [layer for layer in own if self.windows[layer] is not None]
        return _in_places(full, self._together(None)), _in_places(sliding, self._together(1))

    def _together(self, window: int | None) -> int:
        return self.largest_heads.row // self.heads(window).row


def _in_places(layers: list[int], together: int) -> list[list[int]]:
    return [layers[first : first + together] for first in range(0, len(layers), together)]


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """Tokens of a step that the previous step samples: only the device has them when the step is launched."""

    positions: Int64Array  # in the step's tokens
    rows: Int64Array  # in the sampled tokens
    sampled: torch.Tensor  # [num_rows], on the device

    def put(self, token_ids: torch.Tensor) -> None:
        """Write them to the step's `token_ids` `[num_tokens]`, on the device."""
        positions, rows = to_device(np.stack((self.positions, self.rows)), token_ids.device).unbind()
        known = self.sampled.index_select(0, rows).clamp_min(0)  # -1: the request will end with an error
        token_ids.index_copy_(0, positions, known.to(token_ids.dtype))


@dataclass(frozen=True, eq=False)
class StepInput:
    """What the device computes in one step: runs of tokens of several sequences, concatenated.

    Run `i` is the tokens [starts[i], starts[i] + counts[i]) of its sequence; all earlier ones are in the cache. Arrays
    of all sequences, not objects of each, because this is built for every sequence of every step.
    """

    token_ids: Int64Array  # [num_tokens]
    starts: Int64Array  # [num_seqs]
    counts: Int64Array  # [num_seqs]
    block_tables: Sequence[Sequence[int]]  # [num_seqs]: token `j` is in block `table[j // block_size]`; array("i")
    pending: PendingTokens | None = None
    more_tables: Sequence[Sequence[Sequence[int]]] = ()  # of each further group of layers; none: they share the first's

    @classmethod
    def of(cls, runs: Iterable[tuple[int, int, Sequence[int]]], token_ids: Sequence[int] | None = None) -> Self:
        """runs: start, number of tokens and block table of each. Without `token_ids` all are 0."""
        starts, counts, tables = zip(*runs, strict=True)
        ids = np.zeros(sum(counts), np.int64) if token_ids is None else np.array(token_ids, np.int64)
        return cls(ids, np.array(starts, np.int64), np.array(counts, np.int64), tables)

    def __len__(self) -> int:
        """The number of sequences."""
        return len(self.block_tables)

    @cached_property
    def is_decode(self) -> bool:
        """Whether every run is a single token."""
        return len(self.token_ids) == len(self.block_tables)

    @cached_property
    def rows(self) -> Int64Array:
        """`[num_seqs]`: the index of each run's first token."""
        return firsts_of(self.counts)

    @cached_property
    def blocks(self) -> Int32Array:
        """The block tables, concatenated."""
        return joined(self.block_tables)

    @cached_property
    def table_firsts(self) -> Int64Array:
        """`[num_seqs]`: the index of each table's first entry in `blocks`."""
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
    """The block tables, concatenated."""
    return np.frombuffer(b"".join([each if isinstance(each, array) else array("i", each) for each in tables]), np.int32)


def firsts_of(counts: Int64Array) -> Int64Array:
    """The index of the first item of each of several concatenated runs of `counts` items."""
    return np.cumsum(counts) - counts


def positions_of(starts: Int64Array, counts: Int64Array) -> tuple[Int64Array, Int64Array]:
    """The run and the position of each token of the concatenated runs [start, start + count)."""
    run = np.repeat(np.arange(len(counts)), counts)
    return run, np.arange(len(run)) + (starts - firsts_of(counts))[run]


class Attend(Protocol):
    """One step's attention, passed to the model's forward pass."""

    def __call__(
        self, layer: int, query: torch.Tensor, key_value: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Store the tokens' keys and values, then attend causally, each sequence to itself.

        query: `[num_tokens, num_heads, head_dim]`, rotated. key_value: `[num_tokens, 2 * num_kv_heads, head_dim]`,
        the rotated keys before the values. Both may be views of one fused product. sinks: `[num_heads]`, where
        the cache's shape says that there are some. Returns `[num_tokens, num_heads * head_dim]`.
        """


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotary embedding of a step's queries and keys, and the norm before it."""

    cos: torch.Tensor  # [num_tokens, 1, head_dim]
    sin: torch.Tensor  # likewise, the first half negated
    qk_norm: tuple[torch.Tensor, float] | None  # weights [num_heads + num_kv_heads, head_dim] and epsilon


@runtime_checkable
class RotatingAttend(Attend, Protocol):
    """An `Attend` that norms, rotates and stores in one pass."""

    def rotate_and_attend(
        self, layer: int, heads: torch.Tensor, rotation: Rotation, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`heads` `[num_tokens, num_heads + 2 * num_kv_heads, head_dim]`: the fused product, which is overwritten."""


def rotates(attend: Attend) -> TypeGuard[RotatingAttend]:
    """Whether it is a `RotatingAttend`. Cached by class, because the check takes as long as a matrix product."""
    return _is_rotating(type(attend))


@cache
def _is_rotating(kind: type[Attend]) -> bool:
    return issubclass(kind, RotatingAttend)


class Attention(Protocol):
    """Owns the KV cache and prepares each step once for all layers."""

    caches: list[torch.Tensor]  # of each layer, and their scales; `[num_blocks, ...]` each
    device: torch.device

    def prepare(self, step: StepInput) -> Attend:
        """The block tables must have a block for every token of the step, and for every token that these see."""

    def viewed(self, shape: KVCacheShape) -> Attention:
        """With the same cache, for other layers, of which there are as many or fewer.

        Where their keys are smaller by a whole number, the cache has as many times more blocks of them.
        """


Activation = Literal["silu", "gelu_tanh", "clamped_silu"]
"""Of an MLP's gate. `clamped_silu` bounds gate and up as well, and adds 1 to up (gpt-oss)."""
CLAMPED_LIMIT, CLAMPED_SLOPE = 7.0, 1.702
"""The bound, and the factor in the sigmoid, of `clamped_silu`."""


class Linear(Protocol):
    """A weight matrix and its bias."""

    bias: torch.Tensor | None

    @property
    def weight(self) -> torch.Tensor:
        """`[out, in]`, in any layout."""

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[num_rows, in]` to `[num_rows, out]`."""

    @property
    def nbytes(self) -> int:
        """Of the matrix, in its layout, and the bias."""


class LayerOps(Protocol):
    """The operations of a decoder between its matrix products and attention."""

    def add_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add `delta` to `hidden` `[num_tokens, size]` in place, if there is one; return the sum's RMS norm."""

    def gated(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """`activation(gate) * up` `[num_tokens, size]` of `gate_up` `[num_tokens, 2 * size]`; may overwrite it."""

    def logits(self, hidden: torch.Tensor, norm: torch.Tensor, eps: float, head: Linear) -> torch.Tensor:
        """Float32 `[num_rows, vocab_size]` of the last layer's states `[num_rows, size]`, before the final norm."""


@dataclass(slots=True)
class SelfAttention:
    """A layer's weights around the attention itself."""

    qkv: Linear
    qk_norm: torch.Tensor | None  # [num_heads + num_kv_heads, head_dim]
    o: Linear
    sinks: torch.Tensor | None = None  # [num_heads]

    def linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.o

    def map_linears(self, convert: Callable[[Linear], Linear]) -> None:
        self.qkv, self.o = convert(self.qkv), convert(self.o)

    @property
    def nbytes(self) -> int:
        others = sum(each.nbytes for each in (self.qk_norm, self.sinks) if each is not None)
        return self.qkv.nbytes + self.o.nbytes + others


class Mlp(Protocol):
    """What a layer computes of each token by itself."""

    def __call__(self, normed: torch.Tensor, ops: LayerOps) -> torch.Tensor:
        """What the layer adds to its states, `[num_tokens, hidden_size]`, as is `normed`."""

    def linears(self) -> tuple[Linear, ...]:
        """Its matrices that every token is multiplied with, in the order in which they are used."""

    def map_linears(self, convert: Callable[[Linear], Linear]) -> None:
        """Replace them, one after the other."""

    @property
    def nbytes(self) -> int:
        """Of all its weights."""


@dataclass(slots=True)
class DenseMlp:
    """Implements `Mlp`: a gated product, all of it for every token."""

    gate_up: Linear
    down: Linear
    activation: Activation = "silu"

    def __call__(self, normed: torch.Tensor, ops: LayerOps) -> torch.Tensor:
        return self.down(ops.gated(self.gate_up(normed), self.activation))

    def linears(self) -> tuple[Linear, ...]:
        return self.gate_up, self.down

    def map_linears(self, convert: Callable[[Linear], Linear]) -> None:
        self.gate_up, self.down = convert(self.gate_up), convert(self.down)

    @property
    def nbytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes


@dataclass(slots=True)
class DecoderLayer:
    """The weights of one layer, which a fused decode path reads as well as the model."""

    input_norm: torch.Tensor
    attention: SelfAttention
    post_attention_norm: torch.Tensor  # of the states, before the MLP
    mlp: Mlp
    attention_delta_norm: torch.Tensor | None = None  # of what attention adds to the states
    mlp_delta_norm: torch.Tensor | None = None  # of what the MLP adds to them

    @property
    def is_plain(self) -> bool:
        """Whether it is a layer of Llama's: two norms, no sinks, and a dense MLP with SiLU."""
        others = self.attention_delta_norm, self.mlp_delta_norm, self.attention.sinks
        return isinstance(self.mlp, DenseMlp) and self.mlp.activation == "silu" and all(each is None for each in others)

    @property
    def nbytes(self) -> int:
        norms = self.input_norm, self.post_attention_norm, self.attention_delta_norm, self.mlp_delta_norm
        return self.attention.nbytes + self.mlp.nbytes + sum(each.nbytes for each in norms if each is not None)


def linears_of(layer: DecoderLayer) -> tuple[Linear, ...]:
    """Its matrices that every token is multiplied with, in the order in which they are used."""
    return *layer.attention.linears(), *layer.mlp.linears()


class CausalShape(Protocol):
    """The sizes in a model's config that a backend needs."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def mlp_width(self) -> int:
        """The numbers of a token that its MLP holds at a time, at most."""

    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def windows(self) -> tuple[int | None, ...]: ...
    @property
    def softcap(self) -> float | None: ...
    @property
    def has_sinks(self) -> bool: ...
    @property
    def sliding_heads(self) -> Heads | None:
        """Of the layers with a window, where they differ from the others."""

    @property
    def sources(self) -> tuple[int, ...]:
        """Of each layer, the one whose keys and values it sees; empty: its own."""

    @property
    def is_latent(self) -> bool:
        """Whether values are keys."""

    @property
    def max_context(self) -> int: ...


class DecoderShape(CausalShape, Protocol):
    """The numbers that a `Decoder` has beside them."""

    @property
    def intermediate_size(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def embedding_scale(self) -> float: ...


class Rotary(Protocol):
    @property
    def inverse_frequencies(self) -> torch.Tensor: ...
    @property
    def scale(self) -> float: ...

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines of `positions` `[num_tokens]`, each `[num_tokens, 1, head_dim]`."""


class Model(Protocol):
    """A causal language model, as a backend and the runner see it."""

    device: torch.device
    dtype: torch.dtype
    ops: LayerOps  # a model of other operations does not use it

    @property
    def modules(self) -> Sequence[Mapping[str, int]]:
        """Of each matrix, in the order of `map_linears`, the modules of the checkpoint that it is fused of.

        With the outputs of each, in order; none where adapters cannot change the matrix.
        """

    @property
    def config(self) -> CausalShape: ...

    @property
    def weight_bytes(self) -> int: ...

    def linears(self) -> Iterator[Linear]:
        """Every matrix, the head last."""

    def map_linears(self, convert: Callable[[Linear], Linear]) -> None:
        """Replace every matrix, one after the other, so that only one is held twice."""

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """The states `[num_tokens, hidden_size]` that `logits` and `norm_states` take; may be overwritten by them."""

    def forward_by_piece(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend, rows: int | None = None
    ) -> Iterator[torch.Tensor | None]:
        """Yields None after each piece of the work, and then what `forward` returns. `rows`: tokens of a piece."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits `[num_rows, vocab_size]` of the given rows of `forward`'s result."""

    def norm_states(self, hidden: torch.Tensor) -> torch.Tensor:
        """The model's last states, `[num_rows, hidden_size]`, of the given rows of `forward`'s result."""


@runtime_checkable
class Decoder(Model, Protocol):
    """A model whose layers are `DecoderLayer`s, so that a backend can compute or capture them itself."""

    embed_tokens: torch.Tensor
    layers: list[DecoderLayer]
    lm_head: Linear

    @property
    def config(self) -> DecoderShape: ...

    @property
    def rotaries(self) -> Sequence[Rotary]: ...

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The states before the first layer, `[num_tokens, hidden_size]`."""

    def rotations(self, positions: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Cosines and signed sines of `positions` `[num_tokens]`, of each of the `rotaries`."""

    def rotary_of(self, index: int) -> int:
        """Which of the `rotaries` a layer has."""

    def project(self, index: int, states: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        """A layer before its attention: queries, keys and values `[num_tokens, heads, head_dim]`, not rotated.

        Of `states` `[num_tokens, hidden_size]`, to which `delta`, the layer before's result, is added in place.
        """

    def finish(self, index: int, states: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """A layer after its attention: what it adds to `states`, which get the attention's part in place."""


def each_linear(model: Model) -> list[Linear]:
    """Every matrix, experts included, in the order of `map_linears`."""
    found: list[Linear] = []

    def note(linear: Linear) -> Linear:
        found.append(linear)
        return linear

    model.map_linears(note)
    return found


class DecodePath(Protocol):
    """A faster implementation of some steps."""

    def takes(self, step: StepInput) -> bool:
        """Whether it can compute such a step."""

    def run(self, step: StepInput) -> torch.Tensor:
        """`Decoder.forward`'s states, `[num_seqs, hidden_size]`; valid until the next run."""


class Backend(Protocol):
    """One device's implementation for one model. Its name is for logs only; no code compares it."""

    name: str  # for the log
    reason: str  # why it was chosen
    device: torch.device
    shape: KVCacheShape
    fallbacks: dict[Fallback, str]  # what torch computes because our kernels failed their check, and why

    @property
    def overlaps(self) -> bool:
        """Whether a launch returns before its step is computed, so that the next one can be planned meanwhile."""

    @property
    def prefill_tokens(self) -> int | None:
        """Prompt tokens of a step, beyond which the device computes no faster; None: no bound."""

    @property
    def profile_limit_s(self) -> float | None:
        """A profiling step that would take longer is estimated instead; None: never."""

    @property
    def shares_memory(self) -> bool:
        """Whether the device's memory is shared with other processes."""

    def keeps(self, weight: QuantizedWeight) -> bool:
        """Whether products with such a matrix are no slower than with a dense one: it is then held as it is."""

    def prepare(self, model: Model) -> None:
        """Set a loaded model's layer operations, and convert its matrices to the fastest layout."""

    def attention(self, num_blocks: int) -> Attention:
        """Attention with a new KV cache. Raises RuntimeError (torch's) if it cannot be allocated."""

    def decode_path(
        self, model: Model, attention: Attention, *, max_num_seqs: int, max_model_len: int
    ) -> DecodePath | None:
        """Called before anything is cached. None if there is none, or if its check failed (`fallbacks`)."""

    def decode_path_bytes(self, model: Model, *, max_num_seqs: int, max_model_len: int) -> int:
        """The memory that `decode_path` will take."""

    def choose_tokens(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """The next token of each row of float32 logits `[num_rows, vocab_size]`, overwritten: int64 `[num_rows]`.

        -1 where a logit is NaN or infinite, or all are minus infinity.
        """

    def penalize(self, logits: torch.Tensor, penalized: PenalizedRows) -> None:
        """Apply repetition, presence and frequency penalties to float32 logits `[num_rows, vocab_size]`, in place.

        Repetition over prompt and answer (CTRL, Keskar et al., 2019): positive logits are divided, negative multiplied.
        Then over the answer, as OpenAI defines them: minus presence, once; minus frequency, as often as it occurs.
        """

    def total_bytes(self) -> int:
        """The memory that can be used."""

    def step_bytes(self, step: Callable[[], None], *, cache_bytes: int, weight_bytes: int) -> int | None:
        """The memory of `step` and other users of the device, besides weights and cache; None: cannot be measured."""

    def synchronize(self) -> None:
        """Wait until all work is done. Raises RuntimeError if the device is lost."""

    def free_bytes(self) -> int:
        """The device's free memory, after its work is done and torch has released its cached memory."""

    def release_memory(self) -> None:
        """Release the memory that torch caches."""
