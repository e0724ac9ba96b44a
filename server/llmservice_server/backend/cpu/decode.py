"""Decode steps on a CPU: one call of a compiled function computes all layers.

With a token of each of a few sequences a layer is rounds of work that are too short to be called one by one from
Python: between the calls the memory, which is what such a step waits for, would stand idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from llmservice_server.backend.base import Decoder, StepInput, linears_of
from llmservice_server.backend.cpu.attention import CpuAttention
from llmservice_server.backend.cpu.attention_kernels import rotate_and_decode
from llmservice_server.backend.cpu.compiled import compiled, compiled_inner, for_each
from llmservice_server.backend.cpu.element import as_array, narrowed
from llmservice_server.backend.cpu.layer_ops import add, add_norm, silu_mul_row
from llmservice_server.backend.cpu.linear import PackedLinear
from llmservice_server.backend.cpu.panel_product import PANEL, as_lanes, multiply, multiply_into, panels_at


class CpuDecode:
    """Implements `DecodePath`: a model's decode steps of at most `max_num_seqs` sequences."""

    def __init__(self, model: Decoder, attention: CpuAttention, max_num_seqs: int) -> None:
        """Raises ValueError where `can_decode` says no."""
        if not can_decode(model):
            raise ValueError("the model's matrices are not packed in panels")
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
        self._lanes = [as_lanes(state) for state in (normed, attended, gated)]

    def takes(self, step: StepInput) -> bool:
        return step.is_decode and len(step) <= self._max_num_seqs

    def run(self, step: StepInput) -> torch.Tensor:
        num_seqs = len(step)
        if step.late is not None:
            step.late.put(torch.from_numpy(step.token_ids))
        _decode(
            step.token_ids,
            self._weights,
            self._attention.decodes(step),
            tuple(state[:num_seqs] for state in self._states),
            tuple(lanes[:num_seqs] for lanes in self._lanes),
        )
        return self._hidden[:num_seqs]


def can_decode(model: Decoder) -> bool:
    """Whether the layers' matrices are packed so that the kernels here can read them."""
    linears = (linear for layer in model.layers for linear in linears_of(layer))
    return model.config.intermediate_size % PANEL == 0 and all(
        isinstance(linear, PackedLinear) and linear.panels is not None for linear in linears
    )


def _weights_of(model: Decoder) -> tuple[Any, ...]:
    """As `_decode` takes them: embeddings and rotation, and of all layers norms, where the panels lie, and biases."""
    layers, none = model.layers, model.embed_tokens.new_empty(0)
    rotary = model.rotary.inverse_frequencies.numpy(), np.float32(model.rotary.scale)
    norms = (
        _stacked([layer.input_norm for layer in layers]),
        _stacked([layer.post_attention_norm for layer in layers]),
        _stacked([none.view(0, 0) if layer.qk_norm is None else layer.qk_norm for layer in layers]),
    )
    by_layer = [[linear for linear in linears_of(layer) if isinstance(linear, PackedLinear)] for layer in layers]
    panels = [[linear.panels for linear in linears] for linears in by_layer]
    addresses = np.array([[each.memory.ctypes.data for each in of_layer if each is not None] for of_layer in panels])
    shapes = tuple(each.memory.shape for each in panels[0] if each is not None)
    biases = tuple(
        _stacked([none if linear.bias is None else linear.bias for linear in linears])
        for linears in zip(*by_layer, strict=True)
    )
    embedded = as_array(model.embed_tokens)
    return embedded, rotary, np.float32(model.config.rms_norm_eps), norms, (addresses, shapes), biases


def _stacked(tensors: Sequence[torch.Tensor]) -> npt.NDArray[Any]:
    return as_array(torch.stack(list(tensors)))


@compiled(nogil=True)
def _decode(token_ids: Any, weights: Any, step: Any, states: Any, lanes: Any) -> None:
    """Arrays are those of `as_array`; a row is a sequence's.

    weights: as `_weights_of` has them. step: as `CpuAttention.decodes` has it. lanes: `normed`, `attended` and `gated`
    once more, as products take them. states: `hidden` `[num_seqs, hidden_size]`, where the answer is in the end. All
    others are scratch: `delta` likewise, what is to be added to it; `normed` likewise; `product` and `heads`, which are
    the same memory, of queries, keys and values; `answer` `[num_seqs, num_heads, head_dim]`; `gated` `[num_seqs,
    intermediate_size]`; cosines and signed sines, `[num_seqs, head_dim]`.
    """
    embeddings, rotary, eps, (input_norms, post_attention_norms, qk_norms), (addresses, shapes), biases = weights
    caches, windows, decodes, constants = step
    hidden, delta, normed, product, heads, answer, gated, cos, sin = states
    normed_lanes, attended_lanes, gated_lanes = lanes
    qkv_biases, o_biases, gate_up_biases, down_biases = biases
    for row in range(len(token_ids)):
        for index in range(hidden.shape[1]):  # row for row it would compile an error's message too, for two seconds
            hidden[row, index] = embeddings[token_ids[row], index]
    delta[:] = 0
    _turn(decodes[0], rotary, cos, sin)
    for layer in range(len(addresses)):
        qkv = panels_at(addresses[layer, 0], shapes[0], normed_lanes)
        o = panels_at(addresses[layer, 1], shapes[1], normed_lanes)
        gate_up = panels_at(addresses[layer, 2], shapes[2], normed_lanes)
        down = panels_at(addresses[layer, 3], shapes[3], normed_lanes)
        add_norm(delta, hidden, input_norms[layer], eps, normed)
        multiply(normed_lanes, qkv, qkv_biases[layer], product)
        turns = (qk_norms[layer], eps, cos, sin)
        rotate_and_decode(heads, turns, caches[layer], decodes, windows[layer], answer, constants)
        multiply(attended_lanes, o, o_biases[layer], delta)
        add_norm(delta, hidden, post_attention_norms[layer], eps, normed)
        _gate_up(normed_lanes, gate_up, gate_up_biases[layer], gated)
        multiply(gated_lanes, down, down_biases[layer], delta)
    add(delta, hidden)


@compiled_inner()
def _turn(sequences: Any, rotary: Any, cos: Any, sin: Any) -> None:
    """Cosines and signed sines, as `RotaryEmbedding.at`, which takes a call of torch for each of its operations."""
    inverse_frequencies, scale = rotary
    half = len(inverse_frequencies)
    for place in range(len(sequences)):
        row, position = sequences[place, 0], sequences[place, 2] - 1
        for index in range(half):
            angle = np.float32(position) * inverse_frequencies[index]
            cosine, sine = np.cos(angle) * scale, np.sin(angle) * scale
            cos[row, index] = cos[row, half + index] = narrowed(cosine, cos[row, index])
            sin[row, index] = narrowed(-sine, sin[row, index])
            sin[row, half + index] = narrowed(sine, sin[row, index])


@compiled_inner(nogil=True)
def _gate_up(lanes: Any, gate_up: Any, bias: Any, gated: Any) -> None:
    """`silu(gate) * up`; the panels of `up` come behind all those of `gate`."""
    for_each(_gate, len(gate_up) // 2, (lanes, gate_up, bias, gated))


@compiled_inner()
def _gate(number: int, lanes: Any, gate_up: Any, bias: Any, gated: Any) -> None:
    """Panel `number` of that."""
    width = gated.shape[1]
    mine = slice(number * PANEL, (number + 1) * PANEL)
    mine_up = slice(width + number * PANEL, width + (number + 1) * PANEL)
    sums = np.empty((len(lanes), PANEL), np.float32)
    gate, up = np.empty((len(lanes), PANEL), gated.dtype), np.empty((len(lanes), PANEL), gated.dtype)
    multiply_into(lanes, gate_up[number], bias[mine], sums, gate)
    multiply_into(lanes, gate_up[number + width // PANEL], bias[mine_up], sums, up)
    for row in range(len(lanes)):
        silu_mul_row(gate[row], up[row], gated[row, mine])
