"""gpt-oss (https://arxiv.org/abs/2508.10925): attention with sinks, and experts with biases and a clamped activation.

Experts of a checkpoint are in one tensor, whose gate and up alternate; its numbers may be in mxfp4 (OCP Microscaling
Formats, section 5): elements of 4 bits, and a power of two for each 32.
"""

from __future__ import annotations

from functools import partial

import torch

from llmservice_server.backend.base import DecoderLayer, Linear
from llmservice_server.backend.experts import Experts, ExpertsMlp
from llmservice_server.backend.torch.layer_ops import TorchLinear
from llmservice_server.models.config import ExpertsConfig, ModelConfig
from llmservice_server.models.llama import layer_with
from llmservice_server.models.weights import Weights
from llmservice_server.types.errors import ModelLoadError

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4 = (*_POSITIVE, *(-value for value in _POSITIVE))
"""By their four bits."""
_BLOCK = 32
_EXPONENT_BIAS = 127


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
    return Experts(gate_up, down, "clamped_silu")


def _matrices(weights: Weights, name: str, count: int, outputs: int, inputs: int, *, alternates: bool) -> list[Linear]:
    """The experts' matrices `[outputs, inputs]`; `alternates`: whether the checkpoint's outputs do."""
    stack, biases = weights.empty(count, outputs, inputs), weights.empty(count, outputs)
    weights.compute({f"{name}_bias": (count, outputs)}, partial(_fill, biases, alternates))
    if weights.has(f"{name}_blocks"):
        blocks = (count, outputs, inputs // _BLOCK)
        packed = {f"{name}_blocks": (*blocks, _BLOCK // 2), f"{name}_scales": blocks}
        weights.compute(packed, partial(_fill_unpacked, stack, alternates))
    else:
        weights.compute({name: (count, inputs, outputs)}, partial(_fill_transposed, stack, alternates))
    return [TorchLinear(weight, bias) for weight, bias in zip(stack, biases, strict=True)]


def _fill(targets: torch.Tensor, alternates: bool, stored: torch.Tensor) -> None:
    """`[experts, outputs, ...]`, one expert after the other, so that little memory is held twice."""
    for target, rows in zip(targets, stored, strict=True):
        if alternates:
            for half, part in zip(target.chunk(2), (rows[::2], rows[1::2]), strict=True):
                half.copy_(part)
        else:
            target.copy_(rows)


def _fill_transposed(stack: torch.Tensor, alternates: bool, stored: torch.Tensor) -> None:
    _fill(stack, alternates, stored.transpose(1, 2))


def _fill_unpacked(stack: torch.Tensor, alternates: bool, blocks: torch.Tensor, scales: torch.Tensor) -> None:
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise ModelLoadError(f"experts in mxfp4 are {blocks.dtype} with scales in {scales.dtype}, expected uint8")
    for number in range(len(stack)):
        part = slice(number, number + 1)
        dense = dequantize(blocks[part].to(stack.device), scales[part].to(stack.device))
        _fill(stack[part], alternates, dense)


def dequantize(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Float32 `[..., in]` of blocks `[..., in / 32, 16]`, of which each byte has two elements, the first lowest."""
    pairs = torch.tensor([(_FP4[byte & 0xF], _FP4[byte >> 4]) for byte in range(256)], device=blocks.device)
    # As 64-bit integers, of which torch selects two numbers at a time, ten times as fast as rows.
    selected = pairs.view(torch.int64).squeeze(1).index_select(0, blocks.flatten().int())
    powers = torch.ldexp(torch.ones(scales.shape, device=scales.device), scales.int() - _EXPONENT_BIAS)
    return selected.view(torch.float32).view(*scales.shape, _BLOCK).mul_(powers[..., None]).flatten(-2)
