"""The interface of a backend: what a model and the runner need of the device that they compute on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeGuard, runtime_checkable

import torch

from llmservice_server.backend.cache_shape import CausalShape, KVCacheShape
from llmservice_server.backend.layers import DecoderLayer, LayerOps, Linear
from llmservice_server.backend.quantized import QuantizedWeight
from llmservice_server.backend.sampling_batch import PenalizedRows, SamplingBatch
from llmservice_server.backend.step_input import StepInput
from llmservice_server.types.messages import Fallback

if TYPE_CHECKING:
    from llmservice_server.backend.experts import Mixture


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

        With the outputs of each, in order; none where adapters cannot change the matrix. Those of experts are named
        `….experts.NUMBER.PART`.
        """

    def renamed(self, module: str) -> list[str]:
        """What the model calls a module of a checkpoint; several where it splits a matrix by its outputs."""

    @property
    def config(self) -> CausalShape: ...

    @property
    def weight_bytes(self) -> int: ...

    def linears(self) -> Iterator[Linear]:
        """Every matrix that all tokens are multiplied with, so none of experts; the head last."""

    def map_linears(self, convert: Callable[[Linear], Linear]) -> None:
        """Replace every matrix, one after the other, so that only one is held twice."""

    def mixtures(self) -> Iterator[Mixture]:
        """Of the layers that have experts."""

    def plain_matrices(self) -> Iterator[PlainMatrix]:
        """Those that transformers' code multiplies with, and adapters may change."""

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


class RowFactors(NamedTuple):
    """What an adapter adds to a matrix for some rows of a step: `up`, transposed, times `down`."""

    rows: slice
    down: torch.Tensor  # [rank, in]
    up: torch.Tensor  # [rank, out]
    others: torch.Tensor | None = None  # which columns a row lacks where those of several adapters are side by side

    def keep(self, low: torch.Tensor) -> torch.Tensor:
        """Of `[..., rows, rank]` what is of a row's own adapter."""
        return low if self.others is None else low.masked_fill(self.others, 0)


def no_changes() -> Iterator[RowFactors]:
    """Of a matrix without adapters."""
    return iter(())


class PlainMatrix(Protocol):
    """A matrix that no backend converts."""

    name: str  # of its module in the checkpoint
    weight: torch.Tensor  # [out, in]
    changes: Callable[[], Iterator[RowFactors]]  # by the adapters of a step


def each_linear(model: Model) -> list[Linear]:
    """Every matrix, experts included, in the order of `map_linears`."""
    found: list[Linear] = []

    def note(linear: Linear) -> Linear:
        found.append(linear)
        return linear

    model.map_linears(note)
    return found


class RowAdapters(Protocol):
    """The adapters of a model, as a decode path applies them: the same work, whichever a row has."""

    num_slots: int

    def by_row(self, slots: torch.Tensor) -> AbstractContextManager[None]:
        """Within it, the model's products include the adapter in the slot of each row, int32 `[num_rows]`; -1: none."""

    def trial(self) -> AbstractContextManager[None]:
        """Within it, all slots have random adapters; before and after, none."""


class DecodePath(Protocol):
    """A faster implementation of some steps."""

    def adapt(self, adapters: RowAdapters) -> None:
        """Take steps with adapters too, where it can. Called before anything is cached."""

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

    def decode_path_bytes(self, model: Model, *, max_num_seqs: int, max_model_len: int, adapts: bool) -> int:
        """The memory that `decode_path` will take, and its `adapt` where it `adapts`."""

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
        """Release the memory that torch and the C library keep for later."""
