"""Loading a quantised mixture of many small experts: what a tensor costs besides its bytes."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from llmservice_server.engine.config import Implementation
from llmservice_server.runtime.loader import Checkpoint

_SIZE, _BLOCK = 128, 128
_TENSORS_OF_A_FILE = 1500
CODES: tuple[Implementation, ...] = ("own", "transformers")


def measure_loading(layers: int, experts: int) -> Iterator[dict[str, Any]]:
    """A row for each code: a checkpoint of Qwen3-MoE's layout in fp8 blocks, whose matrices are 128 × 128 or less."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tensors, files = _write(folder, layers, experts)
        for code in CODES:
            checkpoint = Checkpoint.open(folder, code)
            began_s = time.perf_counter()
            checkpoint.load(torch.bfloat16, torch.device("cpu"), "stored")
            taken_s = time.perf_counter() - began_s
            yield {
                "code": code,
                "tensors": tensors,
                "files": files,
                "load_s": taken_s,
                "tensor_us": taken_s / tensors * 1e6,
            }


def _write(folder: Path, layers: int, experts: int) -> tuple[int, int]:
    """Returns the numbers of tensors and of files."""
    sizes = {"hidden_size": _SIZE, "intermediate_size": _SIZE, "moe_intermediate_size": _SIZE, "vocab_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": _SIZE // 4}
    mixture = {"num_hidden_layers": layers, "num_experts": experts, "num_experts_per_tok": 2, "norm_topk_prob": True}
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **sizes,
        **heads,
        **mixture,
        "max_position_embeddings": 512,
        "dtype": "bfloat16",
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [_BLOCK, _BLOCK]},
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = _tensors(layers, experts)
    names = sorted(tensors)
    for first in range(0, len(names), _TENSORS_OF_A_FILE):
        part = names[first : first + _TENSORS_OF_A_FILE]
        save_file({each: tensors[each] for each in part}, folder / f"{first}.safetensors")
    return len(names), -(-len(names) // _TENSORS_OF_A_FILE)


def _tensors(layers: int, experts: int) -> dict[str, torch.Tensor]:
    def quantized(name: str, outputs: int) -> dict[str, torch.Tensor]:
        values = torch.randn(outputs, _SIZE).to(torch.float8_e4m3fn)
        return {f"{name}.weight": values, f"{name}.weight_scale_inv": torch.ones(1, 1)}

    norms = {"input_layernorm": _SIZE, "post_attention_layernorm": _SIZE}
    norms |= {"self_attn.q_norm": _SIZE // 4, "self_attn.k_norm": _SIZE // 4}
    found = {f"{name}.weight": torch.zeros(256, _SIZE).bfloat16() for name in ("model.embed_tokens", "lm_head")}
    found["model.norm.weight"] = torch.ones(_SIZE).bfloat16()
    for layer in range(layers):
        place = f"model.layers.{layer}."
        found |= {f"{place}{name}.weight": torch.ones(size).bfloat16() for name, size in norms.items()}
        found[f"{place}mlp.gate.weight"] = torch.zeros(experts, _SIZE).bfloat16()
        for part, outputs in (("q", _SIZE), ("k", _SIZE // 2), ("v", _SIZE // 2), ("o", _SIZE)):
            found |= quantized(f"{place}self_attn.{part}_proj", outputs)
        for expert in range(experts):
            for part in ("gate", "up", "down"):
                found |= quantized(f"{place}mlp.experts.{expert}.{part}_proj", _SIZE)
    return found
