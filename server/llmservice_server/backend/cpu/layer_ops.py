"""The operations of a layer between its matrix products: RMS norm, SiLU, rotary embedding with the KV store.

Compiled by numba when they first run. torch takes several passes over memory for each of them, and a call for each
pass: calls dominate a decode step, and memory dominates prompts. Sums and intermediate values are float32 whatever the
model's dtype. Arrays are those of `as_array`. A layer's KV cache is `[num_blocks, num_kv_heads, 2, block_size,
head_dim]`, keys before values: what one head reads of a block is one stream of memory.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from llmservice_server.backend.cpu.compiled import compiled, compiled_inner, for_each
from llmservice_server.backend.cpu.int8 import Int8Linear
from llmservice_server.backend.cpu.linear import PackedLinear
from llmservice_server.backend.cpu.linear_kernels import COLUMNS, linear_columns
from llmservice_server.backend.cpu.llvm import as_array, convert, exp, from_float32, to_float32
from llmservice_server.backend.layers import CLAMPED_LIMIT, CLAMPED_SLOPE, Activation, Linear
from llmservice_server.backend.torch.layer_ops import TorchLayerOps

_TORCH_ELEMENTS = 1 << 18
"""Elements from which on torch, which uses all threads, is faster than one thread."""


class CpuLayerOps(TorchLayerOps):
    """Implements `LayerOps` in one pass each.

    `threaded`: kernels use all threads, and take seconds longer to compile. Otherwise they use one thread, and torch
    computes long prompts.
    """

    def __init__(self, *, threaded: bool = False) -> None:
        self._threaded = threaded

    def add_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        if not self._threaded and hidden.numel() >= _TORCH_ELEMENTS:
            return super().add_norm(hidden, delta, weight, eps)
        normed = torch.empty_like(hidden)
        arrays = as_array(hidden), as_array(weight), np.float32(eps), as_array(normed)
        if delta is None:
            norm(*arrays)
        elif self._threaded:
            _add_norm_threaded(as_array(delta), *arrays)
        else:
            add_norm(as_array(delta), *arrays)
        return normed

    def gated(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        if activation != "silu" or (not self._threaded and gate_up.numel() >= _TORCH_ELEMENTS):
            return super().gated(gate_up, activation)
        gated = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        kernel = _silu_mul_threaded if self._threaded else _silu_mul
        kernel(as_array(gate_up), as_array(gated))
        return gated

    def logits(self, hidden: torch.Tensor, norm: torch.Tensor, eps: float, head: Linear) -> torch.Tensor:
        """A few rows are one call: after a step has read all weights, Python and torch are no longer in the caches,
        and each of several calls would take ten times as long."""
        if isinstance(head, Int8Linear):
            return head(self.add_norm(hidden, None, norm, eps), torch.float32)
        if not isinstance(head, PackedLinear) or (weights := head.weights_for(hidden)) is None:
            return super().logits(hidden, norm, eps, head)
        logits = torch.empty(len(hidden), len(weights.memory) * COLUMNS)
        arrays = as_array(hidden.contiguous()), as_array(norm), np.float32(eps)
        _norm_and_multiply(*arrays, weights.memory, weights.bias, logits.numpy())
        return logits


@compiled_inner()
def _norm_row(row: Any, weight: Any, eps: Any, normed: Any) -> None:
    total = np.float32(0)
    for index in range(len(row)):
        total += to_float32(row[index]) * to_float32(row[index])
    scale = np.float32(1) / np.sqrt(total / np.float32(len(row)) + eps)
    for index in range(len(row)):
        normed[index] = from_float32(to_float32(row[index]) * scale * to_float32(weight[index]), normed[index])


@compiled()
def norm(hidden: Any, weight: Any, eps: Any, normed: Any) -> None:
    """Write the RMS norm of each row of `hidden` `[num_rows, size]`, times `weight` `[size]`, to `normed`."""
    for row in range(len(hidden)):
        _norm_row(hidden[row], weight, eps, normed[row])


@compiled_inner()
def add(delta: Any, hidden: Any) -> None:
    """Add `delta` to `hidden` `[num_rows, size]`, in place."""
    for row in range(len(hidden)):
        _add_row(delta[row], hidden[row])


@compiled_inner()
def _add_row(delta: Any, hidden: Any) -> None:
    for index in range(len(hidden)):
        hidden[index] = from_float32(to_float32(hidden[index]) + to_float32(delta[index]), hidden[index])


@compiled()
def add_norm(delta: Any, hidden: Any, weight: Any, eps: Any, normed: Any) -> None:
    """Add `delta` to `hidden`, in place, and write the norm of each row of the sum to `normed`."""
    add(delta, hidden)
    norm(hidden, weight, eps, normed)


@compiled(nogil=True)
def _add_norm_threaded(delta: Any, hidden: Any, weight: Any, eps: Any, normed: Any) -> None:
    for_each(_add_norm_row, len(hidden), (delta, hidden, weight, eps, normed))


@compiled_inner()
def _add_norm_row(row: int, delta: Any, hidden: Any, weight: Any, eps: Any, normed: Any) -> None:
    _add_row(delta[row], hidden[row])
    _norm_row(hidden[row], weight, eps, normed[row])


@compiled_inner()
def silu_mul_row(gate: Any, up: Any, gated: Any) -> None:
    """Write `silu(gate) * up`."""
    for index in range(len(gated)):
        value = to_float32(gate[index])
        gated[index] = from_float32(value / (np.float32(1) + exp(-value)) * to_float32(up[index]), gated[index])


ACTIVATIONS: tuple[Activation, ...] = ("silu", "clamped_silu", "gelu_tanh")
"""By the number that `gated_row` takes."""
_GELU_SLOPE, _GELU_CUBE = np.float32(2 * math.sqrt(2 / math.pi)), np.float32(0.044715)


@compiled_inner()
def gated_row(activation: int, gate: Any, up: Any, gated: Any) -> None:
    """Write what one of the `ACTIVATIONS` makes of them. A comparison with NaN is false, so that it is kept."""
    limit, slope = np.float32(CLAMPED_LIMIT), np.float32(CLAMPED_SLOPE)
    if activation == 0:
        silu_mul_row(gate, up, gated)
    elif activation == 1:
        for index in range(len(gated)):
            value, other = to_float32(gate[index]), to_float32(up[index])
            value = limit if value > limit else value
            other = limit if other > limit else -limit if other < -limit else other
            value *= (other + np.float32(1)) / (np.float32(1) + exp(-slope * value))
            gated[index] = from_float32(value, gated[index])
    else:  # the hyperbolic tangent of a number is a sigmoid of twice as much
        for index in range(len(gated)):
            value = to_float32(gate[index])
            inner = _GELU_SLOPE * (value + _GELU_CUBE * value * value * value)
            value *= to_float32(up[index]) / (np.float32(1) + exp(-inner))
            gated[index] = from_float32(value, gated[index])


@compiled()
def _silu_mul(gate_up: Any, gated: Any) -> None:
    for row in range(len(gated)):
        _silu_mul_row(row, gate_up, gated)


@compiled(nogil=True)
def _silu_mul_threaded(gate_up: Any, gated: Any) -> None:
    for_each(_silu_mul_row, len(gated), (gate_up, gated))


@compiled_inner()
def _silu_mul_row(row: int, gate_up: Any, gated: Any) -> None:
    width = gated.shape[1]
    silu_mul_row(gate_up[row, :width], gate_up[row, width:], gated[row])


@compiled(nogil=True)
def _norm_and_multiply(hidden: Any, weight: Any, eps: Any, weights: Any, bias: Any, product: Any) -> None:
    """Write `norm(hidden) @ weights.T + bias` to `product`, float32, rounded to the dtype of `hidden`.

    hidden: `[num_rows, in]`. weight: the norm's, `[in]`. weights and bias: as in `multiply`.
    """
    normed = np.empty_like(hidden)
    norm(hidden, weight, eps, normed)
    for_each(_rounded_columns, len(weights), (normed.view(weights.dtype), weights, bias, normed, product))


@compiled_inner(owns_arrays=True)
def _rounded_columns(number: int, hidden: Any, weights: Any, bias: Any, like: Any, product: Any) -> None:
    first = number * COLUMNS
    sums, rounded = np.empty((len(hidden), COLUMNS), np.float32), np.empty((len(hidden), COLUMNS), like.dtype)
    linear_columns(hidden, weights[number], bias[first : first + COLUMNS], sums, rounded)
    for row in range(len(hidden)):
        for index in range(COLUMNS):
            product[row, first + index] = to_float32(rounded[row, index])


@compiled()
def store(key_value: Any, slots: Any, cache: Any) -> None:
    """Write `key_value` `[num_tokens, 2 * num_kv_heads, head_dim]` to the `slots` `[num_tokens]` of `cache`."""
    num_kv_heads, block_size = cache.shape[1], cache.shape[3]
    for token in range(len(slots)):
        block, offset = slots[token] // block_size, slots[token] % block_size
        for head in range(num_kv_heads):
            for index in range(cache.shape[4]):
                cache[block, head, 0, offset, index] = key_value[token, head, index]
                if cache.shape[2] > 1:
                    cache[block, head, 1, offset, index] = key_value[token, num_kv_heads + head, index]


@compiled(nogil=True)
def rotate_and_store(heads: Any, rotation: Any, slots: Any, num_heads: int, cache: Any) -> None:
    """Norm and rotate the queries and keys of `heads` in place, and store keys and values.

    heads: `[num_tokens, num_heads + 2 * num_kv_heads, head_dim]`. rotation: the weights of the norm, `[num_heads +
    num_kv_heads, head_dim]`, or empty if the model has no such norm; its epsilon; cosines and sines, `[num_tokens,
    head_dim]`, the first half of the sines negated.
    """
    for_each(_rotate_and_store_token, len(heads), (heads, rotation, slots, num_heads, cache))


@compiled_inner()
def _rotate_and_store_token(token: int, heads: Any, rotation: Any, slots: Any, num_heads: int, cache: Any) -> None:
    weight, eps, cos, sin = rotation
    all_heads = np.int64(0), cache.shape[1]  # a literal 0 has a type of its own and would be compiled once more
    rotate_and_store_heads(
        heads[token], (weight, eps, cos[token], sin[token]), slots[token], num_heads, all_heads, cache
    )


@compiled_inner()
def rotate_and_store_heads(heads: Any, rotation: Any, slot: int, num_heads: int, head_range: Any, cache: Any) -> None:
    """`rotate_and_store` of one token and some of its key heads, with the queries that share them.

    head_range: the first key head, and the number of key heads.
    """
    weight, eps, cos, sin = rotation
    first_head, num_kv_heads = head_range
    block_size = cache.shape[3]
    block, offset = slot // block_size, slot % block_size
    group = num_heads // cache.shape[1]
    for head in range(first_head * group, (first_head + num_kv_heads) * group):
        _rotate_head(heads[head], weight[head : head + 1], eps, cos, sin)
    for kv_head in range(first_head, first_head + num_kv_heads):
        head = num_heads + kv_head
        _rotate_head(heads[head], weight[head : head + 1], eps, cos, sin)
        _copy(heads[head], cache[block, kv_head, 0, offset])
        _copy(heads[head + cache.shape[1]], cache[block, kv_head, 1, offset])


@compiled_inner()
def _copy(source: Any, target: Any) -> None:
    """The dtypes may differ."""
    for index in range(len(source)):
        target[index] = convert(source[index], target[index])


@compiled_inner()
def _rotate_head(head: Any, weight: Any, eps: Any, cos: Any, sin: Any) -> None:
    """In place. `weight` `[1, head_dim]` is that of an RMS norm that comes first; empty if there is none."""
    half = len(head) // 2
    scale = np.float32(1)
    if len(weight):
        total = np.float32(0)
        for index in range(len(head)):
            total += to_float32(head[index]) * to_float32(head[index])
        scale /= np.sqrt(total / np.float32(len(head)) + eps)
    for index in range(half):
        first, second = to_float32(head[index]) * scale, to_float32(head[half + index]) * scale
        if len(weight):
            first *= to_float32(weight[0, index])
            second *= to_float32(weight[0, half + index])
        rotated = first * to_float32(cos[index]) + second * to_float32(sin[index])
        rotated_second = second * to_float32(cos[half + index]) + first * to_float32(sin[half + index])
        head[index] = from_float32(rotated, head[index])
        head[half + index] = from_float32(rotated_second, head[half + index])
