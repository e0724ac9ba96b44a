"""A checkpoint's config.json, read into what the decoders that are implemented here need."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from llmservice_planner.model.config import refuse_other_attention
from llmservice_planner.model.families import FAMILIES, Family, find_family
from llmservice_planner.model.quantization import QuantizationConfig
from llmservice_planner.model.quantization_config import read_quantization
from llmservice_server.backend.layers import CLAMPED_LIMIT, CLAMPED_SLOPE, Activation
from llmservice_server.models.rope import RopeConfig
from llmservice_server.types.checkpoint_config import CheckpointConfig, architectures, as_load_errors
from llmservice_server.types.errors import ModelLoadError
from llmservice_server.types.messages import ModelCode

SERVED: dict[str, Family] = {each.served_architecture: each for each in FAMILIES.values() if each.served_architecture}
"""What the server runs, by the name in config.json's `architectures`."""
_INHERITED_KEYS = ("tie_word_embeddings", "quantization_config", "compression_config", "dtype", "torch_dtype")
"""Of the whole model's config, which hold for its language model as well."""
_OPTIONAL_KEYS = {
    *("num_key_value_heads", "head_dim", "sliding_window", "max_window_layers", "tie_word_embeddings"),
    *("hidden_activation", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
    *("sliding_window_pattern", "rope_theta", "rope_local_base_freq", "shared_expert_intermediate_size"),
    *("num_local_experts", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step"),
    *("attention_bias", "rms_norm_eps", "rope_parameters", "torch_dtype"),
}
"""Where config.json leaves one out, it has the family's default; the other sizes have to be there."""
_OF_SOME = {
    *("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "rope_local_base_freq"),
    "qkv_bias",
}
"""Keys that have an effect only in families with a default of it."""


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The shape of a mixture of experts."""

    count: int
    per_token: int
    width: int  # of each, between its two products
    normalizes: bool  # the weights of a token's experts are scaled to a sum of 1
    shared_width: int  # of the expert of all tokens; 0: there is none
    layers: tuple[bool, ...]  # whether each layer has one, or a dense MLP

    @classmethod
    def of(cls, family: Family, keys: CheckpointConfig) -> ExpertsConfig | None:
        count = keys.num_local_experts or keys.num_experts
        if not count:
            return None
        per_token = keys.num_experts_per_tok or 0
        if not 1 <= per_token <= count:
            raise ModelLoadError(
                f"config.json: num_experts_per_tok is {per_token}, expected 1 to {count}, the number of experts"
            )
        dense, step = keys.mlp_only_layers or (), keys.decoder_sparse_step or 1
        return cls(
            count=count,
            per_token=per_token,
            width=keys.moe_intermediate_size or keys.intermediate_size,
            normalizes=family.normalizes_experts or bool(keys.norm_topk_prob),
            shared_width=keys.shared_expert_intermediate_size or 0,
            layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(keys.num_hidden_layers)),
        )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder that is implemented here, whatever its family."""

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
    tied_embeddings: bool  # or there is no head
    dtype: str | None  # of the checkpoint, as config.json names it
    quantization: QuantizationConfig | None = None
    experts: ExpertsConfig | None = None
    has_sinks: bool = False
    has_head: bool = True  # the checkpoint has one, or ties it; without one it only embeds
    is_part: bool = False  # of a model with images or sound, of which only the language model is served
    is_gemma: bool = False  # activation, embedding and norms are Gemma's
    softcap: float | None = None  # of the scores
    logit_softcap: float | None = None
    score_scale: float = 1.0  # beside head_dim ** -0.5
    local_rope: RopeConfig | None = None  # of layers with a window; None: as all others

    implementation: ClassVar[ModelCode] = "own"
    in_chunks: ClassVar[bool] = False
    sliding_heads: ClassVar[None] = None
    sources: ClassVar[tuple[int, ...]] = ()
    is_latent: ClassVar[bool] = False

    @property
    def mlp_width(self) -> int:
        """Experts have a row of their own for each of their tokens."""
        dense = 2 * self.intermediate_size
        if self.experts is None:
            return dense
        return max(dense, self.experts.per_token * (self.hidden_size + self.experts.width))

    @property
    def activation(self) -> Activation:
        return "gelu_tanh" if self.is_gemma else "silu"

    @property
    def embedding_scale(self) -> float:
        return self.hidden_size**0.5 if self.is_gemma else 1.0

    @property
    def max_context(self) -> int:
        return self.rope.max_context(self.max_position_embeddings)

    def layer_experts(self, index: int) -> ExpertsConfig | None:
        """None: the layer has a dense MLP."""
        return self.experts if self.experts is not None and self.experts.layers[index] else None

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Raises `ModelLoadError` for an architecture that we do not run, or a key that is missing or wrong."""
        text = text_part(raw)
        with as_load_errors():
            refuse_other_attention(raw, text or raw)
        is_part, raw = text is not None, text or raw
        architecture = _architecture(raw)
        family = SERVED[architecture]
        defaults = {key: value for key, value in family.defaults.items() if key in _OPTIONAL_KEYS}
        without_effect = _OF_SOME - family.defaults.keys()
        given = {key: value for key, value in raw.items() if key not in without_effect}
        keys = CheckpointConfig.parse(_without_nulls({**defaults, **given}), "config.json")
        is_gemma = "hidden_activation" in family.defaults
        _refuse_other_activations(keys, is_gemma=is_gemma)
        num_heads, num_kv_heads = keys.num_attention_heads, keys.num_key_value_heads or keys.num_attention_heads
        if num_heads % num_kv_heads:
            raise ModelLoadError(
                f"config.json: {num_heads} attention heads cannot share {num_kv_heads} key-value heads evenly"
            )
        head_dim = keys.head_dim or keys.hidden_size // num_heads
        if head_dim % 2 or head_dim == 0:
            raise ModelLoadError(f"config.json: head_dim is {head_dim}, expected an even number above 0")
        attention_bias = family.qkv_bias is None and bool(keys.attention_bias)
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
            windows=_windows(family, keys),
            qkv_bias=attention_bias or (bool(family.qkv_bias) and keys.qkv_bias is not False),
            o_bias=attention_bias,
            mlp_bias=family.mlp_bias and bool(keys.mlp_bias),
            qk_norm=family.qk_norm,
            tied_embeddings=bool(keys.tie_word_embeddings),
            dtype=keys.dtype or keys.torch_dtype,
            quantization=quantization_of(raw),
            experts=ExpertsConfig.of(family, keys),
            has_sinks=family.has_sinks,
            is_part=is_part,
            is_gemma=is_gemma,
            softcap=keys.attn_logit_softcapping,
            logit_softcap=keys.final_logit_softcapping,
            score_scale=(head_dim / (keys.query_pre_attn_scalar or head_dim)) ** 0.5,
            local_rope=RopeConfig.of_windows(keys),
        )


def text_part(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """The config of the language model that is a part of another model, if it is implemented here.

    Such a config names little more than what differs from the family's defaults.
    """
    text = raw.get("text_config", raw if "vision_config" in raw else None)
    family = find_family(str(text.get("model_type"))) if isinstance(text, Mapping) else None
    if not isinstance(text, Mapping) or family is None or family.served_architecture is None:
        return None
    inherited = {key: raw[key] for key in _INHERITED_KEYS if raw.get(key) is not None}
    return {**family.defaults, **_without_nulls(text), **inherited, "architectures": [family.served_architecture]}


def is_own(raw: Mapping[str, Any]) -> bool:
    """Whether config.json names an architecture that is implemented here, or a value that names none at all.

    Not where it is of another kind, whose tensors have other names: transformers has EXAONE as a Llama.
    """
    if text_part(raw) is not None:
        return True
    if isinstance(kind := raw.get("model_type"), str) and find_family(kind) is None:
        return False
    named = raw.get("architectures") or []
    return not isinstance(named, list) or not named or any(_with_head(each) in SERVED for each in named)


def _architecture(raw: Mapping[str, Any]) -> str:
    named = architectures(raw)
    for architecture in named:
        if (served := _with_head(architecture)) in SERVED:
            if served != architecture and "auto_map" in raw:
                raise ModelLoadError(
                    f"config.json: {architecture} is defined by code that comes with the checkpoint, which is never "
                    "executed: use a checkpoint of a model that transformers itself implements"
                )
            return served
    raise ModelLoadError(
        f"config.json names the architecture {', '.join(map(str, named)) or '(none)'}, "
        f"supported are {', '.join(SERVED)}"
    )


def _with_head(architecture: object) -> str:
    """The name of a model with a head, given that of transformers' class with or without one."""
    return re.sub("Model$", "ForCausalLM", str(architecture))


def _without_nulls(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A null means that the key is left out, except that of `sliding_window`: no window."""
    return {key: value for key, value in raw.items() if value is not None or key == "sliding_window"}


def _refuse_other_activations(keys: CheckpointConfig, *, is_gemma: bool) -> None:
    """Gemma's first checkpoints name gelu, and were trained with its approximation."""
    known = ("gelu_pytorch_tanh", "gelu") if is_gemma else ("silu",)
    for name in ("hidden_act", "hidden_activation"):
        if (given := getattr(keys, name)) not in (None, *known):
            raise ModelLoadError(f"config.json: {name} is {given!r}, expected {known[0]!r}")
    for name, expected in (("swiglu_limit", CLAMPED_LIMIT), ("swiglu_alpha", CLAMPED_SLOPE)):
        if getattr(keys, name) not in (None, expected):
            raise ModelLoadError(f"config.json: {name} is {getattr(keys, name)}, expected {expected}")


def quantization_of(raw: Mapping[str, Any]) -> QuantizationConfig | None:
    with as_load_errors():
        return read_quantization(raw)


def _windows(family: Family, keys: CheckpointConfig) -> tuple[int | None, ...]:
    """Of the layers that `layer_types` names, or that the family's rule does; Qwen needs `use_sliding_window` too."""
    window, num_layers = keys.sliding_window or None, keys.num_hidden_layers
    is_off = "use_sliding_window" in family.defaults and not keys.use_sliding_window
    if window is None or family.sliding == "none" or is_off:
        return (None,) * num_layers
    if keys.layer_types is None:
        bound, pattern = keys.max_window_layers or 0, keys.sliding_window_pattern or 2
        layers = range(num_layers)
        slides = {
            "all": [True] * num_layers,
            "first": [layer % 2 == 0 and layer < bound for layer in layers],
            "last": [layer >= bound for layer in layers],
            "even": [layer % 2 == 0 for layer in layers],
            "pattern": [(layer + 1) % pattern != 0 for layer in layers],
        }[family.sliding]
        return tuple(window if each else None for each in slides)
    if len(keys.layer_types) != num_layers or not set(keys.layer_types) <= {"full_attention", "sliding_attention"}:
        raise ModelLoadError(
            f"config.json: layer_types is {keys.layer_types!r}, expected full_attention or sliding_attention per layer"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in keys.layer_types)
