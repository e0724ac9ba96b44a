"""Layers with a mixture of experts in the place of the MLP: Mixtral, Qwen2-MoE, Qwen3-MoE."""

from __future__ import annotations

from llmservice_server.backend.experts import Experts, ExpertsMlp
from llmservice_server.backend.layers import DecoderLayer, Linear
from llmservice_server.backend.torch.layer_ops import TorchLinear
from llmservice_server.models.config import ExpertsConfig, ModelConfig
from llmservice_server.models.llama import dense_mlp, layer_with, llama_layer
from llmservice_server.models.weights import Weights


def mixtral_layer(config: ModelConfig, weights: Weights, index: int) -> DecoderLayer:
    sizes, mlp = config.layer_experts(index), weights.at("block_sparse_moe")
    if sizes is None:
        return llama_layer(config, weights, index)
    if not mlp.has("gate.weight"):
        mlp = weights.at("mlp")  # as transformers 5 names it
    experts = mlp.at("experts")
    is_renamed = experts.has_matrix("0.gate_proj")  # as llmcompressor writes what transformers 5 has loaded
    names = ("gate_proj", "up_proj", "down_proj") if is_renamed else ("w1", "w3", "w2")
    router = mlp.linear({"gate": sizes.count}, config.hidden_size)
    mixture = ExpertsMlp(router, _experts(config, sizes, experts, names), sizes.per_token, sizes.normalizes)
    return layer_with(config, weights, mixture)


def qwen_moe_layer(config: ModelConfig, weights: Weights, index: int) -> DecoderLayer:
    sizes, mlp = config.layer_experts(index), weights.at("mlp")
    if sizes is None:
        return llama_layer(config, weights, index)
    experts = _experts(config, sizes, mlp.at("experts"), ("gate_proj", "up_proj", "down_proj"))
    router = mlp.linear({"gate": sizes.count}, config.hidden_size)
    part = ExpertsMlp(router, experts, sizes.per_token, sizes.normalizes)
    if sizes.shared_width:
        part.shared = dense_mlp(config, mlp.at("shared_expert"), sizes.shared_width)
        part.shared_gate = mlp.linear({"shared_expert_gate": 1}, config.hidden_size)
    return layer_with(config, weights, part)


def _experts(config: ModelConfig, sizes: ExpertsConfig, weights: Weights, names: tuple[str, str, str]) -> Experts:
    """`names`: of an expert's gate, up and down; a checkpoint may have all experts in one tensor instead."""
    count, width, hidden = sizes.count, sizes.width, config.hidden_size
    gate, up, down = names
    if weights.has("gate_up_proj"):
        gate_ups = _of_one_tensor(weights, "gate_up_proj", count, 2 * width, hidden)
        downs = _of_one_tensor(weights, "down_proj", count, hidden, width)
        weights.name_parts(gate_ups, {gate: width, up: width})
        weights.name_parts(downs, {down: hidden})
        return Experts(gate_ups, downs)
    parts = [weights.at(str(expert)) for expert in range(count)]
    return Experts(
        weights.stack([(part, {gate: width, up: width}) for part in parts], hidden),
        weights.stack([(part, {down: hidden}) for part in parts], width),
    )


def _of_one_tensor(weights: Weights, name: str, *shape: int) -> list[Linear]:
    """Qwen3-VL's checkpoints have the matrices transposed; transformers tells it by the shape as well."""
    stack = weights.empty(*shape)
    other = stack.transpose(1, 2)
    stored = other if weights.shape(name) == other.shape != stack.shape else stack
    weights.compute({name: tuple(stored.shape)}, stored.copy_)
    return [TorchLinear(each) for each in stack]
