"""Writes a Llama checkpoint with random weights, generated on the GPU, as sharded safetensors."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

LLAMA_3_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 8192, "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 128000, "eos_token_id": 128001,
}  # fmt: skip
_LAYERS_PER_SHARD = 4
_WRITERS = 4  # writing a shard copies it twice, on one core

Shapes = dict[str, tuple[int, ...]]


def shards(config: Mapping[str, Any]) -> dict[str, Shapes]:
    """The shape of every tensor, by file."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    layer: Shapes = {
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    found: dict[str, Shapes] = {
        "model-embeddings.safetensors": {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)},
        "model-head.safetensors": {"lm_head.weight": (vocab, hidden)},
    }
    for number in range(config["num_hidden_layers"]):
        shard = found.setdefault(f"model-{number // _LAYERS_PER_SHARD:03d}.safetensors", {})
        shard |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    return found


def write(folder: Path, config: Mapping[str, Any], device: torch.device) -> None:
    """Write a folder in Hugging Face's format, unless it exists."""
    written = folder / "config.json"
    if written.exists() and json.loads(written.read_text()) == config:
        return
    folder.mkdir(parents=True, exist_ok=True)
    written.unlink(missing_ok=True)
    dtype = getattr(torch, config["torch_dtype"])

    def weights(shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=dtype)
        return torch.randn(shape, dtype=dtype, device=device).mul_(shape[1] ** -0.5).cpu()

    def save(name: str, shapes: Shapes) -> None:
        save_file(
            {tensor: weights(shape) for tensor, shape in shapes.items()}, folder / name, metadata={"format": "pt"}
        )

    there = shards(config)
    with ThreadPoolExecutor(_WRITERS) as writers:
        list(writers.map(save, there, there.values()))
    index = {
        "metadata": {"total_size": sum(path.stat().st_size for path in folder.glob("*.safetensors"))},
        "weight_map": {tensor: name for name, shapes in there.items() for tensor in shapes},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    written.write_text(json.dumps(dict(config)))  # last, as it marks the folder as complete


def read_seconds(folder: Path) -> float:
    """Seconds to read all files once."""
    buffer = bytearray(64 << 20)
    started_s = time.perf_counter()
    for path in folder.glob("*.safetensors"):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - started_s
