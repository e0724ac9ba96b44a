"""Decode steps on a CPU, a call of one compiled function for each layer.

With a token of each of a few sequences a layer is nine rounds of work that are too short to be called one by one from
Python: between the calls the memory, which is what such a step waits for, would stand idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from llmservice_server.attention.base import Int64Array, SequenceSlice
from llmservice_server.attention.cpu_backend import CpuAttention
from llmservice_server.attention.cpu_kernels import decode_heads, rotate_and_store_heads
from llmservice_server.cpu.compiled import compiled
from llmservice_server.cpu.element import as_array, narrowed
from llmservice_server.cpu.panel_product import PANEL, as_lanes, multiply_into
from llmservice_server.engine.step_in_flight import LateTokens
from llmservice_server.models.cpu_layer_ops import add_norm_row, silu_mul_row
from llmservice_server.models.linear import Linear
from llmservice_server.models.llama import DecoderLayer, LlamaModel


class CpuDecode:
    """A model's decode steps of at most `max_num_seqs` sequences."""

    def __init__(self, model: LlamaModel, attention: CpuAttention, max_num_seqs: int) -> None:
        """Raises ValueError where `can_decode` says no."""
        if not can_decode(model):
            raise ValueError("the model's matrices are not packed in panels")
        self._model = model
        self._attention = attention
        self._max_num_seqs = max_num_seqs
        self._layers = [_arrays_of(layer) for layer in model.layers]
        config = model.config
        num_heads = config.num_heads + 2 * config.num_kv_heads
        widths = (config.hidden_size, num_heads * config.head_dim, config.num_heads * config.head_dim)
        self._buffers = [
            torch.empty(max_num_seqs, width, dtype=model.dtype)
            for width in (config.hidden_size, *widths, config.intermediate_size)
        ]
        self._turn_buffers = [torch.empty(max_num_seqs, config.head_dim, dtype=model.dtype) for _ in range(2)]

    def takes(self, slices: Sequence[SequenceSlice]) -> bool:
        """Whether a step is one of decodes only, and not too many."""
        return len(slices) <= self._max_num_seqs and all(part.num_tokens == 1 for part in slices)

    def run(
        self, token_ids: Int64Array, slices: Sequence[SequenceSlice], late: LateTokens | None = None
    ) -> torch.Tensor:
        """`LlamaModel.forward`'s states, `[num_seqs, hidden_size]`."""
        model = self._model
        config = model.config
        step = self._attention.prepare(slices)
        positions = np.array([part.start for part in slices])
        tokens = torch.from_numpy(token_ids)
        if late is not None:
            late.put(tokens)
        hidden = F.embedding(tokens, model.embed_tokens)
        delta, normed, product, attended, gated = (buffer[: len(slices)] for buffer in self._buffers)
        delta.zero_()
        by_head = (len(slices), -1, config.head_dim)
        states = (hidden, delta, normed, product, product.view(by_head), attended.view(by_head), gated)
        shared = (
            tuple(as_array(state) for state in states),
            tuple(as_lanes(state) for state in (normed, attended, gated)),
            self._turns(positions),
            np.float32(config.rms_norm_eps),
        )
        for index, layer in enumerate(self._layers):
            _decode_layer(layer, step.of_layer(index), *shared)
        return hidden.add_(delta)

    def _turns(self, positions: Int64Array) -> tuple[Any, Any]:
        """Cosines and signed sines, as `RotaryEmbedding.at`, which takes a call of torch for each of its operations."""
        rotary = self._model.rotary
        cos, sin = (as_array(buffer[: len(positions)]) for buffer in self._turn_buffers)
        _turn(positions, rotary.inverse_frequencies.numpy(), np.float32(rotary.scale), cos, sin)
        return cos, sin


def can_decode(model: LlamaModel) -> bool:
    """Whether the layers' matrices are packed so that the kernels here can read them."""
    linears = (linear for layer in model.layers for linear in (layer.qkv, layer.o, layer.gate_up, layer.down))
    return model.config.intermediate_size % PANEL == 0 and all(linear.panels is not None for linear in linears)


def _arrays_of(layer: DecoderLayer) -> tuple[Any, ...]:
    """A layer's weights, in the order in which `_decode_layer` takes them."""

    def both(linear: Linear) -> tuple[Any, Any]:
        return linear.panels, linear.bias_array

    qk_norm = layer.input_norm.new_empty(0, 0) if layer.qk_norm is None else layer.qk_norm
    norms = (layer.input_norm, layer.post_attention_norm, qk_norm)
    return (
        *(as_array(norm) for norm in norms),
        *both(layer.qkv),
        *both(layer.o),
        *both(layer.gate_up),
        *both(layer.down),
    )


@compiled()
def _turn(positions: Any, inverse_frequencies: Any, scale: Any, cos: Any, sin: Any) -> None:
    half = len(inverse_frequencies)
    for row in range(len(positions)):
        for index in range(half):
            angle = np.float32(positions[row]) * inverse_frequencies[index]
            cosine, sine = np.cos(angle) * scale, np.sin(angle) * scale
            cos[row, index] = cos[row, half + index] = narrowed(cosine, cos[row, index])
            sin[row, index] = narrowed(-sine, sin[row, index])
            sin[row, half + index] = narrowed(sine, sin[row, index])


@compiled(parallel=True)
def _decode_layer(layer: Any, step: Any, states: Any, lanes: Any, turns: Any, eps: Any) -> None:
    """Arrays are those of `as_array`; a row is a sequence's.

    layer: the weights, as `_arrays_of` has them. step: as `CpuStep.of_layer`. lanes: `normed`, `attended` and `gated`
    once more, as products take them. turns: cosines and sines, `[num_seqs, head_dim]`. states: `hidden` `[num_seqs,
    hidden_size]`, to which the results are added, but for the last one; `delta` likewise, the last layer's last
    result, which is not added yet, and then this one's. The others are scratch: `normed` likewise; `product` and
    `heads`, which are the same memory, of queries, keys and values; `answer` `[num_seqs, num_heads, head_dim]`; and
    `gated` `[num_seqs, intermediate_size]`.
    """
    input_norm, post_attention_norm, qk_norm, qkv, qkv_bias, o, o_bias, gate_up, gate_up_bias, down, down_bias = layer
    cache, slots, sequences, blocks, parts, constants = step
    hidden, delta, normed, product, heads, answer, gated = states
    normed_lanes, attended_lanes, gated_lanes = lanes
    cos, sin = turns
    num_seqs = len(hidden)
    for row in numba.prange(num_seqs):
        add_norm_row(delta[row], hidden[row], input_norm, eps, normed[row])
    for number in numba.prange(len(qkv)):
        _multiply(normed_lanes, qkv, qkv_bias, number, product)
    heads_each = cache.shape[1] // parts
    for piece in numba.prange(num_seqs * parts):
        row, first_block, first, end = sequences[piece // parts]
        mine = (piece % parts * heads_each, heads_each)
        turn = (qk_norm, eps, cos[row], sin[row])
        rotate_and_store_heads(heads[row], turn, slots[row], answer.shape[1], mine, cache)
        decode_heads(heads[row], cache, blocks[first_block:], (first, end), mine, answer[row], constants)
    for number in numba.prange(len(o)):
        _multiply(attended_lanes, o, o_bias, number, delta)
    for row in numba.prange(num_seqs):
        add_norm_row(delta[row], hidden[row], post_attention_norm, eps, normed[row])
    num_gates = len(gate_up) // 2
    for number in numba.prange(num_gates):
        _gate(normed_lanes, gate_up, gate_up_bias, number, gated)
    for number in numba.prange(len(down)):
        _multiply(gated_lanes, down, down_bias, number, delta)


@compiled()
def _multiply(lanes: Any, panels: Any, bias: Any, number: int, product: Any) -> None:
    """Panel `number` of a matrix product."""
    mine = slice(number * PANEL, (number + 1) * PANEL)
    sums = np.empty((len(lanes), PANEL), np.float32)
    multiply_into(lanes, panels[number], bias[mine], sums, product[:, mine])


@compiled()
def _gate(lanes: Any, gate_up: Any, bias: Any, number: int, gated: Any) -> None:
    """Panel `number` of `silu(gate) * up`; the panels of `up` come behind all those of `gate`."""
    width = gated.shape[1]
    mine = slice(number * PANEL, (number + 1) * PANEL)
    mine_up = slice(width + number * PANEL, width + (number + 1) * PANEL)
    sums = np.empty((len(lanes), PANEL), np.float32)
    gate, up = np.empty((len(lanes), PANEL), gated.dtype), np.empty((len(lanes), PANEL), gated.dtype)
    multiply_into(lanes, gate_up[number], bias[mine], sums, gate)
    multiply_into(lanes, gate_up[number + width // PANEL], bias[mine_up], sums, up)
    for row in range(len(lanes)):
        silu_mul_row(gate[row], up[row], gated[row, mine])
