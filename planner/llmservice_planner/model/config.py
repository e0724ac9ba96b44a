"""Reads a Hugging Face `config.json` into the fields of a `ModelShape`, by model family."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from llmservice_planner.model.encoders import (
    ENCODERS,
    MODULES,
    SENTENCES,
    TOKENIZER,
    EncoderFamily,
    EncoderSizes,
    count_parameters,
    is_encoder,
    without_config,
)
from llmservice_planner.model.families import (
    FAMILIES,
    UNKNOWN_EXPERT_KEYS,
    UNKNOWN_KEYS,
    UNKNOWN_WITH_WINDOWS,
    UNSERVED,
    UNSERVED_KEYS,
    Family,
    find_family,
)
from llmservice_planner.model.quantization import QuantizationError
from llmservice_planner.model.quantization_config import SIDECARS, read_quantization, with_sidecars

MOST_LAYERS = 1024
"""As of `spec.model.shape`."""
_NO_LIMIT = 10**12
"""transformers writes 10**30 into tokenizer_config.json where it knows of none."""


class ShapeError(ValueError):
    """A model's shape is missing, contradictory or of an unknown family; the message says what to do."""


class _Values:
    """Typed access to one config, with the family's defaults."""

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._config = config
        self._defaults = defaults

    def get(self, key: str) -> Any:
        return self._config[key] if key in self._config else self._defaults.get(key)

    def count(self, key: str) -> int | None:
        """A non-negative integer, or None if the value is null or absent."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ShapeError(f"config.json: {key} is {value!r}, expected a whole number that is not negative")
        if value >= 10**12:
            raise ShapeError(f"config.json: {key} has {len(str(value))} digits, expected less than 10**12")
        return value

    def positive(self, key: str) -> int:
        value = self.count(key)
        if not value:
            raise ShapeError(f"config.json: {key} is {value!r}, expected a positive whole number")
        return value

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if not isinstance(value, bool | None):
            raise ShapeError(f"config.json: {key} is {value!r}, expected true or false")
        return bool(value)


def patched(config: Mapping[str, Any], overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """A JSON merge patch (RFC 7396): objects are merged, null removes a key, all else replaces.

    `rope_scaling` changes the `rope_parameters` of a config.json that has these, as transformers 5 writes it; where
    each kind of layer has its own, those of layers without a window.
    """
    result = dict(config)
    for key, value in (overrides or {}).items():
        rope = config.get("rope_parameters")
        if key == "rope_scaling" and isinstance(value, Mapping) and isinstance(rope, Mapping):
            scaling = _with_rope_type(value)
            key, value = "rope_parameters", {"full_attention": scaling} if "full_attention" in rope else scaling  # noqa: PLW2901
        before = result.pop(key, None)
        if isinstance(value, Mapping):
            result[key] = patched(before if isinstance(before, Mapping) else {}, value)
        elif value is not None:
            result[key] = value
    return result


def _with_rope_type(rope: Mapping[str, Any]) -> Mapping[str, Any]:
    """With the newer name of its kind, which goes before `type`."""
    return {"rope_type": rope["type"], **rope} if "type" in rope else rope


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed `config.json` of a model folder, with what other files add to it.

    Raises `ShapeError` if it is missing, or one of them is not a JSON object.
    """
    if not (folder / "config.json").exists() and (folder / MODULES).is_file():
        raise ShapeError(without_config(str(folder), read_modules(folder)))
    sidecars = {name: _read_object(folder / name) for name in SIDECARS if (folder / name).is_file()}
    config = with_sidecars(_read_object(folder / "config.json"), sidecars)
    lengths = [folder / name for name in (*SENTENCES, TOKENIZER)] if is_encoder(config) else []
    return config | {path.name: _read_object(path) for path in lengths if path.is_file()}


def read_modules(folder: Path) -> object:
    """The parsed `modules.json`; None: there is none that can be read."""
    try:
        return json.loads((folder / MODULES).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ShapeError(f"{path} does not exist: expected a Hugging Face model folder with a config.json") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ShapeError(f"{path} cannot be read as JSON ({error}): delete it and download it again") from error
    if not isinstance(content, dict):
        raise ShapeError(f"{path} holds a {type(content).__name__}, expected a JSON object")
    return content


def names_dtype(config: Mapping[str, Any]) -> bool:
    """Whether config.json says in which dtype the weights are."""
    text = config.get("text_config")
    return any(
        each.get(key) for each in (config, text) if isinstance(each, Mapping) for key in ("dtype", "torch_dtype")
    )


def shape_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of `ModelShape` from a parsed `config.json`. Raises `ShapeError`."""
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise ShapeError(f"config.json: text_config is a {type(text).__name__}, expected an object")
    model_type = text.get("model_type", config.get("model_type"))
    if isinstance(model_type, str) and model_type in ENCODERS:
        return _encoder_fields(text, ENCODERS[model_type])
    if not is_encoder(config):
        refuse_other_attention(config, text)
    family = _family(model_type)
    if family.name not in FAMILIES:
        text = _unknown(config, text)
    values = _Values({**text, **_inherited(config)}, family.defaults)
    heads = values.positive("num_attention_heads")
    hidden_size = values.positive("hidden_size")
    layers = values.positive("num_hidden_layers")
    fixed_bias = values.flag("qkv_bias") if "qkv_bias" in family.defaults else family.qkv_bias
    window, sliding_layers = _sliding(values, family, layers)
    kv_heads, head_dim = values.count("num_key_value_heads") or heads, values.count("head_dim") or hidden_size // heads
    return {
        "architecture": family.name,
        "layers": layers,
        "hidden_size": hidden_size,
        "intermediate_size": values.positive("intermediate_size"),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": values.positive("vocab_size"),
        "max_position_embeddings": _context(values),
        "tie_word_embeddings": values.flag("tie_word_embeddings"),
        "sliding_window": window,
        "sliding_layers": sliding_layers,
        "qkv_bias": values.flag("attention_bias") if fixed_bias is None else fixed_bias,
        "o_bias": values.flag("attention_bias") if fixed_bias is None else False,
        "mlp_bias": family.mlp_bias and values.flag("mlp_bias"),
        "qk_norm": family.qk_norm,
        "has_sinks": family.has_sinks,
        "norms_per_layer": family.norms_per_layer,
        "dtype": _dtype(values.get("dtype") or values.get("torch_dtype")),
        "quantization": _quantization(config),
        **_other_heads(values, kv_heads, head_dim),
        **_shared(values),
        **_experts(values, family, layers),
        **_latent(values),
    }


def _encoder_fields(config: Mapping[str, Any], family: EncoderFamily) -> dict[str, Any]:
    values = _Values(config, family.defaults)
    own = family.keys
    hidden_size = values.positive(own.get("hidden_size", "hidden_size"))
    heads = values.positive(own.get("num_attention_heads", "num_attention_heads"))
    positions = values.positive("max_position_embeddings")
    sizes = EncoderSizes(
        layers=values.positive(own.get("num_hidden_layers", "num_hidden_layers")),
        hidden_size=hidden_size,
        intermediate_size=values.positive(own.get("intermediate_size", "intermediate_size")),
        vocab_size=values.positive("vocab_size"),
        positions=positions,
        token_types=values.count("type_vocab_size") or 0,
        embedding_size=values.count("embedding_size"),
        relative_positions=heads * (values.count("relative_attention_num_buckets") or 0),
    )
    if family.positions_after_padding:
        positions -= (values.count("pad_token_id") or 0) + 1
    if positions < 1:
        raise ShapeError(f"config.json: max_position_embeddings is {sizes.positions}, expected more than pad_token_id")
    return {
        "architecture": family.name,
        "layers": sizes.layers,
        "hidden_size": hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": max(1, hidden_size // heads),
        "vocab_size": sizes.vocab_size,
        "max_position_embeddings": positions,
        "dtype": _dtype(values.get("dtype") or values.get("torch_dtype")),
        "quantization": _quantization(config),
        "encoder_parameters": count_parameters(family, sizes),
    }


def refuse_other_attention(config: Mapping[str, Any], text: Mapping[str, Any]) -> None:
    """Raises `ShapeError` where tokens see later ones. PaliGemma's config.json does not say that those of prompts do.

    text: the part of `config` that is the language model's.
    """
    is_causal = text.get("is_causal") is not False and text.get("use_bidirectional_attention") is not True
    if config.get("model_type") == "paligemma" or not is_causal:
        what = "config.json: its tokens see later ones, expected causal attention: choose a model that has it"
        raise ShapeError(what)


def refuse_processing(config: Mapping[str, Any]) -> None:
    """Raises `ShapeError` where sentence-transformers would make an encoder's inputs otherwise than the server."""
    for name in SENTENCES:
        if (config.get(name) or {}).get("processing_kwargs"):
            raise ShapeError(
                f"{name}: processing_kwargs are not followed: remove them; the longest input belongs to max_seq_length"
            )


def max_seq_length(config: Mapping[str, Any]) -> int | None:
    """Tokens of an encoder's input to which sentence-transformers cuts it; None: to its context."""
    sentences = next((name for name in SENTENCES if config.get(name)), SENTENCES[0])
    for name, key in ((sentences, "max_seq_length"), (TOKENIZER, "model_max_length")):
        length = (config.get(name) or {}).get(key)
        if length is None:
            continue
        if isinstance(length, bool) or not isinstance(length, int | float) or not length >= 1:
            raise ShapeError(f"{name}: {key} is {length!r}, expected a positive whole number")
        return int(length) if length < _NO_LIMIT else None
    return None


def _family(model_type: object) -> Family:
    if not isinstance(model_type, str):
        raise ShapeError(f"config.json: model_type is {model_type!r}, expected one of {_known()}")
    return find_family(model_type) or Family(
        model_type, {}, sliding="all" if model_type in UNKNOWN_WITH_WINDOWS else "listed"
    )


def _unknown(config: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a family that is not listed, by the usual names. Raises `ShapeError` where it has other state.

    Its KV cache is computed from these keys; its weights are only known from the checkpoint's files.
    """
    found = dict(text) | _windows(text)
    for key, others in {**UNKNOWN_KEYS, **UNKNOWN_EXPERT_KEYS}.items():
        if found.get(key) is None:
            found[key] = next((text[other] for other in others if text.get(other) is not None), None)
        if isinstance(found[key], list):  # of one number for each layer
            found[key] = max((count for count in found[key] if isinstance(count, int)), default=None)
    if found["intermediate_size"] is None and isinstance(found["hidden_size"], int):
        found["intermediate_size"] = 4 * found["hidden_size"]
    if text.get("multi_query"):
        found["num_key_value_heads"] = 1
    if found["num_experts"] == 1:  # of Hunyuan's dense models, which do not say how many a token takes
        found["num_experts"] = None
    if text.get("model_type") == "longcat_flash" and _is_small_count(text.get("num_layers")):
        found["num_hidden_layers"] = 2 * text["num_layers"]  # each has attention twice
    if isinstance(attention := text.get("attn_config"), Mapping) and not found.get("num_key_value_heads"):  # DBRX
        found["num_key_value_heads"] = attention.get("kv_n_heads")
    if problem := _why_unserved(config, text, found["layer_types"]):
        raise ShapeError(
            f"model_type {text.get('model_type')} cannot be served: {problem}, expected attention to keys and values"
        )
    if missing := [key for key in UNKNOWN_KEYS if found[key] is None]:
        raise ShapeError(
            f"model_type {text.get('model_type')} is not one whose layout is known ({_known()}), and its config.json "
            f"lacks {', '.join(missing)}: give the figures themselves with --shape (spec.model.shape)"
        )
    return found


def _why_unserved(config: Mapping[str, Any], text: Mapping[str, Any], layer_types: Any) -> str | None:
    kinds = {*map(str, layer_types)} if isinstance(layer_types, list) else set()
    kinds -= {"full_attention", "sliding_attention", "attention"}  # the last one is Granite 4's name of the first
    if not layer_types:
        kinds = {what for key, what in UNSERVED_KEYS.items() if text.get(key) is not None}
        numbers = text.get("attn_type_list")  # 0 in MiniMax-M1; all are 1, attention as usual, in MiniMax-M2
        if isinstance(numbers, list) and 0 in numbers:
            kinds.add("linear attention")
    if kinds:
        return f"it has layers of {', '.join(sorted(kinds))}"
    if text.get("model_type") in UNSERVED:
        return "its code in transformers has attention of its own"
    return "it is no decoder-only model" if config.get("is_encoder_decoder") else None


def _windows(text: Mapping[str, Any]) -> dict[str, Any]:
    """The layers with a window, and the window. What is behind a chunk of Llama 4 is given back as behind a window."""
    chunk = text.get("attention_chunk_size", 8192) if text.get("model_type") == "llama4_text" else None
    window, layer_types = text.get("sliding_window") if chunk is None else chunk, text.get("layer_types")
    if text.get("model_type") == "mimo_v2_flash" and isinstance(before := text.get("sliding_window_size"), int):
        window = before + 1  # with the query's own token
    if layer_types is None:
        layer_types = _layer_types(text, in_chunks=chunk is not None)
    if isinstance(layer_types, list):
        layer_types = ["sliding_attention" if each == "chunked_attention" else each for each in layer_types]
    return {"layer_types": layer_types, "sliding_window": window}


def _layer_types(text: Mapping[str, Any], *, in_chunks: bool) -> list[str] | None:
    """By the keys of MiMo-V2, Cohere 2 and Llama 4; None where there are none."""
    slides, pattern, layers = (
        text.get(key) for key in ("hybrid_layer_pattern", "sliding_window_pattern", "num_hidden_layers")
    )
    if in_chunks:
        slides, pattern = text.get("no_rope_layers") or None, text.get("no_rope_layer_interval", 4)
    if slides is None and _is_small_count(pattern) and _is_small_count(layers):
        slides = [(layer + 1) % pattern != 0 for layer in range(layers)]
    return ["sliding_attention" if each else "full_attention" for each in slides] if isinstance(slides, list) else None


def _is_small_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and 0 < value <= MOST_LAYERS


def _known() -> str:
    return ", ".join([*FAMILIES, *ENCODERS])


def _inherited(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of a multimodal config's top level that hold for its text model, whatever that one's say."""
    keys = ("dtype", "torch_dtype", "tie_word_embeddings")
    return {key: config[key] for key in keys if config.get(key) is not None}


def _dtype(value: object) -> str:
    """The checkpoint's element type; transformers writes `dtype` since 5.0, `torch_dtype` before."""
    if value is None:
        return "float32"  # transformers' default
    name = str(value).removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float16"):
        raise ShapeError(f"config.json: dtype is {value!r}, expected float32, bfloat16 or float16")
    return name


def _quantization(config: Mapping[str, Any]) -> str | None:
    """The code of the format of most matrices: where a checkpoint has several, the main one."""
    try:
        quantization = read_quantization(config)
    except QuantizationError as error:
        raise ShapeError(str(error)) from error
    return None if quantization is None else quantization.main.code


def _sliding(values: _Values, family: Family, layers: int) -> tuple[int | None, int]:
    """The window in tokens and the number of sliding-window layers."""
    window = values.count("sliding_window")
    has_switch = family.name not in FAMILIES or "use_sliding_window" in family.defaults
    if not window or family.sliding == "none" or (has_switch and values.get("use_sliding_window") is False):
        return None, 0
    layer_types = values.get("layer_types")
    if layer_types is not None:
        if not isinstance(layer_types, list) or len(layer_types) != layers:
            raise ShapeError(f"config.json: layer_types does not list one type for each of the {layers} layers")
        sliding = layer_types.count("sliding_attention")
    elif family.sliding == "all":
        sliding = layers
    elif family.sliding == "even":
        sliding = (layers + 1) // 2
    elif family.sliding == "pattern":
        sliding = layers - layers // values.positive("sliding_window_pattern")
    elif family.sliding == "listed":
        sliding = 0
    elif family.sliding == "first":
        sliding = (min(layers, values.count("max_window_layers") or 0) + 1) // 2
    else:
        sliding = max(0, layers - (values.count("max_window_layers") or 0))
    return (window, sliding) if sliding else (None, 0)


def _context(values: _Values) -> int | None:
    positions, rope = values.count("max_position_embeddings"), values.get("rope_scaling")
    rope = rope or values.get("rope_parameters")
    if positions is None or not isinstance(rope, Mapping):
        return positions
    original = values.get("original_max_position_embeddings")
    if original is not None and values.get("rope_local_base_freq") is None:  # goes before that of RoPE, if there is one
        rope = {**rope, "original_max_position_embeddings": original}
    return max(stretched_context(positions, each) for each in (rope, *rope.values()) if isinstance(each, Mapping))


def stretched_context(positions: int, rope: Mapping[str, Any]) -> int:
    """Tokens up to which RoPE is right: where YaRN stretches it, `max_position_embeddings` is often left as it was.

    rope: `rope_parameters` of config.json, or `rope_scaling` of one from before transformers 5.
    """
    original, factor = rope.get("original_max_position_embeddings") or positions, rope.get("factor") or 1
    if "yarn" not in (rope.get("rope_type"), rope.get("type")) or not _is_length(original) or not _is_length(factor):
        return positions
    return max(positions, int(original * factor))


def _is_length(value: object) -> bool:
    return isinstance(value, int | float) and 0 < value < 1 << 31


def _other_heads(values: _Values, kv_heads: int, head_dim: int) -> dict[str, int]:
    """The heads of layers with and without a window, where they differ."""
    if values.get("model_type") == "mimo_v2_flash":  # with a window, twice as many
        return {"kv_heads": values.count("swa_num_key_value_heads") or 2 * kv_heads, "full_kv_heads": kv_heads}
    full_head_dim = values.count("global_head_dim")
    full_kv_heads = values.count("num_global_key_value_heads") if values.flag("attention_k_eq_v") else None
    overrides, kinds = values.get("per_layer_config"), values.get("layer_types")
    if isinstance(overrides, Mapping) and isinstance(kinds, list) and "full_attention" in kinds:
        given = overrides.get(str(kinds.index("full_attention")))
        of_layer = _Values(given if isinstance(given, Mapping) else {}, {})
        full_head_dim = of_layer.count("head_dim") or full_head_dim
        full_kv_heads = of_layer.count("num_key_value_heads") or full_kv_heads
    return {
        "full_kv_heads": 0 if full_kv_heads in (None, kv_heads) else full_kv_heads,
        "full_head_dim": 0 if full_head_dim in (None, head_dim) else full_head_dim,
    }


def _shared(values: _Values) -> dict[str, int]:
    """The last layers of Gemma 3n and 4, which use the keys and values of earlier ones."""
    shared, kinds = values.count("num_kv_shared_layers") or 0, values.get("layer_types")
    sliding = kinds[-shared:].count("sliding_attention") if shared and isinstance(kinds, list) else 0
    return {"shared_layers": shared, "shared_sliding_layers": sliding}


def _experts(values: _Values, family: Family, layers: int) -> dict[str, Any]:
    """Mixture-of-experts fields in the spellings of Mixtral, Qwen and DeepSeek."""
    names = [key for key in ("n_routed_experts", "num_local_experts", "num_experts") if values.get(key)]
    if not names:
        return {}
    width = values.count("moe_intermediate_size") or values.positive("intermediate_size")
    shared = values.count("shared_expert_intermediate_size") or (values.count("n_shared_experts") or 0) * width
    return {
        "num_experts": values.positive(names[0]),
        "experts_per_token": values.positive("num_experts_per_tok"),
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": shared,
        "shared_expert_gate": family.shared_gate,
        "router_bias": family.router_bias,
        "dense_layers": _dense_layers(values, layers),
    }


def _dense_layers(values: _Values, layers: int) -> int:
    """Layers of a mixture-of-experts model that keep a dense MLP."""
    if first := values.count("first_k_dense_replace"):
        return min(first, layers)
    only = values.get("mlp_only_layers") or ()
    if not isinstance(only, list | tuple):
        raise ShapeError(f"config.json: mlp_only_layers is {only!r}, expected a list of layers")
    step = values.count("decoder_sparse_step") or 1  # every so many layers, one has experts
    without = {each for each in only if isinstance(each, int) and 0 <= each < layers and (each + 1) % step == 0}
    return layers - layers // step + len(without)


def _latent(values: _Values) -> dict[str, Any]:
    """Multi-head latent attention (arXiv:2405.04434): all heads share one latent and one rope key per token."""
    if not values.count("kv_lora_rank"):
        return {}
    return {
        "head_dim": values.positive("qk_nope_head_dim") + values.positive("qk_rope_head_dim"),
        "kv_lora_rank": values.positive("kv_lora_rank"),
        "q_lora_rank": values.count("q_lora_rank") or 0,
        "qk_nope_head_dim": values.positive("qk_nope_head_dim"),
        "qk_rope_head_dim": values.positive("qk_rope_head_dim"),
        "v_head_dim": values.positive("v_head_dim"),
    }
