"""Converts a Llama checkpoint from Hugging Face's format to a GGUF file without a tokenizer for llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TYPES = {"float32": gguf.GGMLQuantizationType.F32, "bfloat16": gguf.GGMLQuantizationType.BF16}


def write_gguf(model: Path, path: Path, dtype: str) -> None:
    """Write the weights of the folder `model` to `path` in `dtype`; vectors stay float32, as llama.cpp requires."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(path, "llama")
    _add_shape(writer, config)
    with safe_open(model / "model.safetensors", framework="pt") as tensors:
        for name in sorted(tensors.keys()):
            values = tensors.get_tensor(name).to(torch.float32).numpy()
            kind = _TYPES[dtype] if values.ndim > 1 else gguf.GGMLQuantizationType.F32
            laid_out = _interleaved(name, values, config)
            writer.add_tensor(_gguf_name(name), gguf.quants.quantize(laid_out, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")


def _gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if not stem.startswith("model.layers."):
        return f"{_NAMES[stem]}.weight"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_NAMES[part]}.weight"


def _interleaved(name: str, values: npt.NDArray[np.float32], config: dict[str, Any]) -> npt.NDArray[np.float32]:
    """Permute the rows of queries and keys: Hugging Face rotates the halves of a head, llama.cpp adjacent rows."""
    if "q_proj" in name:
        heads = config["num_attention_heads"]
    elif "k_proj" in name:
        heads = config["num_key_value_heads"]
    else:
        return values
    rows, columns = values.shape
    return values.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
