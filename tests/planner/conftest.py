"""The figures of real models' config.json files; what equals the family's default is left out, as in the files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from harness.stores.model_hub import LLAMA_3_8B
from llmservice_planner.model.shape import ModelShape

LLAMA3_70B = {
    **LLAMA_3_8B,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
}
LLAMA32_1B = {
    **LLAMA_3_8B,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
QWEN25_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "num_hidden_layers": 28,
    "vocab_size": 152064,
    "use_sliding_window": False,
    "sliding_window": 131072,
    "max_window_layers": 28,
    "dtype": "bfloat16",
}
QWEN3_06B = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_hidden_layers": 28,
    "vocab_size": 151936,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_hidden_layers": 48,
    "vocab_size": 151936,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "dtype": "bfloat16",
}
QWEN15_MOE = {
    "model_type": "qwen2_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "vocab_size": 151936,
    "dtype": "bfloat16",
}
MISTRAL_7B = {
    "model_type": "mistral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
    "sliding_window": 4096,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
}
MIXTRAL_8X7B = {
    **MISTRAL_7B,
    "model_type": "mixtral",
    "sliding_window": None,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
GEMMA_7B = {
    "model_type": "gemma",
    "hidden_size": 3072,
    "num_hidden_layers": 28,
    "vocab_size": 256000,
    "dtype": "bfloat16",
}
GEMMA2_9B = {
    "model_type": "gemma2",
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_hidden_layers": 42,
    "sliding_window": 4096,
    "dtype": "bfloat16",
}
GEMMA3_1B = {
    "model_type": "gemma3_text",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "num_hidden_layers": 26,
    "vocab_size": 262144,
    "sliding_window": 512,
    "dtype": "bfloat16",
}
PHI3_MINI = {
    "model_type": "phi3",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 32064,
    "sliding_window": 2047,
    "dtype": "bfloat16",
}
DEEPSEEK_V2_LITE = {
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_hidden_layers": 27,
    "q_lora_rank": None,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
    "dtype": "bfloat16",
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "max_position_embeddings": 163840,
    "dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8"},
}
GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 24,
    "num_local_experts": 32,
    "attention_bias": True,
    "dtype": "bfloat16",
    "quantization_config": {"quant_method": "mxfp4"},
}
GPT_OSS_120B = {**GPT_OSS_20B, "num_hidden_layers": 36, "num_local_experts": 128}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3-8b": LLAMA_3_8B,
    "llama-3-70b": LLAMA3_70B,
    "llama-3.2-1b": LLAMA32_1B,
    "qwen2.5-7b": QWEN25_7B,
    "qwen3-0.6b": QWEN3_06B,
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "qwen1.5-moe-a2.7b": QWEN15_MOE,
    "mistral-7b": MISTRAL_7B,
    "mixtral-8x7b": MIXTRAL_8X7B,
    "gemma-7b": GEMMA_7B,
    "gemma-2-9b": GEMMA2_9B,
    "gemma-3-1b": GEMMA3_1B,
    "phi-3-mini": PHI3_MINI,
    "deepseek-v2-lite": DEEPSEEK_V2_LITE,
    "deepseek-v3": DEEPSEEK_V3,
    "gpt-oss-20b": GPT_OSS_20B,
    "gpt-oss-120b": GPT_OSS_120B,
}


@pytest.fixture(scope="session")
def config_of() -> Callable[[str], dict[str, Any]]:
    """A model's parsed config.json, by its name."""
    return lambda name: dict(CONFIGS[name])


@pytest.fixture(scope="session")
def shape_of() -> Callable[[str], ModelShape]:
    """A model's shape, by its name."""
    return lambda name: ModelShape.from_config(CONFIGS[name])
