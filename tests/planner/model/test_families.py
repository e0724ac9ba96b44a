"""The families' layouts and defaults against the models of transformers, built without memory on the meta device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from llmservice_planner.model.families import FAMILIES
from llmservice_planner.model.shape import ModelShape

_COMMON = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 384,
    "pad_token_id": 0,
}
_LATENT = {
    "num_key_value_heads": 8,
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
}
_VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"tie_word_embeddings": True, "head_dim": 24}),
    ("mistral", {"head_dim": 16}),
    ("mistral", {"mlp_bias": True}),
    ("mixtral", {"num_local_experts": 4}),
    ("qwen2", {}),
    ("qwen2_moe", {"num_experts": 6, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 80}),
    ("qwen2_moe", {"num_experts": 6, "moe_intermediate_size": 40, "decoder_sparse_step": 2, "mlp_only_layers": [1]}),
    ("qwen3", {"head_dim": 16}),
    ("qwen3", {"head_dim": 16, "attention_bias": True}),
    ("qwen3_moe", {"head_dim": 16, "num_experts": 10, "moe_intermediate_size": 40}),
    ("gpt_oss", {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2}),
    ("gemma", {"head_dim": 16}),
    ("gemma2", {"head_dim": 16}),
    ("gemma3_text", {"head_dim": 16}),
    ("phi3", {}),
    ("deepseek_v2", {**_LATENT, "first_k_dense_replace": 1, "q_lora_rank": None}),
    ("deepseek_v2", {**_LATENT, "first_k_dense_replace": 2}),
    ("deepseek_v3", {**_LATENT, "first_k_dense_replace": 1}),
]


@pytest.mark.parametrize(("family", "changes"), _VARIANTS, ids=lambda value: value if isinstance(value, str) else "")
def test_parameters_equal_those_of_the_reference_model(family: str, changes: dict[str, Any]) -> None:
    config = CONFIG_MAPPING[family](**{**_COMMON, **changes})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert FAMILIES[family].served_architecture in (None, type(model).__name__)
    stored = {id(parameter): parameter.numel() for parameter in model.parameters()}
    corrections = sum(item.numel() for name, item in model.named_buffers() if "e_score_correction_bias" in name)
    assert ModelShape.from_config(config.to_dict()).num_parameters == sum(stored.values()) + corrections


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_what_a_config_leaves_out_means_what_it_means_to_transformers(family: str) -> None:
    reference = CONFIG_MAPPING[family]()
    left_out = ModelShape.from_config({"model_type": family, **_EXPERTS.get(family, {})})
    written = ModelShape.from_config({**reference.to_dict(), **_EXPERTS.get(family, {})})
    assert left_out == written


_EXPERTS = {"deepseek_v2": {"num_experts_per_tok": 6}}  # transformers has no default for it
