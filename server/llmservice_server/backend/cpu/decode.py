"""Decode steps on a CPU: one call of a compiled function computes all layers.

With a token of each of a few sequences, a layer's operations are too short to be called one by one from Python: memory,
which bounds such a step, would be idle between the calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from llmservice_server.backend.base import Decoder, RowAdapters
from llmservice_server.backend.cpu.attention import CpuAttention
from llmservice_server.backend.cpu.attention_kernels import rotate_and_decode
from llmservice_server.backend.cpu.compiled import compiled, compiled_inner, for_each
from llmservice_server.backend.cpu.int4 import Int4Linear, int4_columns, multiply_int4, sum_groups
from llmservice_server.backend.cpu.int8 import Int8Linear, int8_columns, multiply_int8, quantize_rows
from llmservice_server.backend.cpu.layer_ops import add, add_norm, gated_row
from llmservice_server.backend.cpu.linear import PackedLinear
from llmservice_server.backend.cpu.linear_kernels import COLUMNS, as_operand, linear_columns, multiply, weights_at
from llmservice_server.backend.cpu.llvm import as_array, from_float32
from llmservice_server.backend.layers import Linear, linears_of
from llmservice_server.backend.step_input import StepInput


class CpuDecode:
    """Implements `DecodePath`: a model's decode steps of at most `max_num_seqs` sequences."""

    def __init__(self, model: Decoder, attention: CpuAttention, max_num_seqs: int) -> None:
        """model: one that `can_decode`."""
        self._attention = attention
        self._max_num_seqs = max_num_seqs
        self._weights = _weights_of(model)
        config, head_dim = model.config, model.config.head_dim
        query_width, key_width = config.num_heads * head_dim, config.num_kv_heads * head_dim

        def rows(width: int) -> torch.Tensor:
            return model.embed_tokens.new_empty(max_num_seqs, width)

        self._hidden, delta, normed = (rows(config.hidden_size) for _ in range(3))
        product, attended, gated = rows(query_width + 2 * key_width), rows(query_width), rows(config.intermediate_size)
        cos, sin = rows(head_dim), rows(head_dim)
        by_head = (max_num_seqs, -1, head_dim)
        states = (self._hidden, delta, normed, product, product.view(by_head), attended.view(by_head), gated, cos, sin)
        self._states = [as_array(state) for state in states]
        matrices = linears_of(model.layers[0])
        self._inputs = [rows_of(*each) for each in zip((normed, attended, normed, gated), matrices, strict=True)]

    def takes(self, step: StepInput) -> bool:
        return step.is_decode and len(step) <= self._max_num_seqs and step.adapter_slots is None

    def adapt(self, adapters: RowAdapters) -> None:
        """Steps with adapters are computed operation by operation."""

    def run(self, step: StepInput) -> torch.Tensor:
        num_seqs = len(step)
        if step.pending is not None:
            step.pending.put(torch.from_numpy(step.token_ids))
        _decode(
            step.token_ids,
            self._weights,
            self._attention.decodes(step),
            tuple(state[:num_seqs] for state in self._states),
            tuple(tuple(array[:num_seqs] for array in each) for each in self._inputs),
        )
        return self._hidden[:num_seqs]


def can_decode(model: Decoder) -> bool:
    """Whether the kernels know all layers and can read their packed weights, each of the same kind in all layers."""
    if model.config.intermediate_size % COLUMNS or model.dtype not in (torch.float32, torch.bfloat16):
        return False
    if not all(layer.is_plain for layer in model.layers):
        return False
    if len(model.rotaries) > 1 or model.config.embedding_scale != 1.0:
        return False
    by_layer = [[kind_of(linear) for linear in linears_of(layer)] for layer in model.layers]
    return None not in by_layer[0] and all(kinds == by_layer[0] for kinds in by_layer)


def kind_of(linear: Linear) -> type | None:
    """The class of a matrix that the kernels read; None: they do not."""
    if isinstance(linear, PackedLinear) and linear.kernel_weights is not None:
        return PackedLinear
    if isinstance(linear, Int4Linear):
        return None if linear.order is not None else Int4Linear
    return Int8Linear if isinstance(linear, Int8Linear) else None


def _weights_of(model: Decoder) -> tuple[Any, ...]:
    """As `_decode` takes them: embeddings, rotary embedding, and the norms, weights and biases of all layers."""
    layers, absent = model.layers, model.embed_tokens.new_empty(0)
    qk_norms = [layer.attention.qk_norm for layer in layers]
    [rotary] = model.rotaries
    rotation = rotary.inverse_frequencies.numpy(), np.float32(rotary.scale)
    norms = (
        _stacked([layer.input_norm for layer in layers]),
        _stacked([layer.post_attention_norm for layer in layers]),
        _stacked([absent.view(0, 0) if norm is None else norm for norm in qk_norms]),
    )
    matrices = tuple(matrix_of(linears, absent) for linears in zip(*map(linears_of, layers), strict=True))
    return as_array(model.embed_tokens), rotation, np.float32(model.config.rms_norm_eps), norms, matrices


def matrix_of(linears: Sequence[Linear], absent: torch.Tensor) -> tuple[Any, Any, Any]:
    """Matrices of one size and kind: dense, of 8 bits, or of 4; the others are None.

    Each is the addresses, the shape and dtype of all, and the biases. Then, of 8 bits, scales and offsets; and, of 4
    bits, addresses, shape and dtype of scales, and of zeros, and scales of outputs. absent: what stands for the bias of
    one that has none, `[0]` in the model's dtype.
    """
    memory = [
        linear.kernel_weights.memory
        if isinstance(linear, PackedLinear) and linear.kernel_weights is not None
        else linear.weight.numpy()
        for linear in linears
    ]
    biases = _stacked([absent if linear.bias is None else linear.bias for linear in linears])
    matrices = *_addresses(memory), biases
    if of_8_bits := [linear for linear in linears if isinstance(linear, Int8Linear)]:
        scaled = (np.stack([getattr(each, name).numpy() for each in of_8_bits]) for name in ("scales", "offsets"))
        return None, (*matrices, *scaled), None
    if of_4_bits := [linear for linear in linears if isinstance(linear, Int4Linear)]:
        scales, zeros = [as_array(each.scales) for each in of_4_bits], [each.zeros.numpy() for each in of_4_bits]
        by_output = np.stack([each.output_scales.numpy() for each in of_4_bits])
        return None, None, (*matrices, _addresses(scales), _addresses(zeros), by_output)
    return matrices, None, None


def rows_of(states: torch.Tensor, linear: Linear) -> tuple[Any, Any, Any]:
    """`states` `[num_rows, in]`, as they are and as products with such a matrix take them, and numbers of each row."""
    if isinstance(linear, Int8Linear):
        quads = np.empty((len(states), states.shape[1] // 4), np.int32)
        return as_array(states), quads, np.empty(len(states), np.float32)
    groups = linear.num_sums if isinstance(linear, Int4Linear) else 0
    return as_array(states), as_operand(states), np.empty((len(states), groups), np.float32)


def _addresses(arrays: Sequence[npt.NDArray[Any]]) -> tuple[Any, ...]:
    """Of arrays of one kind, as `weights_at` takes them; the shape of most, and an array of their dtype."""
    return np.array([each.ctypes.data for each in arrays]), arrays[0].shape, np.empty(0, arrays[0].dtype)


def _stacked(tensors: Sequence[torch.Tensor]) -> npt.NDArray[Any]:
    return as_array(torch.stack(list(tensors)))


@compiled(nogil=True)
def _decode(token_ids: Any, weights: Any, step: Any, states: Any, inputs: Any) -> None:
    """Compute all layers; the result is in `hidden`. Arrays are those of `as_array`, with a row for each sequence.

    weights: of `_weights_of`. step: of `CpuAttention.decodes`. states: `hidden` `[num_seqs, hidden_size]`, and scratch:
    `delta`, which is to be added to it, and `normed`, both of the same shape; queries, keys and values as `product`
    `[num_seqs, size]` and, the same memory, `heads` `[num_seqs, heads, head_dim]`; `output` `[num_seqs, num_heads,
    head_dim]`; `gated` `[num_seqs, intermediate_size]`; cosines and signed sines, `[num_seqs, head_dim]`. inputs: of
    `rows_of`, for each matrix of a layer.
    """
    embeddings, rotary, eps, (input_norms, post_attention_norms, qk_norms), (qkv, o, gate_up, down) = weights
    caches, windows, decodes, shape = step
    no_sinks = np.empty(0, np.float32)
    hidden, delta, normed, product, heads, output, gated, cos, sin = states
    qkv_rows, o_rows, gate_up_rows, down_rows = inputs
    for row in range(len(token_ids)):
        for index in range(hidden.shape[1]):  # copying a row would also compile an error message, for two seconds
            hidden[row, index] = embeddings[token_ids[row], index]
    delta[:] = 0
    _cos_sin(decodes[0], rotary, cos, sin)
    for layer in range(len(input_norms)):
        add_norm(delta, hidden, input_norms[layer], eps, normed)
        _multiply(qkv_rows, layer, qkv[0], qkv[1], qkv[2], product)
        rotation = (qk_norms[layer], eps, cos, sin)
        rule = windows[layer], np.float32(0), no_sinks
        rotate_and_decode(heads, rotation, caches[layer], decodes, rule, output, shape)
        _multiply(o_rows, layer, o[0], o[1], o[2], delta)
        add_norm(delta, hidden, post_attention_norms[layer], eps, normed)
        prepare(gate_up_rows, gate_up[1], gate_up[2])
        of_layer = layer, gate_up_rows, gate_up[0], gate_up[1], gate_up[2], 0, gated
        for_each(gated_columns, gated.shape[1] // COLUMNS, of_layer)
        _multiply(down_rows, layer, down[0], down[1], down[2], delta)
    add(delta, hidden)


@compiled_inner(nogil=True)
def _multiply(inputs: Any, layer: int, dense: Any, scaled: Any, grouped: Any, product: Any) -> None:
    """The product with a layer's matrix of `matrix_of`. numba compiles one of three: what needs None is left out."""
    hidden, values, by_row = inputs
    if dense is not None:
        addresses, shape, like, biases = dense
        multiply(values, weights_at(addresses[layer], shape, like), biases[layer], product)
    if scaled is not None:
        addresses, shape, like, biases, scales, offsets = scaled
        of_layer = scales[layer], offsets[layer], biases[layer]
        multiply_int8(
            hidden, (values.view(np.uint8), by_row), weights_at(addresses[layer], shape, like), of_layer, product
        )
    if grouped is not None:
        addresses, shape, like, biases, scales, zeros, by_output = grouped
        of_groups = _matrix_at(layer, scales), _matrix_at(layer, zeros), by_output[layer], biases[layer]
        multiply_int4(hidden, values, weights_at(addresses[layer], shape, like), of_groups, product)


@compiled_inner(owns_arrays=True)
def _matrix_at(index: int, matrices: Any) -> Any:
    addresses, shape, like = matrices
    return weights_at(addresses[index], shape, like)


@compiled_inner(nogil=True)
def prepare(rows: Any, scaled: Any, grouped: Any) -> None:
    """Write what `columns` reads of `rows` besides the states; `scaled` and `grouped`: of its matrices."""
    states, values, by_row = rows
    if scaled is not None:
        quantize_rows(states, (values.view(np.uint8), by_row))
    if grouped is not None:
        sum_groups(states, by_row)


@compiled_inner(owns_arrays=True)
def columns(
    number: int, index: int, rows: Any, dense: Any, scaled: Any, grouped: Any, first: int, product: Any
) -> None:
    """64 columns of the product with the matrix `index` of `matrix_of`, the `number`th, to `product` from `first` on.

    rows: of `rows_of`, after `prepare`.
    """
    _, values, by_row = rows
    if dense is not None:
        addresses, shape, like, biases = dense
        weights = weights_at(addresses[index], shape, like)[number]
        bias = biases[index][number * COLUMNS : (number + 1) * COLUMNS]
        sums = np.empty((len(product), COLUMNS), np.float32)
        linear_columns(values, weights, bias, sums, product[:, first : first + COLUMNS])
    if scaled is not None:
        addresses, shape, like, biases, scales, offsets = scaled
        of_matrix = scales[index], offsets[index], biases[index]
        weights = weights_at(addresses[index], shape, like)
        int8_columns(number, (values, by_row), weights, of_matrix, first, product)
    if grouped is not None:
        addresses, shape, like, biases, scales, zeros, by_output = grouped
        of_groups = _matrix_at(index, scales), _matrix_at(index, zeros), by_output[index], biases[index]
        weights = weights_at(addresses[index], shape, like)
        int4_columns(number, (values, by_row), weights, of_groups, first, product)


@compiled_inner(owns_arrays=True)
def gated_columns(
    number: int, index: int, rows: Any, dense: Any, scaled: Any, grouped: Any, activation: int, gated: Any
) -> None:
    """64 columns of `activation(gate) * up` `[num_rows, width]`, the `number`th.

    Of the matrix `index`, whose first half of outputs is the gate; otherwise as `columns`.
    """
    first, num_rows = number * COLUMNS, len(gated)
    gate, up = np.empty((num_rows, COLUMNS), gated.dtype), np.empty((num_rows, COLUMNS), gated.dtype)
    columns(number, index, rows, dense, scaled, grouped, 0, gate)
    columns(number + gated.shape[1] // COLUMNS, index, rows, dense, scaled, grouped, 0, up)
    for row in range(num_rows):
        gated_row(activation, gate[row], up[row], gated[row, first : first + COLUMNS])


@compiled_inner()
def _cos_sin(sequences: Any, rotary: Any, cos: Any, sin: Any) -> None:
    """Write the cosines and signed sines of `RotaryEmbedding.at`, which takes a call of torch for each operation."""
    inverse_frequencies, scale = rotary
    half = len(inverse_frequencies)
    for place in range(len(sequences)):
        row, position = sequences[place, 0], sequences[place, 2] - 1
        for index in range(half):
            angle = np.float32(position) * inverse_frequencies[index]
            cosine, sine = np.cos(angle) * scale, np.sin(angle) * scale
            cos[row, index] = cos[row, half + index] = from_float32(cosine, cos[row, index])
            sin[row, index] = from_float32(-sine, sin[row, index])
            sin[row, half + index] = from_float32(sine, sin[row, index])
