"""gpt-oss (https://arxiv.org/abs/2508.10925): attention with sinks, and experts with biases and a clamped activation.

Experts of a checkpoint are in one tensor, whose gate and up alternate; its numbers may be in mxfp4.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from llmservice_server.backend.experts import Experts, ExpertsMlp
from llmservice_server.backend.layers import DecoderLayer, Linear
from llmservice_server.backend.quantized import QuantizedWeight
from llmservice_server.backend.torch.layer_ops import TorchLinear
from llmservice_server.models.config import ExpertsConfig, ModelConfig
from llmservice_server.models.llama import layer_with
from llmservice_server.models.weights import Weights
from llmservice_server.types.errors import ModelLoadError

_GROUP = 32
"""Inputs that have one scale in mxfp4."""


def gpt_oss_layer(config: ModelConfig, weights: Weights, index: int) -> DecoderLayer:
    sizes, mlp = config.layer_experts(index), weights.at("mlp")
    if sizes is None:
        raise ModelLoadError(f"config.json gives layer {index} no experts, which gpt-oss has in all layers")
    router = mlp.linear({"router": sizes.count}, config.hidden_size, bias=True)
    layer = layer_with(config, weights, ExpertsMlp(router, _experts(config, sizes, mlp.at("experts")), sizes.per_token))
    layer.attention.sinks = weights.tensor("self_attn.sinks", config.num_heads)
    return layer


def _experts(config: ModelConfig, sizes: ExpertsConfig, weights: Weights) -> Experts:
    gate_up = _matrices(weights, "gate_up_proj", sizes.count, 2 * sizes.width, config.hidden_size, alternates=True)
    down = _matrices(weights, "down_proj", sizes.count, config.hidden_size, sizes.width, alternates=False)
    weights.name_parts(gate_up, {"gate_proj": sizes.width, "up_proj": sizes.width})
    weights.name_parts(down, {"down_proj": config.hidden_size})
    return Experts(gate_up, down, "clamped_silu", alternates=True)


def _matrices(weights: Weights, name: str, count: int, outputs: int, inputs: int, *, alternates: bool) -> list[Linear]:
    """The experts' matrices `[outputs, inputs]`; `alternates`: whether the checkpoint's outputs do."""
    biases = weights.empty(count, outputs)
    weights.compute({f"{name}_bias": (count, outputs)}, partial(_fill, biases, alternates))
    if weights.has(f"{name}_blocks"):
        groups = (count, outputs, inputs // _GROUP)
        packed = {f"{name}_blocks": (*groups, _GROUP // 2), f"{name}_scales": groups}
        return weights.quantized_stack((outputs, inputs), biases, packed, partial(_read, alternates))
    stack = weights.empty(count, outputs, inputs)
    weights.compute({name: (count, inputs, outputs)}, partial(_fill_transposed, stack, alternates))
    return [TorchLinear(weight, bias) for weight, bias in zip(stack, biases, strict=True)]


def _fill(targets: torch.Tensor, alternates: bool, stored: torch.Tensor) -> None:
    """`[experts, outputs, ...]`, one expert after the other, so that little memory is held twice."""
    for target, rows in zip(targets, stored, strict=True):
        target.copy_(_in_order(rows, alternates))


def _fill_transposed(stack: torch.Tensor, alternates: bool, stored: torch.Tensor) -> None:
    _fill(stack, alternates, stored.transpose(1, 2))


def _in_order(rows: torch.Tensor, alternates: bool) -> torch.Tensor:
    """The gates, then those of up."""
    return torch.cat((rows[::2], rows[1::2])) if alternates else rows


def _read(alternates: bool, blocks: torch.Tensor, scales: torch.Tensor) -> Iterator[QuantizedWeight]:
    """Of each expert. blocks: `[experts, out, in / 32, 16]`; scales, powers of two plus 127: `[experts, out, in / 32]`.

    Raises `ModelLoadError` for another dtype than uint8.
    """
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise ModelLoadError(f"experts in mxfp4 are {blocks.dtype} with scales in {scales.dtype}, expected uint8")
    for values, powers in zip(blocks.flatten(-2), scales, strict=True):
        ordered = [_in_order(part, alternates).contiguous() for part in (values, powers)]
        yield QuantizedWeight(ordered[0], ordered[1].view(torch.float8_e8m0fnu), group=_GROUP)
