"""The Llama family's layer: Llama 2 and 3, Mistral, Qwen2, Qwen3. Its parts are those of other architectures too."""

from __future__ import annotations

from functools import partial

import torch

from llmservice_server.backend.layers import DecoderLayer, DenseMlp, Mlp, SelfAttention
from llmservice_server.models.config import ModelConfig
from llmservice_server.models.weights import Weights


def llama_layer(config: ModelConfig, weights: Weights, index: int) -> DecoderLayer:
    return layer_with(config, weights, dense_mlp(config, weights.at("mlp"), config.intermediate_size))


def layer_with(config: ModelConfig, weights: Weights, mlp: Mlp) -> DecoderLayer:
    return DecoderLayer(
        input_norm=norm(config, weights, "input_layernorm"),
        attention=self_attention(config, weights.at("self_attn")),
        post_attention_norm=norm(config, weights, "post_attention_layernorm"),
        mlp=mlp,
    )


def norm(config: ModelConfig, weights: Weights, name: str) -> torch.Tensor:
    return weights.norm(name, config.hidden_size, less_one=config.is_gemma)


def self_attention(config: ModelConfig, weights: Weights) -> SelfAttention:
    query_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv = {"q_proj": query_rows, "k_proj": kv_rows, "v_proj": kv_rows}
    return SelfAttention(
        qkv=weights.linear(qkv, config.hidden_size, bias=config.qkv_bias),
        qk_norm=_qk_norm(config, weights) if config.qk_norm else None,
        o=weights.linear({"o_proj": config.hidden_size}, query_rows, bias=config.o_bias),
    )


def _qk_norm(config: ModelConfig, weights: Weights) -> torch.Tensor:
    """`[num_heads + num_kv_heads, head_dim]`: the checkpoint has one row for all queries and one for all keys."""
    counts = {"q_norm": config.num_heads, "k_norm": config.num_kv_heads}
    rows = [weights.norm(name, config.head_dim, less_one=config.is_gemma) for name in counts]
    by_head = rows[0].new_empty(sum(counts.values()), config.head_dim)
    for row, heads in zip(rows, torch.split(by_head, list(counts.values())), strict=True):
        weights.when_filled(partial(heads.copy_, row))
    return by_head


def dense_mlp(config: ModelConfig, weights: Weights, width: int) -> DenseMlp:
    """With `width` numbers between its two products."""
    return DenseMlp(
        gate_up=weights.linear({"gate_proj": width, "up_proj": width}, config.hidden_size, bias=config.mlp_bias),
        down=weights.linear({"down_proj": config.hidden_size}, width, bias=config.mlp_bias),
        activation=config.activation,
    )
