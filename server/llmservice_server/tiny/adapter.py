"""A random LoRA adapter for a checkpoint of the Llama family, in PEFT's format: for tests and benchmarks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from llmservice_server.tiny.model import write_safetensors

ALL_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")


def write_tiny_adapter(
    directory: Path, base: Path, *, rank: int = 8, seed: int = 0, targets: Sequence[str] = ALL_TARGETS, std: float = 0.1
) -> None:
    """Write adapter_config.json and adapter_model.safetensors for the model in the folder `base`."""
    model = json.loads((base / "config.json").read_text(encoding="utf-8"))
    hidden, heads = model["hidden_size"], model["num_attention_heads"]
    head_dim = model.get("head_dim") or hidden // heads
    queries, keys = heads * head_dim, (model.get("num_key_value_heads") or heads) * head_dim
    mlp = model["intermediate_size"]
    attention = [(queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries)]
    mlps = [(mlp, hidden), (mlp, hidden), (hidden, mlp)]
    shapes = dict(zip(ALL_TARGETS, [*attention, *mlps, (model["vocab_size"], hidden)], strict=True))
    dice = np.random.default_rng(seed)
    modules = {
        f"model.layers.{layer}.{'self_attn' if target[0] in 'qkvo' else 'mlp'}.{target}": shapes[target]
        for layer in range(model["num_hidden_layers"])
        for target in targets
        if target != "lm_head"
    }
    if "lm_head" in targets:
        modules["lm_head"] = shapes["lm_head"]
    weights = {}
    for name, (outputs, inputs) in modules.items():
        weights[f"base_model.model.{name}.lora_A.weight"] = std * dice.standard_normal((rank, inputs), np.float32)
        weights[f"base_model.model.{name}.lora_B.weight"] = std * dice.standard_normal((outputs, rank), np.float32)
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": str(base),
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(targets),
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_safetensors(directory / "adapter_model.safetensors", weights, "float32")
