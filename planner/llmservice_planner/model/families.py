"""Model families: the defaults of keys missing in config.json, and differences from the Llama layout.

`config.json` contains the differences from the family's defaults, so a missing key means the family's value, not
Llama's. The defaults are those of the configuration classes of Hugging Face transformers 5.x.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

SlidingRule = Literal["none", "all", "even", "pattern", "first", "last", "listed"]


@dataclass(frozen=True, slots=True)
class Family:
    """One `model_type`. The layout is Llama's (RMSNorm, gated MLP of three matrices) except for these fields."""

    name: str
    defaults: Mapping[str, Any]
    served_architecture: str | None = None
    """The name in config.json's `architectures` by which the inference server runs the family; None: only sized."""
    qkv_bias: bool | None = None
    """None: the config's `attention_bias`, also for o_proj. A bool: that of q, k, v, unless there is a default of the
    config's `qkv_bias`, which then says it; o_proj has none."""
    mlp_bias: bool = False
    """Whether the config's `mlp_bias` has an effect."""
    qk_norm: bool = False
    norms_per_layer: int = 2
    sliding: SlidingRule = "none"
    """The sliding-window layers without `layer_types`: `even` 0, 2, 4…; `pattern` all but every n-th (Gemma 3);
    `first` every other one before `max_window_layers` (Qwen2-MoE), `last` those from it on (Qwen); `listed` none
    (most families that are not known)."""
    router_bias: bool = False
    """A bias of the router, or a correction of its scores (DeepSeek-V3), for each expert."""
    normalizes_experts: bool = False
    """The weights of a token's experts always sum to 1; otherwise the config's `norm_topk_prob` says whether."""
    has_sinks: bool = False
    """Each head has a score of no value, which takes part in the softmax."""
    shared_gate: bool = False
    """A sigmoid gate of `hidden_size` weights on the shared expert (Qwen2-MoE)."""


_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
_MISTRAL = {**_LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072}
_QWEN = {
    **_LLAMA,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_QWEN_MOE = {
    **_QWEN,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": (),
}
_GEMMA = {
    **_LLAMA,
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}
_GEMMA2 = {
    **_GEMMA,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
}
_DEEPSEEK = {
    **_LLAMA,
    "vocab_size": 102400,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1407,
    "first_k_dense_replace": 0,
}

_ALL = (
    Family("llama", _LLAMA, "LlamaForCausalLM", mlp_bias=True),
    Family("mistral", {**_MISTRAL, "sliding_window": 4096}, "MistralForCausalLM", qkv_bias=False, sliding="all"),
    Family(
        "mixtral",
        {**_MISTRAL, "num_local_experts": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
        "MixtralForCausalLM",
        qkv_bias=False,
        sliding="all",
        normalizes_experts=True,
    ),
    Family("qwen2", _QWEN, "Qwen2ForCausalLM", qkv_bias=True, sliding="last"),
    Family(
        "qwen2_moe",
        {
            **_QWEN_MOE,
            "intermediate_size": 5632,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "qkv_bias": True,
        },
        "Qwen2MoeForCausalLM",
        qkv_bias=True,
        sliding="first",
        shared_gate=True,
    ),
    Family("qwen3", {**_QWEN, "head_dim": 128}, "Qwen3ForCausalLM", qk_norm=True, sliding="last"),
    Family(
        "qwen3_moe",
        {
            **_QWEN_MOE,
            "intermediate_size": 6144,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "moe_intermediate_size": 768,
        },
        "Qwen3MoeForCausalLM",
        qk_norm=True,
        sliding="all",
    ),
    Family(
        "gpt_oss",
        {
            **_LLAMA,
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "max_position_embeddings": 131072,
            "attention_bias": True,
            "mlp_bias": True,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "rope_parameters": {  # not `rope_scaling`, which goes before those of config.json
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "torch_dtype": "bfloat16",
        },
        "GptOssForCausalLM",
        mlp_bias=True,
        sliding="even",
        router_bias=True,
        normalizes_experts=True,
        has_sinks=True,
    ),
    Family("gemma", _GEMMA, "GemmaForCausalLM"),
    Family(
        "gemma2",
        {**_GEMMA2, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        "Gemma2ForCausalLM",
        norms_per_layer=4,
        sliding="even",
    ),
    Family(
        "gemma3_text",
        {
            **_GEMMA2,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "final_logit_softcapping": None,
            "sliding_window_pattern": 6,
            "rope_theta": 1e6,
            "rope_local_base_freq": 10000.0,
        },
        "Gemma3ForCausalLM",
        qk_norm=True,
        norms_per_layer=4,
        sliding="pattern",
    ),
    Family(
        "phi3",
        {
            **_LLAMA,
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 4096,
        },
        qkv_bias=False,
        sliding="all",
    ),
    Family("deepseek_v2", _DEEPSEEK, mlp_bias=True),
    Family(
        "deepseek_v3",
        {
            **_DEEPSEEK,
            "vocab_size": 129280,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "max_position_embeddings": 4096,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "first_k_dense_replace": 3,
        },
        router_bias=True,
    ),
)

UNKNOWN_WITH_WINDOWS = frozenset({"ministral3", "phimoe", "starcoder2"})
"""Families that are not listed, with a window in all layers if config.json names one."""
UNSERVED_KEYS: Mapping[str, str] = {
    "linear_num_key_heads": "linear attention",  # Qwen3-Next, Qwen3.5
    "linear_attn_config": "linear attention",  # Kimi Linear
    "mamba_d_state": "state spaces",  # Jamba, Bamba, Falcon-H1, Granite 4
    "ssm_state_size": "state spaces",  # Nemotron-H, Nemotron 3 Nano
    "lru_width": "recurrence",  # RecurrentGemma
    "cross_attention_layers": "attention to images",  # Llama 3.2 Vision
    "conv_L_cache": "convolutions",  # LFM2
    "index_topk": "attention to chosen tokens",  # DeepSeek V3.2, GLM-5
}
"""Keys of config.json by which such layers are known where `layer_types` does not list them."""
UNSERVED = frozenset(
    {
        "bloom",
        "diffllama",
        "doge",
        "falcon",
        "gpt_neo",
        "gpt_neox_japanese",
        "jetmoe",
        "mpt",
        "openai-gpt",
        "xglm",
    }
)
"""Decoders that the server refuses because of their attention in transformers, which config.json does not show."""
UNKNOWN_KEYS: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size"),
    "max_position_embeddings": ("n_positions", "max_seq_len"),
}
"""Other names that families use for a key."""
UNKNOWN_EXPERT_KEYS: Mapping[str, tuple[str, ...]] = {
    "num_experts": ("moe_num_experts",),
    "num_experts_per_tok": ("moe_topk", "moe_k", "top_k_experts"),
    "moe_intermediate_size": (),
    "n_shared_experts": ("num_shared_experts", "moe_num_shared_experts", "num_shared_expert"),
    "first_k_dense_replace": ("num_dense_layers", "moe_layer_start_index"),
}
"""Likewise, of those that only mixtures of experts have. Hunyuan writes a list with a number for each layer."""

FAMILIES: Mapping[str, Family] = {family.name: family for family in _ALL}
"""By `model_type`. Gemma 3's multimodal configs have the text model in `text_config`; only that is counted."""

_QWEN3_MOE = FAMILIES["qwen3_moe"]
_WITH_IMAGES = {
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), FAMILIES["qwen2"]),
    "qwen3_vl_text": FAMILIES["qwen3"],
    "gemma3": FAMILIES["gemma3_text"],
    "qwen3_vl_moe_text": replace(_QWEN3_MOE, defaults={**_QWEN3_MOE.defaults, "norm_topk_prob": True}),
}
"""Kinds of language models that are another family for text alone, where a token's three positions are equal.

The first checkpoints of Qwen 2 and 2.5 VL, and some of Gemma 3 for text alone, have the language model's keys without
a `text_config`."""


def find_family(model_type: str) -> Family | None:
    """That of a model, or of the language model of one with images; None: it is not listed."""
    return FAMILIES.get(model_type) or _WITH_IMAGES.get(model_type)
