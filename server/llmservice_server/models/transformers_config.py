"""Whether a model of transformers can run on our paged cache, and what the engine needs to know of it.

What its attention computes is read off a forward pass on the meta device, before any weight is loaded: a model whose
attention is something else, or that keeps other state between tokens than keys and values, is refused by name.
"""

from __future__ import annotations

import copy
import inspect
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from transformers.masking_utils import AttentionMaskInterface
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM
from transformers.models.mistral4 import Mistral4Config, Mistral4ForCausalLM
from transformers.utils import logging as transformers_logging

from llmservice_planner.model.config import MOST_LAYERS, stretched_context
from llmservice_planner.model.quantization import QuantizationConfig
from llmservice_server.backend.cache_shape import Heads
from llmservice_server.models.config import SERVED, quantization_of
from llmservice_server.models.rope import yarn_attention_factor
from llmservice_server.models.transformers_attention import (
    CHUNKS,
    NAME,
    Call,
    Mask,
    attend_of_pass,
    attention,
    pass_latents,
)
from llmservice_server.types.checkpoint_config import read_model_config
from llmservice_server.types.errors import ModelLoadError
from llmservice_server.types.messages import ModelCode

AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)  # transformers lists it elsewhere
_EXAMINED = "llmservice_examined"
"""Our attention function with a mask function, which finds each layer's window."""
_FAR = 2**40
"""A position beyond every window."""
_UNDERSTOOD = {"scaling", "dropout", "sliding_window", "softcap", "s_aux"}
_WITHOUT_EFFECT = {"position_ids", "cache_position", "layer_idx"}
_LAYER_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}
_LARGEST = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "num_hidden_layers": MOST_LAYERS,
    "num_attention_heads": 4096,
    "max_position_embeddings": 1 << 31,
}
_GROWING_ROPE = {"dynamic", "longrope"}
"""Kinds whose frequencies change with the longest sequence."""
_META_TENSOR = re.compile(r"meta tensor|register_meta", re.IGNORECASE)
"""In torch's errors of code that reads numbers of a tensor without memory."""
_LAYER, _FURTHER_TOKENS = re.compile(r"(?:model\.)?layers\.(\d+)\."), re.compile(r"(?:model\.)?mtp[._]")
_WITHOUT_IMAGES = {"glm4v_text": "glm4", "glm4v_moe_text": "glm4_moe"}
"""Kinds of language models that are another one for text alone, where a token's three positions are equal."""


@dataclass(frozen=True, slots=True)
class TransformersConfig:
    """What the engine needs to know of a model, found by `examine`."""

    architecture: str
    vocab_size: int
    hidden_size: int
    mlp_width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    in_chunks: bool
    softcap: float | None
    has_sinks: bool
    max_context: int
    dtype: str | None
    sliding_heads: Heads | None = None
    sources: tuple[int, ...] = ()
    is_latent: bool = False
    tied_embeddings: bool = False  # or there is no head
    has_head: bool = True
    quantization: QuantizationConfig | None = None
    num_extra_layers: int = 0  # after the last, which predict further tokens and are not loaded

    implementation: ClassVar[ModelCode] = "transformers"

    def is_extra(self, tensor: str) -> bool:
        """Whether a tensor of the checkpoint predicts further tokens (multi-token prediction)."""
        layer = _LAYER.match(tensor)
        beyond = -1 if layer is None else int(layer[1]) - len(self.windows)
        return 0 <= beyond < self.num_extra_layers or _FURTHER_TOKENS.match(tensor) is not None


def examine(folder: Path) -> TransformersConfig:
    """Raises `ModelLoadError` for a model that cannot run on the paged cache, and says what of it cannot."""
    config, text = read_configs(folder)
    name = next(iter(text.architectures or config.architectures or [type(text).__name__]))
    _refuse_kinds(config, text, name)
    if not _is_of_transformers(config.architectures[0] if config.architectures else name, config.model_type):
        raise unserved(name, "transformers has no model of this name, and code of a checkpoint is never executed")
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), None)
    if model_class is None:
        raise unserved(name, "transformers has no decoder-only language model for it")
    if _is_stateful(model_class) and {*(getattr(text, "layer_types", None) or ())} != {"full_attention"}:
        raise unserved(name, "it keeps recurrent state between tokens, not keys and values")
    _refuse_sizes(text)
    calls = _calls(model_class, text, name)
    if "position_ids" not in inspect.signature(model_class.forward).parameters:  # decoders of BART and its like
        raise unserved(name, "its code counts positions from a request's first token, which may be cached")
    heads_by_kind = {call.window is not None: call.heads for call in calls}
    full, sliding = heads_by_kind.get(False), heads_by_kind.get(True)
    heads = full or sliding
    assert heads is not None  # noqa: S101  # there is a layer
    softcaps = {call.settings.get("softcap") for call in calls}
    if len(softcaps) > 1:
        raise unserved(name, f"its layers bound their scores differently ({softcaps})")
    widest = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    return TransformersConfig(
        architecture=name if model_class.__name__ == name else model_class.__name__,
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        mlp_width=2 * (max(widest) if isinstance(widest, list) else widest),
        **heads._asdict(),
        windows=tuple(call.window for call in calls),
        in_chunks=any(call.in_chunks for call in calls),
        softcap=softcaps.pop(),
        has_sinks=any("s_aux" in call.settings for call in calls),
        max_context=_max_context(text, name),
        dtype=_dtype(config, text),
        sliding_heads=sliding if sliding != heads else None,
        sources=_sources(calls),
        is_latent=calls[0].is_latent,
        tied_embeddings=bool(text.tie_word_embeddings),
        quantization=quantization_of(read_model_config(folder)),
        num_extra_layers=further if isinstance(further := getattr(text, "num_nextn_predict_layers", 0), int) else 0,
    )


def _is_stateful(model_class: Any) -> bool:
    """Whether its layers may keep recurrent state; those of Granite 4's small models do not."""
    return bool(getattr(model_class, "_is_stateful", False))


def _is_of_transformers(architecture: str, model_type: str) -> bool:
    """Whether transformers has it, under its name or, as of InternLM3 and PhiMoE, under that of its kind of model."""
    named = architecture.removesuffix("ForCausalLM").lower()
    return hasattr(transformers, architecture) or named == model_type.replace("_", "").lower()


def read_configs(folder: Path) -> tuple[Any, Any]:
    """The checkpoint's configuration, and that of its language model, which is often the same."""
    silence_transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises what its parts raise
        named = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if "auto_map" in named:
            raise ModelLoadError(
                f"config.json: {named.get('model_type')} needs code that comes with the checkpoint, which is never "
                "executed: use a checkpoint of a model that transformers itself implements"
            ) from error
        raise ModelLoadError(f"config.json describes no model that transformers knows: {one_line(error)}") from error
    text = config.get_text_config(decoder=True)
    if not isinstance(text, transformers.PretrainedConfig):
        raise ModelLoadError(f"config.json: text_config is {str(text)[:80]!r}, which {config.model_type} has none of")
    if text.model_type in _WITHOUT_IMAGES:
        keys = {"head_dim": text.hidden_size // max(1, text.num_attention_heads), **text.to_dict()}
        keys = {key: value for key, value in keys.items() if key not in ("model_type", "architectures")}
        text = transformers.AutoConfig.for_model(_WITHOUT_IMAGES[text.model_type], **keys)
    if getattr(text, "rope_parameters", None):
        text.standardize_rope_params()  # the original context beside RoPE, too, as its code does
    for rope in _ropes(text):
        numbers = (rope.get("attn_factor"), rope.get("factor"))  # transformers does not read the first
        if rope.get("rope_type") == "yarn" and all(isinstance(each, int | float) for each in numbers):
            rope["attention_factor"] = yarn_attention_factor(rope, rope["factor"])
    for each in (config, text):
        if hasattr(each, "quantization_config"):  # the loader dequantises
            del each.quantization_config
    text.tie_word_embeddings = getattr(config, "tie_word_embeddings", False)  # the whole model's holds
    object.__setattr__(text, "pad_token_id", None)  # there is no padding, and some models look for it in every step
    return config, text


def _refuse_kinds(config: Any, text: Any, name: str) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise unserved(name, "it is an encoder with a decoder, expected a decoder alone")
    if getattr(text, "is_causal", True) is False:  # some models' code does not read it
        raise unserved(name, "its attention is not causal")
    others = {*(getattr(text, "layer_types", None) or ())} - _LAYER_KINDS
    if others:
        raise unserved(
            name, f"it has layers of {', '.join(sorted(others))}, whose state is no paged cache of keys and values"
        )


def _refuse_sizes(text: Any) -> None:
    """transformers does not, and the examined model takes as long as config.json says."""
    for key, most in _LARGEST.items():
        size = vars(text).get(text.attribute_map.get(key, key))  # as an attribute it has to be the same in all layers
        if isinstance(size, int) and not 1 <= size <= most:
            raise ModelLoadError(f"config.json: {key} is {size}, expected 1 to {most}: correct it, or fetch it again")


def _calls(model_class: Any, text: Any, name: str) -> list[Call]:
    """The calls of its layers in a forward pass without numbers."""
    transformers.AttentionInterface.register(NAME, attention)
    transformers.AttentionInterface.register(_EXAMINED, attention)
    AttentionMaskInterface.register(_EXAMINED, _mask)
    torch.distributions.Distribution.set_default_validate_args(value=False)  # it takes numbers, and time (Gemma 3n)
    calls: list[Call] = []
    token = attend_of_pass.set(calls)
    try:
        with torch.device("meta"), torch.inference_mode():
            model = model_class._from_config(_with_fixed_rope(text), attn_implementation=_EXAMINED).eval()
            _skip_experts(model)
            pass_latents(model)
            tokens = torch.zeros(1, 3, dtype=torch.long)
            places = torch.arange(3)[None]
            mask = None if _is_stateful(model_class) else torch.ones_like(tokens)  # their code looks at its numbers
            model(input_ids=tokens, attention_mask=mask, position_ids=places, use_cache=False)
    except ModelLoadError as error:
        raise unserved(name, str(error)) from error
    except Exception as error:  # of code that was written for other attention
        problem = "its code fails with attention that is not its own, or with this config.json"
        if isinstance(error, KeyError) and error.args == (_EXAMINED,):
            problem = "its attention does not go through transformers' AttentionInterface"
        if _META_TENSOR.search(str(error)):  # its attention may be as expected
            problem = "its code reads numbers while it is examined, before weights are loaded"
        raise unserved(name, f"{problem} ({one_line(error)})") from error
    finally:
        attend_of_pass.reset(token)
    _refuse_attention(calls, text, name)
    return calls


def _sources(calls: list[Call]) -> tuple[int, ...]:
    """As of `KVCacheShape`: layers that share keys and values pass on the same tensor."""
    sources = tuple(next(layer for layer, other in enumerate(calls) if other.keys is call.keys) for call in calls)
    return () if sources == tuple(range(len(calls))) else sources


def _refuse_attention(calls: list[Call], text: Any, name: str) -> None:
    problem = None
    unknown = {setting for call in calls for setting in call.settings} - _UNDERSTOOD - _WITHOUT_EFFECT
    if [call.layer for call in calls] != list(range(text.num_hidden_layers)):
        problem = f"{len(calls)} of its {text.num_hidden_layers} layers have attention, expected every layer once"
    elif uneven := [call.heads for call in calls if call.heads.num_heads % call.heads.num_kv_heads]:
        problem = f"{uneven[0].num_heads} heads of queries share {uneven[0].num_kv_heads} of keys, expected a divisor"
    elif len(kinds := {(call.window is None, call.heads) for call in calls}) > len({is_full for is_full, _ in kinds}):
        problem = "its layers differ in heads, and not only those with a window from the others"
    elif (largest := max(rows := {call.heads.row for call in calls})) % min(rows):
        problem = f"the keys of its layers have {largest} or {min(rows)} numbers, expected multiples of one another"
    elif wider := [call for call in calls if call.value_dim > call.heads.head_dim]:
        problem = f"its keys have {wider[0].heads.head_dim} numbers and its values {wider[0].value_dim}"
    elif getattr(text.per_layer_config[0], "kv_lora_rank", None) and not all(call.is_latent for call in calls):
        problem = "it has latent attention, whose cache holds no keys and values by head"
    elif not all(call.is_causal for call in calls):
        problem = "its attention is not causal"
    elif unknown:
        problem = f"its attention takes {', '.join(sorted(unknown))}, which the paged cache does not compute"
    if problem is not None:
        raise unserved(name, problem)


def unserved(name: str, problem: str) -> ModelLoadError:
    """A refusal that lists what is supported."""
    return ModelLoadError(
        f"{name} cannot be served: {problem}. These can be served: {', '.join(SERVED)}, by our own code; by that of "
        "transformers, decoders whose every layer has causal attention to keys and values by head, or to latents "
        "(Gemma 4, DeepSeek, OLMoE, Phi, GLM, Granite, Cohere and others); and encoders such as BERT and ModernBERT"
    )


def _with_fixed_rope(text: Any) -> Any:
    """Without the kinds of RoPE that look at the positions, of which the meta device has none."""
    text = copy.deepcopy(text)
    for rope in _ropes(text):
        if rope.get("rope_type") in _GROWING_ROPE:
            rope["rope_type"] = "default"
    return text


def fix_long_rope(text: Any, max_model_len: int) -> None:
    """Use the factors for long contexts at every position, where requests may be longer than the original context.

    transformers chooses between two sets of factors by the last position of a step, also under keys that are cached.
    """
    for rope in _ropes(text):
        original = rope.get("original_max_position_embeddings")
        if rope.get("rope_type") == "longrope" and original is not None and max_model_len > original:
            rope["short_factor"] = rope["long_factor"]
            if "long_mscale" in rope:  # PhiMoE
                rope["short_mscale"] = rope["long_mscale"]


def _ropes(text: Any) -> list[dict[str, Any]]:
    """Its RoPE, or that of each kind of layer."""
    rope = getattr(text, "rope_parameters", None) or {}
    return [rope, *(each for each in rope.values() if isinstance(each, dict))]


def _max_context(text: Any, name: str) -> int:
    limit = getattr(text, "max_position_embeddings", None)
    if not isinstance(limit, int):
        raise unserved(name, "its configuration has no max_position_embeddings")
    for rope in _ropes(text):
        if rope.get("rope_type") == "dynamic":
            limit = min(limit, int(rope.get("max_position_embeddings") or limit))
    return max(stretched_context(limit, rope) for rope in _ropes(text))


def _dtype(config: Any, text: Any) -> str | None:
    dtype = getattr(text, "dtype", None) or getattr(config, "dtype", None)
    return None if dtype is None else str(dtype)


def _mask(
    *_: Any, mask_function: Callable[..., torch.Tensor], config: Any, local_size: int | None = None, **__: Any
) -> torch.Tensor:
    """The mask function of `_EXAMINED`: a `Mask`, or a tensor where it is not one.

    `mask_function` says which keys a query sees; transformers' own masks are built from it. That of chunks counts from
    the end of the padding, of which there is none, but which is not known here.
    """
    if local_size is not None and local_size == getattr(config, "attention_chunk_size", None):
        return torch.empty(1, 1, CHUNKS, local_size, device="meta").as_subclass(Mask)
    windows = {_seen(mask_function, query) for query in (_FAR, _FAR + 12345)}  # in chunks it sees another number
    window = windows.pop()
    mask = torch.empty(1, 1, 1, window or 0, device="meta")
    return mask if windows or window is None else mask.as_subclass(Mask)


def _seen(mask_function: Callable[..., torch.Tensor], query: int) -> int | None:
    """The number of tokens that a query at a far position sees, itself included; 0: all; None: not so."""

    def sees(key: int) -> bool:
        places = (torch.tensor(each, device="cpu") for each in (0, 0, query, key))
        return bool(mask_function(*places))

    if not sees(query) or sees(query + 1):
        return None
    if sees(0):
        return 0
    hidden, seen = 0, query
    while seen - hidden > 1:
        middle = (hidden + seen) // 2
        hidden, seen = (hidden, middle) if sees(middle) else (middle, seen)
    return query - seen + 1


def _skip_experts(model: Any) -> None:
    """Those of some models choose their tokens by numbers, which the meta device has none of."""
    for module in model.modules():
        if type(module).__name__.endswith("Experts"):
            module.forward = lambda hidden, *_, **__: hidden


def silence_transformers() -> None:
    """What is wrong with a checkpoint is reported by an exception, in one sentence."""
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
