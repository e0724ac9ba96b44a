"""Memory that holds neither weights nor KV cache, term by term.

The terms are estimates made before anything runs; the server measures the same quantities after loading, and the
measured ones win (`status.sizing.measured`).
"""

from __future__ import annotations

from dataclasses import dataclass

from llmservice_planner.gpu import CPU, GIB, Device
from llmservice_planner.shape import DTYPE_BYTES, ModelShape

CUDA_CONTEXT_BYTES = 600 * 2**20
"""One process's CUDA context with PyTorch's and cuBLAS's kernels and workspaces loaded."""
GRAPH_POOL_BYTES = GIB // 2
"""CUDA graphs of the decode step and the buffers that they pin."""
NCCL_BYTES = GIB // 2
"""NCCL's channels and the all-reduce buffers of one card, where several share a model."""
PROCESS_BYTES = 512 * 2**20
"""On a CPU the processes live in the same memory. Measured with the tiny model under load: 255 MB for the engine beside
its weights, cache and activations, 66 MB for the front end; numba's compiler adds 110 MB, a tokenizer of 128k entries
100 MB or so."""
LOGITS_BYTES = 12
"""Per vocabulary entry and sequence: the sampler holds float32 logits at most three times over, for the rows of a mixed
batch are copied before they are drawn, and again before they are cut."""
SUMMED_ROWS_BYTES = 64 * 16
"""Per vocabulary entry: on a card the sampler sums 64 rows at a time in float64, and holds them twice."""


@dataclass(frozen=True, slots=True)
class OverheadTerm:
    """One part of the overhead, over all cards."""

    name: str
    total_bytes: int


def logits_row_bytes(shape: ModelShape) -> int:
    """What one more sequence in a step costs beside its KV cache: one row of logits (they are gathered on one card)."""
    return shape.vocab_size * LOGITS_BYTES


def fixed_terms(
    shape: ModelShape, device: Device, cards: int, dtype: str, max_num_batched_tokens: int
) -> tuple[OverheadTerm, ...]:
    """The terms that do not depend on how many sequences run, over all `cards`."""
    activations = OverheadTerm(
        f"activations of a step of {max_num_batched_tokens} tokens",
        cards * activation_bytes(shape, cards, dtype, max_num_batched_tokens),
    )
    if isinstance(device, CPU):
        process = OverheadTerm("Python, PyTorch and the tokenizer", PROCESS_BYTES)
        if not shape.tie_word_embeddings:
            return (process, activations)
        head = shape.vocab_size * shape.hidden_size * DTYPE_BYTES[dtype]
        return (process, OverheadTerm("the tied output head, packed beside the embedding", head), activations)
    terms = [
        OverheadTerm("CUDA context", cards * CUDA_CONTEXT_BYTES),
        activations,
        OverheadTerm("sampling, 64 rows in float64", cards * shape.vocab_size * SUMMED_ROWS_BYTES),
        OverheadTerm("CUDA graphs", cards * GRAPH_POOL_BYTES),
    ]
    if cards > 1:
        terms.append(OverheadTerm("NCCL buffers", cards * NCCL_BYTES))
        repeated = (cards - 1) * shape.replicated_parameters * DTYPE_BYTES[dtype]
        terms.append(OverheadTerm("weights that every card repeats (norms, routers, latents)", repeated))
    return tuple(terms)


def activation_bytes(shape: ModelShape, cards: int, dtype: str, num_tokens: int) -> int:
    """Peak of one card's temporaries in one layer, for a step of `num_tokens` tokens.

    Residual, normed input and the norm's float32 copy stay beside the larger of the two halves of a layer: q, k, v and
    the attention's output, or gate, up and the activated gate that up is multiplied into. Halves are split over the
    cards, the rest is not.
    """
    width = DTYPE_BYTES[dtype]
    attention = 2 * shape.heads * shape.head_dim + 2 * shape.kv_heads * shape.head_dim
    if shape.is_mla:
        attention = shape.heads * (2 * (shape.qk_nope_head_dim + shape.qk_rope_head_dim) + 2 * shape.v_head_dim)
    mlp = 3 * shape.intermediate_size
    if shape.num_experts:
        routed = shape.experts_per_token * shape.moe_intermediate_size + shape.shared_expert_intermediate_size
        mlp = max(mlp * bool(shape.dense_layers), 3 * routed)
    per_token = 2 * shape.hidden_size * width + shape.hidden_size * 4 + max(attention, mlp) * width // cards
    return num_tokens * per_token
