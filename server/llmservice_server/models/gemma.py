"""The layers of Gemma 2 and 3, which norm what attention and MLP add to the states, too. Gemma's first is Llama's."""

from __future__ import annotations

from llmservice_server.backend.layers import DecoderLayer
from llmservice_server.models.config import ModelConfig
from llmservice_server.models.llama import dense_mlp, norm, self_attention
from llmservice_server.models.weights import Weights


def gemma_layer(config: ModelConfig, weights: Weights, index: int) -> DecoderLayer:
    return DecoderLayer(
        input_norm=norm(config, weights, "input_layernorm"),
        attention=self_attention(config, weights.at("self_attn")),
        attention_delta_norm=norm(config, weights, "post_attention_layernorm"),
        post_attention_norm=norm(config, weights, "pre_feedforward_layernorm"),
        mlp=dense_mlp(config, weights.at("mlp"), config.intermediate_size),
        mlp_delta_norm=norm(config, weights, "post_feedforward_layernorm"),
    )
