"""A checkpoint's config.json, read into what the Llama family's model needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmservice_server.engine.errors import ModelLoadError
from llmservice_server.models.rope import RopeConfig

# What transformers assumes where a config.json of the architecture leaves a key out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"num_key_value_heads": 8, "sliding_window": 4096},
    "Qwen2ForCausalLM": {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    "Qwen3ForCausalLM": {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
}
SUPPORTED_ARCHITECTURES = tuple(_DEFAULTS)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a Llama-family decoder. Biases and norms differ by architecture; everything else is numbers."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    windows: tuple[int | None, ...]  # per layer: a query sees itself and the window-1 tokens before it; None: all
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    dtype: str | None  # of the checkpoint, as config.json names it

    @property
    def max_context(self) -> int:
        return self.rope.max_context(self.max_position_embeddings)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Raises `ModelLoadError` for an architecture that we do not run, or a key that is missing or senseless."""
        architecture = _architecture(raw)
        _refuse_unsupported(raw)
        keys = {**_DEFAULTS[architecture], **raw}
        hidden_size = _positive(keys, "hidden_size")
        num_layers = _positive(keys, "num_hidden_layers")
        num_heads = _positive(keys, "num_attention_heads")
        num_kv_heads = _positive(keys, "num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise ModelLoadError(
                f"config.json: {num_heads} attention heads cannot share {num_kv_heads} key-value heads evenly"
            )
        head_dim = _positive(keys, "head_dim", hidden_size // num_heads)
        if head_dim % 2:
            raise ModelLoadError(f"config.json: head_dim is {head_dim}, expected an even number")
        # `attention_bias` covers q, k, v and o in Llama and Qwen3; Qwen2 always has it on q, k, v; Mistral never.
        attention_bias = architecture in {"LlamaForCausalLM", "Qwen3ForCausalLM"} and bool(keys.get("attention_bias"))
        return cls(
            architecture=architecture,
            vocab_size=_positive(keys, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_positive(keys, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=float(keys.get("rms_norm_eps") or 1e-6),
            max_position_embeddings=_positive(keys, "max_position_embeddings"),
            rope=RopeConfig.from_config(keys),
            windows=_windows(architecture, keys, num_layers),
            qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
            o_bias=attention_bias,
            mlp_bias=architecture == "LlamaForCausalLM" and bool(keys.get("mlp_bias")),
            qk_norm=architecture == "Qwen3ForCausalLM",
            tied_embeddings=bool(keys.get("tie_word_embeddings", False)),
            dtype=keys.get("dtype") or keys.get("torch_dtype"),
        )


def _architecture(raw: Mapping[str, Any]) -> str:
    named = raw.get("architectures") or []
    for architecture in named:
        if architecture in _DEFAULTS:
            return str(architecture)
    raise ModelLoadError(
        f"config.json names the architecture {', '.join(map(str, named)) or '(none)'}, "
        f"supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
    )


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    if raw.get("quantization_config"):
        raise ModelLoadError(
            "config.json has a quantization_config: use the unquantized checkpoint (bfloat16, float16, float32)"
        )
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelLoadError(f"config.json: hidden_act is {activation!r}, expected 'silu'")


def _positive(keys: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = keys.get(name)
    if value is None:
        value = default
    if value is None:
        raise ModelLoadError(f"config.json has no {name}")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelLoadError(f"config.json: {name} is {value!r}, expected a positive integer")
    return value


def _windows(architecture: str, keys: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Mistral slides in every layer; Qwen, if `use_sliding_window`, in those named or from `max_window_layers` on."""
    if keys.get("sliding_window") is None or architecture == "LlamaForCausalLM":
        return (None,) * num_layers
    window = _positive(keys, "sliding_window")
    if architecture == "MistralForCausalLM":
        return (window,) * num_layers
    if not keys.get("use_sliding_window", False):
        return (None,) * num_layers
    kinds = keys.get("layer_types")
    if kinds is None:
        first = keys["max_window_layers"] or 0
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if len(kinds) != num_layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise ModelLoadError(
            f"config.json: layer_types is {kinds!r}, expected full_attention or sliding_attention per layer"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
