"""Estimates of the memory that is neither weights nor KV cache, by term.

The server measures the same quantities after loading, which replace the estimates (`status.sizing.measured`).
"""

from __future__ import annotations

from dataclasses import dataclass

from llmservice_planner.model.quantization import Quantization, WeightFormat
from llmservice_planner.model.shape import DTYPE_BYTES, ModelShape
from llmservice_planner.sizing.gpu import CPU, GIB, Device

CUDA_CONTEXT_BYTES = 600 * 2**20
"""One process's CUDA context with PyTorch's and cuBLAS's kernels and workspaces loaded."""
GRAPH_POOL_BYTES = GIB // 2
"""CUDA graphs of the decode step and their buffers."""
NCCL_BYTES = GIB // 2
"""NCCL's channels and the all-reduce buffers of one GPU, with tensor parallelism."""
PROCESS_BYTES = 512 * 2**20
"""The server's processes, which on a CPU use the same memory. Measured with the tiny model under load: 255 MB for the
engine without weights, cache and activations, 66 MB for the HTTP process; numba's compiler adds 110 MB, a tokenizer of
128k entries about 100 MB."""
LOGITS_BYTES = 16
"""Per vocabulary entry and sequence: the sampler has up to four copies of the float32 logits, because rows of a mixed
batch are copied before sampling, before the top-k/top-p mask, and for log-probabilities."""
SUMMED_ROWS_BYTES = 64 * 16
"""Per vocabulary entry: on a GPU the sampler sums 64 rows at a time in float64, with two copies."""

MASK_BYTES = 6
"""Per query and key of an encoder: two masks in bool (all tokens, a window), and one that attention copies to float."""


@dataclass(frozen=True, slots=True)
class OverheadTerm:
    """One part of the overhead, over all GPUs."""

    name: str
    total_bytes: int


def logits_row_bytes(shape: ModelShape) -> int:
    """The memory of a sequence in a step besides its KV cache: one row of logits, which are gathered on one GPU."""
    return shape.vocab_size * LOGITS_BYTES


def fixed_terms(
    shape: ModelShape,
    device: Device,
    device_count: int,
    dtype: str,
    max_num_batched_tokens: int,
    quantization: Quantization = "auto",
) -> tuple[OverheadTerm, ...]:
    """The terms that do not depend on the number of sequences, over all `device_count` GPUs."""
    activations = OverheadTerm(
        f"activations of a step of {max_num_batched_tokens} tokens",
        device_count * activation_bytes(shape, device_count, dtype, max_num_batched_tokens),
    )
    if isinstance(device, CPU):
        return (OverheadTerm("Python, PyTorch and the tokenizer", PROCESS_BYTES), activations)
    context = OverheadTerm("CUDA context", device_count * CUDA_CONTEXT_BYTES)
    if shape.is_encoder:
        return (context, activations)
    terms = [
        context,
        activations,
        OverheadTerm("sampling, 64 rows in float64", device_count * shape.vocab_size * SUMMED_ROWS_BYTES),
        OverheadTerm("CUDA graphs", device_count * GRAPH_POOL_BYTES),
    ]
    if dequantized := dequantized_bytes(shape, dtype, quantization):
        terms.append(OverheadTerm("the largest quantised matrix, dequantised for steps of many tokens", dequantized))
    if device_count > 1:
        terms.append(OverheadTerm("NCCL buffers", device_count * NCCL_BYTES))
        repeated = (device_count - 1) * shape.replicated_parameters * DTYPE_BYTES[dtype]
        terms.append(OverheadTerm("weights that every GPU repeats (norms, routers, latents)", repeated))
    return tuple(terms)


def dequantized_bytes(shape: ModelShape, dtype: str, quantization: Quantization) -> int:
    """Of the largest matrix that a GPU dequantises for a step of many tokens; 0: it dequantises none."""
    form = WeightFormat.parse(shape.quantization) if shape.quantization is not None else None
    held = quantization if form is None else form.held_as(quantization, on_cpu=False)
    if held in ("auto", "dense"):
        return 0
    if held == "stored" and (form is None or form.is_fp8_product or form.is_for_experts):
        return 0
    has_mlp = not shape.num_experts or shape.dense_layers
    widths = (
        (shape.heads + 2 * shape.kv_heads) * shape.head_dim,
        2 * shape.intermediate_size * bool(has_mlp),
        2 * shape.shared_expert_intermediate_size,
    )
    return max(widths) * shape.hidden_size * DTYPE_BYTES[dtype]


def adapter_term(
    shape: ModelShape, dtype: str, max_loras: int, rank: int, *, experts: bool, on_cpu: bool
) -> OverheadTerm:
    """The slots of LoRA adapters, allocated before the KV cache; on a CPU one more is read at a time."""
    slots = max_loras + on_cpu
    return OverheadTerm(
        f"{max_loras} LoRA adapters of rank {rank}{' with experts' if experts else ''}"
        f"{', and one that is read' if on_cpu else ''}",
        slots * shape.adapter_slot_bytes(rank, dtype, experts=experts),
    )


def activation_bytes(shape: ModelShape, device_count: int, dtype: str, num_tokens: int) -> int:
    """Peak memory of one GPU's temporaries in one layer, for a step of `num_tokens` tokens.

    It consists of the residual, the normed input, the norm's float32 copy, and the larger half of a layer: q, k, v and
    the attention's output, or gate, up and the activated gate; each expert of a token has rows of its own, before and
    after. Only the halves are split over the GPUs. An encoder has masks beside them.
    """
    width = DTYPE_BYTES[dtype]
    attention = 2 * shape.heads * shape.head_dim + 2 * shape.kv_heads * shape.head_dim
    if shape.is_mla:
        attention = shape.heads * (2 * (shape.qk_nope_head_dim + shape.qk_rope_head_dim) + 2 * shape.v_head_dim)
    mlp = 3 * shape.intermediate_size
    if shape.num_experts:
        routed = shape.experts_per_token * (3 * shape.moe_intermediate_size + 2 * shape.hidden_size)
        mlp = max(mlp * bool(shape.dense_layers), routed + 3 * shape.shared_expert_intermediate_size)
    per_token = 2 * shape.hidden_size * width + shape.hidden_size * 4 + max(attention, mlp) * width // device_count
    if shape.is_encoder:
        per_token += (shape.max_position_embeddings or 0) * MASK_BYTES
    return num_tokens * per_token
