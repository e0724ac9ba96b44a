"""A tiny Llama-architecture checkpoint in Hugging Face's format, with random weights: for demos, tests and benchmarks.

Written without torch. The same spec gives the same bytes on every machine with the same numpy and tokenizers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from llmservice_server.tiny import tokenizer as tiny_tokenizer

Weights = dict[str, npt.NDArray[np.float32]]
DTYPES = ("float32", "bfloat16", "float16")

_LOGIT_STD = 3.0  # at temperature 1 some tens of tokens are likely: varied text, and no two logits nearly equal
_SUPPRESSED = -40.0  # logit of the tokens that a readable text has no use for: e^-40 is never sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModelSpec:
    """The checkpoint's shape; raises ValueError where no Llama has that shape."""

    layers: int = 4
    hidden_size: int = 256
    heads: int = 8
    kv_heads: int = 4
    vocab_size: int = 1024
    max_position_embeddings: int = 2048
    seed: int = 0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("layers", "hidden_size", "heads", "kv_heads", "max_position_embeddings"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}, expected 0 or more")
        if self.hidden_size % (2 * self.heads):
            raise ValueError(f"hidden_size {self.hidden_size} does not give each of {self.heads} heads an even size")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is no multiple of kv_heads {self.kv_heads}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is unknown, expected one of {', '.join(DTYPES)}")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.heads

    @property
    def intermediate_size(self) -> int:
        """Llama's 8/3 of the hidden size, rounded up to a multiple of 16."""
        return -(-self.hidden_size * 8 // (3 * 16)) * 16


def write_tiny_model(directory: Path, spec: TinyModelSpec) -> None:
    """Write config.json, generation_config.json, model.safetensors, tokenizer.json and tokenizer_config.json."""
    tokenizer = tiny_tokenizer.train(spec.vocab_size)
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in {
        "config.json": _config(spec, tokenizer),
        "generation_config.json": _generation_config(tokenizer),
        "tokenizer_config.json": _tokenizer_config(spec),
    }.items():
        (directory / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    tokenizer.save(str(directory / "tokenizer.json"))
    weights = _weights(spec, tiny_tokenizer.printable_ids(tokenizer))
    write_safetensors(directory / "model.safetensors", weights, spec.dtype)


def _weights(spec: TinyModelSpec, printable: list[int]) -> Weights:
    """Random weights, with channel 0 of the residual stream kept constant so that it can act as a bias on the logits.

    Llama's output layer has no bias, and without one a random model would mostly write halves of characters. Every
    embedding holds 1.0 in channel 0 and no layer writes to it, so that an unwanted row is pushed down through it.
    """
    random = np.random.Generator(np.random.PCG64(spec.seed))

    def normal(*shape: int, std: float) -> npt.NDArray[np.float32]:
        return (random.standard_normal(shape) * std).astype(np.float32)

    hidden, inner = spec.hidden_size, spec.intermediate_size
    kv = spec.kv_heads * spec.head_dim
    embedding = normal(spec.vocab_size, hidden, std=1.0)
    embedding[:, 0] = 1.0
    weights: Weights = {"model.embed_tokens.weight": embedding, "model.norm.weight": np.ones(hidden, np.float32)}
    for layer in range(spec.layers):
        prefix = f"model.layers.{layer}"
        o_proj, down_proj = normal(hidden, hidden, std=hidden**-0.5), normal(hidden, inner, std=inner**-0.5)
        o_proj[0], down_proj[0] = 0.0, 0.0
        weights |= {
            f"{prefix}.input_layernorm.weight": np.ones(hidden, np.float32),
            f"{prefix}.post_attention_layernorm.weight": np.ones(hidden, np.float32),
            f"{prefix}.self_attn.q_proj.weight": normal(hidden, hidden, std=hidden**-0.5),
            f"{prefix}.self_attn.k_proj.weight": normal(kv, hidden, std=hidden**-0.5),
            f"{prefix}.self_attn.v_proj.weight": normal(kv, hidden, std=hidden**-0.5),
            f"{prefix}.self_attn.o_proj.weight": o_proj,
            f"{prefix}.mlp.gate_proj.weight": normal(inner, hidden, std=hidden**-0.5),
            f"{prefix}.mlp.up_proj.weight": normal(inner, hidden, std=hidden**-0.5),
            f"{prefix}.mlp.down_proj.weight": down_proj,
        }
    lm_head = normal(spec.vocab_size, hidden, std=_LOGIT_STD * hidden**-0.5)
    lm_head[:, 0] = _SUPPRESSED
    lm_head[printable, 0] = 0.0
    return weights | {"lm_head.weight": lm_head}


def write_safetensors(path: Path, weights: Weights, dtype: str) -> None:
    """The format itself, since the library's numpy side has no bfloat16: header length, JSON header, data.

    https://huggingface.co/docs/safetensors/index#format
    """
    code = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    blobs, end = [], 0
    for name, array in sorted(weights.items()):
        blob = _as_bytes(array, dtype)
        header[name] = {"dtype": code, "shape": array.shape, "data_offsets": [end, end + len(blob)]}
        blobs.append(blob)
        end += len(blob)
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # so that the data starts aligned
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + b"".join(blobs))


def _as_bytes(array: npt.NDArray[np.float32], dtype: str) -> bytes:
    if dtype == "bfloat16":  # numpy has no bfloat16: the upper half of a float32, rounded to nearest, ties to even
        bits = array.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()
    return array.astype("<f2" if dtype == "float16" else "<f4").tobytes()


def _config(spec: TinyModelSpec, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": tokenizer.token_to_id(tiny_tokenizer.BOS),
        "eos_token_id": tokenizer.token_to_id(tiny_tokenizer.EOS),
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "max_position_embeddings": spec.max_position_embeddings,
        "mlp_bias": False,
        "num_attention_heads": spec.heads,
        "num_hidden_layers": spec.layers,
        "num_key_value_heads": spec.kv_heads,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": spec.dtype,
        "vocab_size": spec.vocab_size,
    }


def _generation_config(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "bos_token_id": tokenizer.token_to_id(tiny_tokenizer.BOS),
        "eos_token_id": tokenizer.token_to_id(tiny_tokenizer.EOS),
    }


def _tokenizer_config(spec: TinyModelSpec) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tiny_tokenizer.BOS,
        "eos_token": tiny_tokenizer.EOS,
        "additional_special_tokens": list(tiny_tokenizer.SPECIAL_TOKENS[2:]),
        "chat_template": tiny_tokenizer.CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": spec.max_position_embeddings,
    }
