"""Llama 3 8B's shape with random weights, as a checkpoint: sharded safetensors, made on the card."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 8192, "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 128000, "eos_token_id": 128001,
}  # fmt: skip
_LAYERS_PER_SHARD = 8


def write(folder: Path, layers: int = 32, device: str = "cuda") -> Path:
    """A folder in Hugging Face's format, written unless it is there."""
    config = CONFIG | {"num_hidden_layers": layers}
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    hidden, inner = 4096, 14336
    kv, vocab = 8 * 128, 128256

    def random(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, dtype=torch.bfloat16, device=device).mul_(columns**-0.5).cpu()

    ones = torch.ones(hidden, dtype=torch.bfloat16)
    weight_map: dict[str, str] = {}

    def save(name: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, folder / name)
        weight_map.update(dict.fromkeys(tensors, name))

    save(
        "model-embeddings.safetensors",
        {
            "model.embed_tokens.weight": random(vocab, hidden),
            "lm_head.weight": random(vocab, hidden),
            "model.norm.weight": ones,
        },
    )
    for first in range(0, layers, _LAYERS_PER_SHARD):
        tensors: dict[str, torch.Tensor] = {}
        for layer in range(first, min(layers, first + _LAYERS_PER_SHARD)):
            name = f"model.layers.{layer}."
            tensors |= {
                name + "input_layernorm.weight": ones.clone(),
                name + "post_attention_layernorm.weight": ones.clone(),
                name + "self_attn.q_proj.weight": random(hidden, hidden),
                name + "self_attn.k_proj.weight": random(kv, hidden),
                name + "self_attn.v_proj.weight": random(kv, hidden),
                name + "self_attn.o_proj.weight": random(hidden, hidden),
                name + "mlp.gate_proj.weight": random(inner, hidden),
                name + "mlp.up_proj.weight": random(inner, hidden),
                name + "mlp.down_proj.weight": random(hidden, inner),
            }
        save(f"model-{first:03d}.safetensors", tensors)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))  # last: it says that the rest is there
    return folder


def read_seconds(folder: Path) -> float:
    """How long the files take to be read, once, from wherever they lie."""
    buffer = bytearray(64 << 20)
    started_s = time.perf_counter()
    for path in folder.glob("*.safetensors"):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - started_s
