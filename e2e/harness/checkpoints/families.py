"""Small random checkpoints of every model family, saved by transformers itself.

A new family is a line of `FAMILIES`, where its model is our own, or of `OTHERS`, where its code is transformers'.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

import llmservice_server.models.transformers_config  # noqa: F401 - registers what transformers leaves out

SMALL = {
    "vocab_size": 193,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


@dataclass(frozen=True)
class Family:
    """A `model_type` of transformers, and keys that are rewritten in the config.json that it saves."""

    model_type: str
    settings: dict[str, Any] = field(default_factory=dict)
    rewrite: dict[str, Any] = field(default_factory=dict)
    shard: str = "1GB"


LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
SLIDING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 24}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES = {
    "llama2, all heads with keys of their own": Family("llama", {"num_key_value_heads": 6}),
    "llama3, grouped heads and its rope scaling": Family("llama", {"rope_parameters": LLAMA3_SCALING}),
    "llama3, tied embeddings": Family("llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3_SCALING}),
    "llama3, config.json as before transformers 5": Family(
        "llama",
        {"rope_parameters": LLAMA3_SCALING},
        rewrite={"rope_parameters": None, "rope_theta": 500.0, "rope_scaling": LLAMA3_SCALING},
    ),
    "llama, linear rope scaling": Family(
        "llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}}
    ),
    "llama, dynamic rope scaling within its context": Family(
        "llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}
    ),
    "llama, biases everywhere": Family("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, sharded safetensors": Family("llama", shard="40KB"),
    "llama, explicit head_dim": Family("llama", {"head_dim": 16}),
    "mistral, sliding window": Family("mistral", {"sliding_window": 24}),
    "mistral, no window and explicit head_dim": Family("mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2, biases and tied embeddings": Family("qwen2", {"tie_word_embeddings": True}),
    "qwen2, yarn": Family("qwen2", {"rope_parameters": YARN}),
    "qwen2, a window from the second layer on": Family(
        "qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
    ),
    "qwen3, qk-norm and explicit head_dim": Family("qwen3", {"head_dim": 20}),
    "qwen3, windows by layer, tied and sharded": Family(
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 30,
            "tie_word_embeddings": True,
            "head_dim": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        shard="40KB",
    ),
    "gpt-oss, sinks and experts with biases": Family(
        "gpt_oss", {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24}
    ),
    "mixtral, sharded": Family("mixtral", {"num_local_experts": 4}, shard="40KB"),
    "qwen2-moe, a shared expert with a gate": Family("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 32}),
    "qwen2-moe, windows of every other layer before the last, and no biases": Family(
        "qwen2_moe",
        {
            **EXPERTS,
            "qkv_bias": False,
            "shared_expert_intermediate_size": 32,
            "use_sliding_window": True,
            "sliding_window": 24,
            "max_window_layers": 2,
        },
        rewrite={"layer_types": None},
    ),
    "qwen3-moe, a window of all layers": Family(
        "qwen3_moe", {**EXPERTS, "head_dim": 16, "use_sliding_window": True, "sliding_window": 24}
    ),
    "qwen3-moe": Family("qwen3_moe", {**EXPERTS, "head_dim": 16}),
    "qwen3-moe, a dense layer and normalised weights": Family(
        "qwen3_moe", {**EXPERTS, "head_dim": 16, "mlp_only_layers": [1], "norm_topk_prob": True}
    ),
    "gemma": Family("gemma", {"head_dim": 16}),
    "gemma2, softcaps, four norms and alternating windows": Family(
        "gemma2", {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 20}
    ),
    "gemma3, two kinds of rope": Family("gemma3_text", {"head_dim": 16, **SLIDING}),
}
NO_GROUPS = {"num_key_value_heads": None}  # a key that is not theirs
PADDING = {"pad_token_id": 0}  # the default is beyond the small vocabulary
SHARED_KEYS = {
    "num_hidden_layers": 6,
    "layer_types": [*["sliding_attention"] * 3, "full_attention", "sliding_attention", "full_attention"],
    "num_kv_shared_layers": 2,
    "sliding_window": 24,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 193,
    **PADDING,
}
FEWER_KEYS = {
    "num_hidden_layers": 6,
    "num_key_value_heads": 6,
    "head_dim": 16,
    "num_global_key_value_heads": 1,
    "global_head_dim": 32,
    "attention_k_eq_v": True,
    "sliding_window": 24,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
    **PADDING,
}
LATENT = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 24,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    **PADDING,
}
OTHERS = {
    "olmoe": Family("olmoe", EXPERTS),
    "glm4-moe": Family("glm4_moe", {**EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "head_dim": 16}),
    "ernie4.5-moe": Family("ernie4_5_moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24}),
    "minimax-m2": Family(
        "minimax_m2", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "attn_type_list": [1, 1, 1]}
    ),
    "granite-moe": Family("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "granite-4 micro, of a hybrid family and without hybrid layers": Family(
        "granitemoehybrid",
        {
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 80,
            "mamba_n_heads": 8,
            "position_embedding_type": "rope",
            **PADDING,
            "layer_types": ["attention"] * 3,
        },
        rewrite={"layer_types": ["attention"] * 3},
    ),
    "gpt2, learned positions and transposed matrices": Family("gpt2", rewrite=NO_GROUPS),
    "gpt-neox, rotary of a part of the head": Family("gpt_neox", rewrite=NO_GROUPS),
    "gpt-bigcode, one head of keys": Family("gpt_bigcode", rewrite=NO_GROUPS),
    "opt": Family("opt", {"ffn_dim": 80, "word_embed_proj_dim": 48}, rewrite=NO_GROUPS),
    "phi": Family("phi"),
    "phimoe, a window that only its masks have": Family(
        "phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24}
    ),
    "phi3, fused matrices": Family("phi3", PADDING),
    "starcoder2": Family("starcoder2", {"sliding_window": 24}),
    "stablelm": Family("stablelm"),
    "olmo": Family("olmo"),
    "olmo2, norms after the layers": Family("olmo2"),
    "glm": Family("glm", {"head_dim": 16, **PADDING}),
    "glm4": Family("glm4", {"head_dim": 16, **PADDING}),
    "granite, its own scaling of scores and logits": Family(
        "granite", {"attention_multiplier": 0.2, "logits_scaling": 3.0, "residual_multiplier": 0.5}
    ),
    "cohere, parallel layers": Family("cohere", {"logit_scale": 0.5}),
    "cohere2, layers without positions": Family("cohere2", SLIDING),
    "smollm3, layers without positions": Family("smollm3", PADDING),
    "exaone4": Family("exaone4", SLIDING),
    "ernie4.5": Family("ernie4_5", {"head_dim": 16}),
    "seed-oss": Family("seed_oss", {"head_dim": 16}),
    "apertus": Family("apertus"),
    "arcee": Family("arcee"),
    "helium": Family("helium", {"head_dim": 8}),
    "nemotron": Family("nemotron"),
    "gemma3n, layers that share keys": Family("gemma3n_text", {"head_dim": 16, **SHARED_KEYS, "laurel_rank": 8}),
    "gemma4, larger heads in layers without a window": Family(
        "gemma4_text", {"head_dim": 16, "global_head_dim": 32, **SHARED_KEYS}
    ),
    "gemma4-moe, fewer keys in layers without a window": Family("gemma4_text", FEWER_KEYS),
    "mimo-v2, more keys and sinks in layers with a window": Family(
        "mimo_v2_flash",
        {**EXPERTS, "n_routed_experts": 4, "num_attention_heads": 4, "head_dim": 24, "v_head_dim": 16, **SLIDING},
    ),
    "deepseek-v2, latent attention": Family("deepseek_v2", LATENT),
    "deepseek-v3, latent attention": Family("deepseek_v3", LATENT),
    "glm-4.7-flash, latent attention": Family("glm4_moe_lite", LATENT),
    "minicpm3, latent attention": Family("minicpm3", LATENT),
    "mistral4, latent attention whose queries grow with the position": Family(
        "mistral4",
        {
            **LATENT,
            "qk_rope_head_dim": 8,
            "head_dim": 16,
            "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1, "partial_rotary_factor": 0.5},
        },
    ),
    "youtu, latent attention": Family("youtu", LATENT),
    "longcat-flash, latent attention twice in a layer, and experts without weights": Family(
        "longcat_flash",
        {
            **LATENT,
            "num_hidden_layers": 4,
            "head_dim": 4,
            "ffn_hidden_size": 80,
            "expert_ffn_hidden_size": 24,
            "moe_topk": 2,
            "zero_expert_num": 2,
        },
    ),
    "dbrx, experts of all in one matrix": Family(
        "dbrx",
        {
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 1},
            "d_model": 48,
            "ffn_config": {"ffn_hidden_size": 80, "moe_num_experts": 4, "moe_top_k": 2},
        },
        rewrite={"num_key_value_heads": None},
    ),
    "hunyuan": Family("hunyuan_v1_dense", {"head_dim": 16}),
    "exaone, names of its own": Family("exaone", PADDING),
    "sarvam-moe, queries, keys and values in one matrix": Family(
        "sarvam_moe", {**EXPERTS, "n_routed_experts": 4, "head_dim": 16, **PADDING}
    ),
    "sarvam-mla, latent attention": Family("sarvam_mla", LATENT),
    "apertus-1.5": Family("apertus1p5_text", PADDING),
    "llama4, chunks, and queries that grow with the position": Family(
        "llama4_text",
        {
            "num_hidden_layers": 4,
            "head_dim": 8,
            "num_local_experts": 4,
            "moe_layers": [0, 1, 3],
            "intermediate_size_mlp": 96,
            "attention_chunk_size": 32,
            "floor_scale": 24,
        },
    ),
}


def save(family: Family, folder: Path, **settings: Any) -> PreTrainedModel:
    """Write a checkpoint with weights at which every part matters: norms are not one, biases not zero.

    `settings` replace those of the family.
    """
    torch.manual_seed(1)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family.model_type, **SMALL | family.settings | settings)
    )
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.25 * noise)
    model.eval().save_pretrained(folder, max_shard_size=family.shard)
    assert ((folder / "model.safetensors.index.json").exists()) == (family.shard != "1GB")
    if family.rewrite:
        config = json.loads((folder / "config.json").read_text()) | family.rewrite
        (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return model
