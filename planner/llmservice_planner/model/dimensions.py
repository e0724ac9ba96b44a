"""The dimensions of a decoder's layers, and the parameters that they have in a known layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llmservice_planner.model.config import MOST_LAYERS, ShapeError


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimensions:
    """Raises `ShapeError` if they contradict each other."""

    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool = False
    sliding_window: int | None = None
    """Tokens that a sliding-window layer attends to, including the current one."""
    sliding_layers: int = 0
    """Number of sliding-window layers; the others attend to all tokens."""
    full_kv_heads: int = 0
    """This and the next: of the layers that attend to all tokens, where they differ from the others; 0: the same."""
    full_head_dim: int = 0
    shared_layers: int = 0
    """Layers that use the keys and values of earlier ones (Gemma 3n and 4)."""
    shared_sliding_layers: int = 0
    """Those of them with a window."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    has_sinks: bool = False
    """A parameter of each head in the softmax (gpt-oss)."""
    norms_per_layer: int = 2
    num_experts: int = 0
    experts_per_token: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    """Total width of the shared experts."""
    shared_expert_gate: bool = False
    router_bias: bool = False
    dense_layers: int = 0
    """Layers of a mixture-of-experts model with a dense MLP (the first ones of DeepSeek)."""
    kv_lora_rank: int = 0
    """Width of the latent of multi-head latent attention; 0 for ordinary attention."""
    q_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "hidden_size", "intermediate_size", "heads", "kv_heads", "head_dim", "vocab_size"):
            if getattr(self, name) < 1:
                raise ShapeError(f"{name} is {getattr(self, name)}, expected at least 1")
        for kv_heads in (self.kv_heads, self.full_kv_heads or self.kv_heads):
            if self.heads % kv_heads:
                raise ShapeError(f"heads {self.heads} is no multiple of kv_heads {kv_heads}")
        self._check_layers()
        if self.num_experts and not 1 <= self.experts_per_token <= self.num_experts:
            raise ShapeError(f"experts_per_token {self.experts_per_token} must be between 1 and {self.num_experts}")
        if self.num_experts and not self.moe_intermediate_size:
            raise ShapeError("moe_intermediate_size is missing: a mixture of experts needs the width of one expert")
        if self.is_mla and not (self.qk_nope_head_dim and self.qk_rope_head_dim and self.v_head_dim):
            raise ShapeError("kv_lora_rank needs qk_nope_head_dim, qk_rope_head_dim and v_head_dim beside it")

    def _check_layers(self) -> None:
        if self.layers > MOST_LAYERS:
            raise ShapeError(f"layers is {self.layers}, expected at most {MOST_LAYERS}")
        if self.sliding_layers > self.layers or self.dense_layers > self.layers:
            raise ShapeError(f"sliding_layers and dense_layers cannot exceed the {self.layers} layers")
        if min(self.own_layers) < 0 or not any(self.own_layers):
            raise ShapeError(f"shared_layers is {self.shared_layers}, expected fewer than the {self.layers} layers")
        if bool(self.sliding_window) != bool(self.sliding_layers):
            raise ShapeError("sliding_window and sliding_layers go together: give both or neither")

    @property
    def is_mla(self) -> bool:
        return self.kv_lora_rank > 0

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers if self.num_experts else 0

    @property
    def own_layers(self) -> tuple[int, int]:
        """Layers with keys and values of their own that attend to all tokens, and those with a window."""
        sliding = self.sliding_layers - self.shared_sliding_layers
        return self.layers - self.shared_layers - sliding, sliding

    @property
    def layout_parameters(self) -> int:
        """All parameters including embeddings (a tied head counts once), those of the known layouts."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        norms = self.layers * self.norms_per_layer * self.hidden_size + self.hidden_size
        dense = (self.layers - self.moe_layers) * self._mlp_parameters()
        moe = self.moe_layers * self._moe_parameters()
        return embeddings + norms + self.layers * self._attention_parameters() + dense + moe

    @property
    def expert_parameters(self) -> int:
        """Parameters of one routed expert of one layer."""
        biases = (2 * self.moe_intermediate_size + self.hidden_size) * self.mlp_bias
        return 3 * self.hidden_size * self.moe_intermediate_size + biases

    @property
    def replicated_parameters(self) -> int:
        """Parameters that tensor parallelism replicates on every GPU: norms, routers, MLA's down-projections."""
        per_layer = self.norms_per_layer * self.hidden_size + 2 * self.head_dim * self.qk_norm
        if self.is_mla:
            per_layer += self._mla_down()
        router = self.num_experts * (self.hidden_size + self.router_bias)
        return self.layers * per_layer + self.moe_layers * router + self.hidden_size

    def matrices(self, *, only_experts: bool) -> Iterator[tuple[int, int, int]]:
        """How many there are, with so many outputs and inputs; not the head and routers."""
        yield from self._mlp(self.moe_layers * self.num_experts, self.moe_intermediate_size)
        if only_experts:
            return
        if self.is_mla:  # one of several sizes
            yield self.layers, self._mla_parameters() // self.hidden_size, self.hidden_size
        else:
            yield self.layers, (self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden_size
            yield self.layers, self.hidden_size, self.heads * self.head_dim
        yield from self._mlp(self.layers - self.moe_layers, self.intermediate_size)
        yield from self._mlp(self.moe_layers, self.shared_expert_intermediate_size)

    def _mlp(self, count: int, width: int) -> Iterator[tuple[int, int, int]]:
        if count and width:
            yield count, 2 * width, self.hidden_size
            yield count, self.hidden_size, width

    @property
    def layout_features(self) -> int:
        """Inputs and outputs of all linear layers that adapters change, without experts; a tied head is one too."""
        queries, keys, hidden = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.hidden_size
        attention = 4 * hidden + 2 * queries + 2 * keys
        if self.is_mla:
            attention = self._mla_features()
        dense = (self.layers - self.moe_layers) * 3 * (hidden + self.intermediate_size)
        router = hidden + self.num_experts
        shared = 3 * (hidden + self.shared_expert_intermediate_size) * bool(self.shared_expert_intermediate_size)
        moe = self.moe_layers * (router + shared + (hidden + 1) * self.shared_expert_gate)
        return self.layers * attention + dense + moe + hidden + self.vocab_size

    @property
    def layout_expert_features(self) -> int:
        """Of experts, as `WeightCounts.expert_features`."""
        return self.moe_layers * self.num_experts * (3 * self.hidden_size + 5 * self.moe_intermediate_size)

    def _mla_features(self) -> int:
        queries = self.heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        latents = self.hidden_size + self.kv_lora_rank + self.qk_rope_head_dim
        expansion = self.kv_lora_rank + self.heads * (self.qk_nope_head_dim + self.v_head_dim)
        output = self.heads * self.v_head_dim + self.hidden_size
        return self.hidden_size + 2 * self.q_lora_rank + queries + latents + expansion + output

    def _mlp_parameters(self) -> int:
        biases = (2 * self.intermediate_size + self.hidden_size) * self.mlp_bias
        return 3 * self.hidden_size * self.intermediate_size + biases

    def _moe_parameters(self) -> int:
        shared = (
            3 * self.hidden_size * self.shared_expert_intermediate_size + self.hidden_size * self.shared_expert_gate
        )
        router = self.num_experts * (self.hidden_size + self.router_bias)
        return self.num_experts * self.expert_parameters + shared + router

    def _attention_parameters(self) -> int:
        if self.is_mla:
            return self._mla_parameters()
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        weights = self.hidden_size * (2 * queries + 2 * keys)
        biases = (queries + 2 * keys) * self.qkv_bias + self.hidden_size * self.o_bias
        return weights + biases + 2 * self.head_dim * self.qk_norm + self.heads * self.has_sinks

    def _mla_parameters(self) -> int:
        query_dim = self.heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        queries = (self.q_lora_rank or self.hidden_size) * query_dim
        keys_values = self.kv_lora_rank * self.heads * (self.qk_nope_head_dim + self.v_head_dim)
        return queries + keys_values + self.heads * self.v_head_dim * self.hidden_size + self._mla_down()

    def _mla_down(self) -> int:
        """Parameters of the down-projections to the latents and of their norms."""
        queries = self.hidden_size * self.q_lora_rank + self.q_lora_rank
        return queries + self.hidden_size * (self.kv_lora_rank + self.qk_rope_head_dim) + self.kv_lora_rank
