"""The architectures that are implemented here, by their names in config.json."""

from __future__ import annotations

from collections.abc import Mapping

from llmservice_server.models.decoder import BuildLayer
from llmservice_server.models.gemma import gemma_layer
from llmservice_server.models.gpt_oss import gpt_oss_layer
from llmservice_server.models.llama import llama_layer
from llmservice_server.models.mixtures import mixtral_layer, qwen_moe_layer

ARCHITECTURES: Mapping[str, BuildLayer] = {
    "Gemma2ForCausalLM": gemma_layer,
    "Gemma3ForCausalLM": gemma_layer,
    "GemmaForCausalLM": llama_layer,
    "LlamaForCausalLM": llama_layer,
    "MistralForCausalLM": llama_layer,
    "Qwen2ForCausalLM": llama_layer,
    "Qwen3ForCausalLM": llama_layer,
    "GptOssForCausalLM": gpt_oss_layer,
    "MixtralForCausalLM": mixtral_layer,
    "Qwen2MoeForCausalLM": qwen_moe_layer,
    "Qwen3MoeForCausalLM": qwen_moe_layer,
}
"""The planner's families name the same ones in `served_architecture`, where the operator, without torch, finds them."""
