"""A checkpoint's config.json, read into what the Llama family's model needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmservice_server.models.rope import RopeConfig
from llmservice_server.types.checkpoint_config import CheckpointConfig
from llmservice_server.types.errors import ModelLoadError

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
        """Raises `ModelLoadError` for an architecture that we do not run, or a key that is missing or wrong."""
        architecture = _architecture(raw)
        keys = CheckpointConfig.parse(_without_nulls({**_DEFAULTS[architecture], **raw}), "config.json")
        _refuse_unsupported(keys)
        num_heads, num_kv_heads = keys.num_attention_heads, keys.num_key_value_heads or keys.num_attention_heads
        if num_heads % num_kv_heads:
            raise ModelLoadError(
                f"config.json: {num_heads} attention heads cannot share {num_kv_heads} key-value heads evenly"
            )
        head_dim = keys.head_dim or keys.hidden_size // num_heads
        if head_dim % 2 or head_dim == 0:
            raise ModelLoadError(f"config.json: head_dim is {head_dim}, expected an even number above 0")
        # `attention_bias` covers q, k, v and o in Llama and Qwen3; Qwen2 always has it on q, k, v; Mistral never.
        attention_bias = architecture in {"LlamaForCausalLM", "Qwen3ForCausalLM"} and bool(keys.attention_bias)
        return cls(
            architecture=architecture,
            vocab_size=keys.vocab_size,
            hidden_size=keys.hidden_size,
            intermediate_size=keys.intermediate_size,
            num_layers=keys.num_hidden_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=keys.rms_norm_eps or 1e-6,
            max_position_embeddings=keys.max_position_embeddings,
            rope=RopeConfig.of(keys),
            windows=_windows(architecture, keys),
            qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
            o_bias=attention_bias,
            mlp_bias=architecture == "LlamaForCausalLM" and bool(keys.mlp_bias),
            qk_norm=architecture == "Qwen3ForCausalLM",
            tied_embeddings=bool(keys.tie_word_embeddings),
            dtype=keys.dtype or keys.torch_dtype,
        )


def _architecture(raw: Mapping[str, Any]) -> str:
    named = raw.get("architectures") or []
    if not isinstance(named, list):
        raise ModelLoadError(f"config.json: architectures is {named!r}, expected a list of names")
    for architecture in named:
        if isinstance(architecture, str) and architecture in _DEFAULTS:
            return architecture
    raise ModelLoadError(
        f"config.json names the architecture {', '.join(map(str, named)) or '(none)'}, "
        f"supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
    )


def _without_nulls(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A null means that the key is left out, except that of `sliding_window`: no window."""
    return {key: value for key, value in raw.items() if value is not None or key == "sliding_window"}


def _refuse_unsupported(keys: CheckpointConfig) -> None:
    if keys.quantization_config:
        raise ModelLoadError(
            "config.json has a quantization_config: use the unquantized checkpoint (bfloat16, float16, float32)"
        )
    if keys.hidden_act != "silu":
        raise ModelLoadError(f"config.json: hidden_act is {keys.hidden_act!r}, expected 'silu'")


def _windows(architecture: str, keys: CheckpointConfig) -> tuple[int | None, ...]:
    """Mistral slides in every layer; Qwen, if `use_sliding_window`, in those named or from `max_window_layers` on."""
    window, num_layers = keys.sliding_window, keys.num_hidden_layers
    if window is None or architecture == "LlamaForCausalLM":
        return (None,) * num_layers
    if architecture == "MistralForCausalLM":
        return (window,) * num_layers
    if not keys.use_sliding_window:
        return (None,) * num_layers
    if keys.layer_types is None:
        first = keys.max_window_layers or 0
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if len(keys.layer_types) != num_layers or not set(keys.layer_types) <= {"full_attention", "sliding_attention"}:
        raise ModelLoadError(
            f"config.json: layer_types is {keys.layer_types!r}, expected full_attention or sliding_attention per layer"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in keys.layer_types)
