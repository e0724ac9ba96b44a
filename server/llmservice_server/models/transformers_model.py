"""Any decoder-only model of transformers, on our paged cache.

Its attention layers call the function that is registered with transformers' `AttentionInterface`, which passes their
queries, keys and values to the step's `Attend`; its matrices are our `Linear`s. What its attention computes is read off
a forward pass on the meta device, before any weight is loaded: a model whose attention is something else, or that keeps
other state between tokens than keys and values, is refused by name.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import transformers
from safetensors import SafetensorError
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as transformers_logging

from llmservice_planner.checkpoint import LANGUAGE_MODEL
from llmservice_planner.quantization import QuantizationConfig
from llmservice_server.backend.base import Activation, Attend, LayerOps, Linear
from llmservice_server.backend.cache_shape import Heads
from llmservice_server.backend.experts import Experts, Mixture
from llmservice_server.backend.torch.layer_ops import TorchLayerOps, TorchLinear
from llmservice_server.models.config import SERVED, quantization_of
from llmservice_server.types.errors import ModelLoadError
from llmservice_server.types.messages import ModelCode

NAME = "llmservice_paged"
"""Of our attention function. There is no mask function of that name, so that transformers builds no masks."""
_EXAMINED = "llmservice_examined"
"""The same function with a mask function, which finds each layer's window."""
_FAR = 2**40
"""A position beyond every window."""
_UNDERSTOOD = {"scaling", "dropout", "sliding_window", "softcap", "s_aux"}
_WITHOUT_EFFECT = {"position_ids", "cache_position", "layer_idx"}
_LAYER_KINDS = {"full_attention", "sliding_attention"}
_GROWING_ROPE = {"dynamic": "max_position_embeddings", "longrope": "original_max_position_embeddings"}
"""Kinds whose frequencies change with the longest sequence, and up to which position they do not."""
_TEXT_PARTS = {
    rf"^{LANGUAGE_MODEL.pattern}lm_head\.": "lm_head.",
    rf"^{LANGUAGE_MODEL.pattern}(model\.)?": "model.",
}
"""Where checkpoints of models with images or sound hold their language model, and its names alone."""
_WITHOUT_IMAGES = {"glm4v_text": "glm4", "glm4v_moe_text": "glm4_moe"}
"""Kinds of language models that are another one for text alone, where a token's three positions are equal."""

LinearOf = Callable[[Sequence[str], torch.Tensor, torch.Tensor | None], Linear | None]
"""Makes a matrix of the names of the modules that it is fused of, and of their weight and bias. None: it does not."""
_STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Tensors of all experts, and what a checkpoint has for each expert instead."""
_GATES: tuple[Activation, ...] = ("silu", "gelu_tanh")
_GATE_PROBE = torch.linspace(-20.0, 20.0, 64)
"""Beyond the bounds of gates that have some."""

_attend: ContextVar[Attend | list[_Call]] = ContextVar("attend")
"""Of the forward pass that this thread computes; while a model is examined, the calls of its layers."""


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

    implementation: ClassVar[ModelCode] = "transformers"


@dataclass(frozen=True, slots=True)
class _Call:
    """What an attention layer passes to its attention function."""

    layer: int | None
    heads: Heads
    keys: torch.Tensor
    is_latent: bool
    value_dim: int
    is_causal: bool
    window: int | None
    settings: Mapping[str, Any]


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    is_causal: bool | None = None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of transformers' interface: `[1, heads, num_tokens, head_dim]` each.

    Returns `[1, num_tokens, heads, head_dim]`.
    """
    attend, is_latent = _attend.get(), _is_latent(module)
    if isinstance(attend, list):
        attend.append(
            _Call(
                layer=getattr(module, "layer_idx", None),
                heads=Heads(query.shape[1], key.shape[1], key.shape[-1]),
                keys=key,
                is_latent=is_latent,
                value_dim=value.shape[-1],
                is_causal=bool(getattr(module, "is_causal", True) if is_causal is None else is_causal),
                window=settings.get("sliding_window") if attention_mask is None else _window_of(attention_mask),
                settings={name: each for name, each in settings.items() if each is not None and each is not False},
            )
        )
        width = module.v_head_dim if is_latent else value.shape[-1]
        return value.new_empty(1, query.shape[2], query.shape[1], width), None
    if is_latent:
        query = _to_latents(module, query)
    queries, keys, values = (part[0].transpose(0, 1) for part in (query, key, value))
    head_dim, value_dim, scaling = query.shape[-1], value.shape[-1], settings.get("scaling")
    factor = 1.0 if scaling is None else scaling * head_dim**0.5
    if abs(factor - 1.0) > 1e-6:
        queries = queries * factor
    sinks = settings.get("s_aux")
    if value_dim < head_dim:
        values = torch.nn.functional.pad(values, (0, head_dim - value_dim))
    attended = attend(module.layer_idx, queries.contiguous(), torch.cat((keys, values), dim=1), sinks)
    output = attended.view(1, *queries.shape)
    return _from_latents(module, output) if is_latent else output[..., :value_dim], None


def _is_latent(module: Any) -> bool:
    """Whether it has multi-head latent attention (arXiv:2405.04434), and passes its latents on."""
    return getattr(module, "expand_kv", None) is _keep_latents


def _keep_latents(latents: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In the place of `expand_kv`, which makes keys and values by head: one row of a token is both."""
    row = torch.cat((latents, rotated), dim=-1)
    return row, row


def _expansions(module: Any) -> Sequence[torch.Tensor]:
    """From a latent to a head's keys, and to its values, `[heads, keys or values, latent]`."""
    weight: torch.Tensor = module.kv_b_proj.weight
    sizes = [module.qk_nope_head_dim, module.v_head_dim]
    return torch.split(weight.view(-1, sum(sizes), weight.shape[1]), sizes, dim=1)


def _to_latents(module: Any, query: torch.Tensor) -> torch.Tensor:
    """Queries `[1, heads, num_tokens, head_dim]` of latents: their products are those of the keys made of these."""
    plain, rotated = torch.split(query, [module.qk_nope_head_dim, module.qk_rope_head_dim], dim=-1)
    return torch.cat((plain @ _expansions(module)[0], rotated), dim=-1)


def _from_latents(module: Any, output: torch.Tensor) -> torch.Tensor:
    """Sums of values, of the sums of latents `[1, num_tokens, heads, row]`."""
    latents = output[..., : module.kv_lora_rank].transpose(1, 2)
    return (latents @ _expansions(module)[1].transpose(1, 2)).transpose(1, 2)


class _Mask(torch.Tensor):
    """A mask that is causal within the window `shape[-1]`; 0: without one. What a model computes of it is none."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __getitem__(self, places: Any) -> torch.Tensor:
        """It stays one where only queries are chosen, as Gemma does for layers that share keys."""
        chooses_queries = isinstance(places, tuple) and places[:2] + places[3:] == (slice(None),) * 3
        return self if chooses_queries else super().__getitem__(places)


def _mask(*_: Any, mask_function: Callable[..., torch.Tensor], **__: Any) -> torch.Tensor:
    """The mask function of `_EXAMINED`: a `_Mask`, or a tensor where it is not one.

    `mask_function` says which keys a query sees; transformers' own masks are built from it.
    """
    windows = {_seen(mask_function, query) for query in (_FAR, _FAR + 12345)}  # in chunks it sees another number
    window = windows.pop()
    mask = torch.empty(1, 1, 1, window or 0, device="meta")
    return mask if windows or window is None else mask.as_subclass(_Mask)


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


def _window_of(mask: torch.Tensor) -> int | None:
    if not isinstance(mask, _Mask):
        raise ModelLoadError("its attention is not causal, or has a mask of its own")
    return mask.shape[-1] or None


def examine(folder: Path) -> TransformersConfig:
    """Raises `ModelLoadError` for a model that cannot run on the paged cache, and says what of it cannot."""
    config, text = _read(folder)
    name = text.architectures[0] if text.architectures else type(text).__name__
    _refuse_kinds(config, text, name)
    if not hasattr(transformers, config.architectures[0] if config.architectures else name):
        raise unserved(name, "transformers has no model of this name, and code of a checkpoint is never executed")
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), None)
    if model_class is None:
        raise unserved(name, "transformers has no decoder-only language model for it")
    if getattr(model_class, "_is_stateful", False):
        raise unserved(name, "it keeps recurrent state between tokens, not keys and values")
    calls = _calls(model_class, text, name)
    kinds = _heads_by_kind(calls)
    full, sliding = kinds.get(False), kinds.get(True)
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
        softcap=softcaps.pop(),
        has_sinks=any("s_aux" in call.settings for call in calls),
        max_context=_max_context(text, name),
        dtype=_dtype(config, text),
        sliding_heads=sliding if sliding != heads else None,
        sources=_sources(calls),
        is_latent=calls[0].is_latent,
        tied_embeddings=bool(text.tie_word_embeddings),
        quantization=quantization_of(json.loads((folder / "config.json").read_text(encoding="utf-8"))),
    )


def _read(folder: Path) -> tuple[Any, Any]:
    """The checkpoint's configuration, and that of its language model, which is often the same."""
    silence_transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        named = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if "auto_map" in named:
            raise ModelLoadError(
                f"config.json: {named.get('model_type')} needs code that comes with the checkpoint, which is never "
                "executed: use a checkpoint of a model that transformers itself implements"
            ) from error
        raise ModelLoadError(f"config.json describes no model that transformers knows: {_line(error)}") from error
    text = config.get_text_config(decoder=True)
    if text.model_type in _WITHOUT_IMAGES:
        keys = {"head_dim": text.hidden_size // max(1, text.num_attention_heads), **text.to_dict()}
        keys = {key: value for key, value in keys.items() if key not in ("model_type", "architectures")}
        text = transformers.AutoConfig.for_model(_WITHOUT_IMAGES[text.model_type], **keys)
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


def _calls(model_class: Any, text: Any, name: str) -> list[_Call]:
    """The calls of its layers in a forward pass without numbers."""
    transformers.AttentionInterface.register(NAME, attention)
    transformers.AttentionInterface.register(_EXAMINED, attention)
    AttentionMaskInterface.register(_EXAMINED, _mask)
    torch.distributions.Distribution.set_default_validate_args(value=False)  # it takes numbers, and time (Gemma 3n)
    calls: list[_Call] = []
    token = _attend.set(calls)
    try:
        with torch.device("meta"), torch.inference_mode():
            model = model_class._from_config(_with_fixed_rope(text), attn_implementation=_EXAMINED).eval()
            _choose_experts(model, "batched_mm")
            _pass_latents(model)
            tokens = torch.zeros(1, 3, dtype=torch.long)
            places = torch.arange(3)[None]
            model(input_ids=tokens, attention_mask=torch.ones_like(tokens), position_ids=places, use_cache=False)
    except ModelLoadError as error:
        raise unserved(name, str(error)) from error
    except Exception as error:  # of code that was written for other attention
        raise unserved(
            name, f"its attention does not go through transformers' AttentionInterface ({_line(error)})"
        ) from error
    finally:
        _attend.reset(token)
    _refuse_attention(calls, text, name)
    return calls


def _heads_by_kind(calls: list[_Call]) -> dict[bool, Heads]:
    """By whether a layer has a window."""
    return {call.window is not None: call.heads for call in calls}


def _sources(calls: list[_Call]) -> tuple[int, ...]:
    """As of `KVCacheShape`: layers that share keys and values pass on the same tensor."""
    sources = tuple(next(layer for layer, other in enumerate(calls) if other.keys is call.keys) for call in calls)
    return () if sources == tuple(range(len(calls))) else sources


def _refuse_attention(calls: list[_Call], text: Any, name: str) -> None:
    problem = None
    unknown = {
        setting
        for call in calls
        for setting in call.settings
        if setting not in _UNDERSTOOD and setting not in _WITHOUT_EFFECT
    }
    if [call.layer for call in calls] != list(range(text.num_hidden_layers)):
        problem = f"{len(calls)} of its {text.num_hidden_layers} layers have attention, expected every layer once"
    elif len(kinds := {(call.window is None, call.heads) for call in calls}) > len({is_full for is_full, _ in kinds}):
        problem = "its layers differ in heads, and not only those with a window from the others"
    elif (largest := max(rows := {call.heads.row for call in calls})) % min(rows):
        problem = f"the keys of its layers have {largest} or {min(rows)} numbers, expected multiples of one another"
    elif wider := [call for call in calls if call.value_dim > call.heads.head_dim]:
        problem = f"its keys have {wider[0].heads.head_dim} numbers and its values {wider[0].value_dim}"
    elif getattr(text, "kv_lora_rank", None) and not all(call.is_latent for call in calls):
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
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") in _GROWING_ROPE:
        text = copy.deepcopy(text)
        text.rope_parameters = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return text


def _max_context(text: Any, name: str) -> int:
    limit = getattr(text, "max_position_embeddings", None)
    if not isinstance(limit, int):
        raise unserved(name, "its configuration has no max_position_embeddings")
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [rope, *(each for each in rope.values() if isinstance(each, dict))]
    for each in kinds:
        if (key := _GROWING_ROPE.get(str(each.get("rope_type")))) is not None:
            limit = min(limit, int(each.get(key) or getattr(text, key, None) or limit))
    return limit


def _dtype(config: Any, text: Any) -> str | None:
    dtype = getattr(text, "dtype", None) or getattr(config, "dtype", None)
    return None if dtype is None else str(dtype)


def _pass_latents(model: Any) -> None:
    """Have layers with latent attention pass on latents, as these are what is cached."""
    for module in model.modules():
        if hasattr(module, "expand_kv") and hasattr(module, "kv_b_proj"):
            module.expand_kv = _keep_latents


def _choose_experts(model: Any, implementation: str) -> None:
    """On the meta device experts must not depend on which of them are chosen. Other models have no such setting."""
    if any("Experts" in type(module).__name__ for module in model.modules()):
        model.set_experts_implementation(implementation)


def silence_transformers() -> None:
    """What is wrong with a checkpoint is reported by an exception, in one sentence."""
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


class _Product(torch.nn.Module):
    """A `Linear` of ours in the place of one of torch's."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.linear = linear

    @property
    def weight(self) -> torch.Tensor:
        return self.linear.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[..., in]` to `[..., out]`."""
        return self.linear(hidden.reshape(-1, hidden.shape[-1])).view(*hidden.shape[:-1], -1)


class _Mixture(torch.nn.Module):
    """`Experts` of ours in the place of those of transformers."""

    def __init__(self, experts: Experts, ops_of: Callable[[], LayerOps]) -> None:
        super().__init__()
        self.experts = experts
        self._ops_of = ops_of

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """hidden: `[..., hidden_size]`. chosen and weights: of each token, `[num_tokens, top_k]`."""
        rows = hidden.reshape(-1, hidden.shape[-1]).contiguous()
        ops = self._ops_of()
        return self.experts(rows, chosen.contiguous(), weights.float().contiguous(), ops).view_as(hidden)


class _Given(torch.nn.Module):
    """In the place of the decoder when only the head is to be computed: returns the states that are set."""

    states: torch.Tensor

    @property
    def decoder(self) -> _Given:
        """OPT's head calls a part of it."""
        return self

    def forward(self, *_: Any, **__: Any) -> BaseModelOutputWithPast:
        return _States(last_hidden_state=self.states[None])


class _States(BaseModelOutputWithPast):
    """Lacks what some decoders return beside the states, such as the router's logits: it is not read further."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class TransformersModel:
    """Implements `Model`."""

    def __init__(
        self,
        model: Any,
        config: TransformersConfig,
        dtype: torch.dtype,
        device: torch.device,
        quantized_of: LinearOf,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.ops: LayerOps = TorchLayerOps()
        _pass_latents(model)
        _drop_masks(model)
        head = model.get_output_embeddings()
        products: dict[int, _Product] = {}
        self._mixtures: list[_Mixture] = []
        self._replace(model, quantized_of, products)  # before the others are moved: the device never holds these dense
        model.to(device)
        self._replace(model, lambda _, weight, bias: TorchLinear(weight.contiguous(), bias), products)
        last = products.pop(id(head), None)
        self._products = [*products.values(), *([] if last is None else [last])]
        self._decoder = model.base_model
        self.modules = self._modules(model.base_model_prefix)
        self._given = _Given()
        setattr(model, model.base_model_prefix, self._given)
        self._head_only = model

    def _replace(self, model: torch.nn.Module, linear_of: LinearOf, products: dict[int, _Product]) -> None:
        """What `linear_of` makes a matrix of. `products`: by the ids of what they are in the place of."""
        for module, name, put in _parts_of(model):
            if (activation := _gate_of(module)) is None:
                if (linear := linear_of([name], *_matrix_of(module))) is not None:
                    products[id(module)] = _Product(linear)
                    put(products[id(module)])
            elif (experts := _experts_of(module, name, activation, linear_of, self.device)) is not None:
                self._mixtures.append(_Mixture(experts, lambda: self.ops))
                put(self._mixtures[-1])

    @classmethod
    def load(
        cls,
        folder: Path,
        config: TransformersConfig,
        dtype: torch.dtype,
        device: torch.device,
        quantized_of: LinearOf = lambda *_: None,
        tensors: dict[str, torch.Tensor] | None = None,
    ) -> TransformersModel:
        """`tensors`: the checkpoint's, under its names or the model's; None: they are read from its files.

        quantized_of: makes matrices that are not dense, which the device holds instead.

        Raises `ModelLoadError` for a tensor that is missing, of the wrong shape, or unreadable.
        """
        whole, text = _read(folder)
        text.tie_word_embeddings = config.tied_embeddings
        model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(text)]
        try:
            model, found = model_class.from_pretrained(
                folder if tensors is None else None,
                state_dict=tensors,
                config=text,
                dtype=dtype,
                attn_implementation=NAME,
                key_mapping=None if text is whole else _TEXT_PARTS,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # they are refused below, by their names
                output_loading_info=True,
            )
        except SafetensorError as error:
            raise ModelLoadError(f"{folder} holds an unreadable safetensors file ({error}): fetch it again") from error
        except Exception as error:  # transformers raises what its parts raise
            raise ModelLoadError(f"{folder}: transformers cannot load the weights: {_line(error)}") from error
        _refuse_incomplete(found, folder, config, is_part=text is not whole)
        return cls(model.eval().requires_grad_(requires_grad=False), config, dtype, device, quantized_of)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """The states after the last norm; otherwise as `Model.forward`."""
        token = _attend.set(attend)
        try:
            output = self._decoder(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        finally:
            _attend.reset(token)
        states: torch.Tensor = output.last_hidden_state[0]
        return states

    def forward_by_piece(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend, rows: int | None = None
    ) -> Iterator[torch.Tensor | None]:
        """One piece: transformers computes all layers in one call."""
        yield self.forward(token_ids, positions, attend)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """By the model's own code, which may scale or bound what its head computes."""
        self._given.states = hidden
        tokens = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
        logits: torch.Tensor = self._head_only(input_ids=tokens, use_cache=False).logits[0]
        return logits.float()

    def norm_states(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def linears(self) -> Iterator[Linear]:
        return (product.linear for product in self._products)

    def mixtures(self) -> Iterator[Mixture]:
        return iter(self._mixtures)

    def _modules(self, prefix: str) -> list[dict[str, int]]:
        names = {id(module): f"{prefix}.{name}" for name, module in self._decoder.named_modules()}
        return [
            *(
                {names[id(product)]: product.weight.shape[0]} if id(product) in names else {}
                for product in self._products
            ),
            *({} for mixture in self._mixtures for _ in (*mixture.experts.gate_up, *mixture.experts.down)),
        ]

    def map_linears(self, convert: Callable[[Linear], Linear]) -> None:
        for product in self._products:
            product.linear = convert(product.linear)
        for mixture in self._mixtures:
            mixture.experts.map_linears(convert)

    @property
    def weight_bytes(self) -> int:
        """Matrices that are not ours, and ours. A tied head that is packed is a second copy of the embedding."""
        modules = (self._decoder, self._head_only)
        tensors: dict[int, int] = {
            id(each): each.nbytes for module in modules for each in (*module.parameters(), *module.buffers())
        }
        ours: int = sum(linear.nbytes for linear in self.linears() if id(linear.weight) not in tensors)
        return sum(tensors.values()) + ours + sum(mixture.experts.nbytes for mixture in self._mixtures)


class Replaced(NamedTuple):
    """A weight of transformers' model that ours stand for."""

    tensor: str
    shape: tuple[int, ...]
    modules: list[list[str]]  # of each of our matrices, what the checkpoint may name the modules that it is fused of


def replaced_weights(folder: Path) -> Iterator[Replaced]:
    """Of a model that `examine` has found fit to be served."""
    _, text = _read(folder)
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(text)]
    with torch.device("meta"):
        model = model_class._from_config(text)
    _pass_latents(model)
    for module, name, _ in _parts_of(model):
        if _gate_of(module) is None:
            yield Replaced(f"{name}.weight", tuple(module.weight.shape), [[name]])
            continue
        for stack, parts in _STACKS.items():
            shape = tuple(getattr(module, stack).shape)
            modules = [[f"{name}.{expert}.{part}" for part in parts] for expert in range(shape[0])]
            yield Replaced(f"{name}.{stack}", shape, modules)


def _parts_of(model: torch.nn.Module) -> Iterator[tuple[Any, str, Callable[[torch.nn.Module], None]]]:
    """Linear layers, and experts with a gate of ours; the name of each, and what puts another in its place."""
    for path, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            if _is_latent(parent) and child is parent.kv_b_proj:
                continue  # it is multiplied with queries and sums, head by head
            if type(child) is torch.nn.Linear or isinstance(child, Conv1D) or _gate_of(child) is not None:
                yield child, f"{path}{path and '.'}{name}", partial(setattr, parent, name)


def _matrix_of(module: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weight `[out, in]` and the bias of a linear layer."""
    if isinstance(module, Conv1D):
        return module.weight.data.t(), module.bias.data
    return module.weight, module.bias


def _gate_of(module: Any) -> Activation | None:
    """Of experts with the layout of ours; None: it is something else, or its gate is none of ours.

    transformers has all experts in one tensor, and attributes that describe it.
    """
    kind = tuple(getattr(module, name, None) for name in ("has_gate", "is_concatenated", "is_transposed"))
    if kind != (True, True, False) or getattr(module, "has_post_expert_norm", False):
        return None
    for activation in _GATES:
        expected = TorchLayerOps().gated(_GATE_PROBE[None].clone(), activation)
        if torch.allclose(module._apply_gate(_GATE_PROBE[None]), expected):
            return activation
    return None


def _experts_of(
    module: Any, name: str, activation: Activation, linear_of: LinearOf, device: torch.device
) -> Experts | None:
    """None if all of them stay as they are."""
    dense: list[list[TorchLinear]] = []
    found: list[list[Linear | None]] = []
    for stack, parts in _STACKS.items():
        weights, biases = getattr(module, stack).data, getattr(module, f"{stack}_bias") if module.has_bias else None
        dense.append([TorchLinear(weight, None if biases is None else biases[at]) for at, weight in enumerate(weights)])
        names = ([f"{name}.{expert}.{part}" for part in parts] for expert in range(len(weights)))
        found.append([linear_of(each, at.weight, at.bias) for each, at in zip(names, dense[-1], strict=True)])
    if not any(found[0] + found[1]):
        return None
    gate_up, down = (
        [linear or plain.to(device) for linear, plain in zip(*each, strict=True)]
        for each in zip(found, dense, strict=True)
    )
    return Experts(gate_up, down, activation)


def _drop_masks(decoder: torch.nn.Module) -> None:
    """Free the causal masks `[max_context, max_context]` that some models keep and none computes with."""
    for module in decoder.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.dtype == torch.bool and buffer.ndim >= 2:
                module.register_buffer(name, buffer.new_empty(0), persistent=False)


def _refuse_incomplete(found: Mapping[str, Any], folder: Path, config: TransformersConfig, *, is_part: bool) -> None:
    missing, unknown = sorted(found["missing_keys"]), sorted(found["unexpected_keys"])
    unknown = [name for name in unknown if not re.search(r"rotary_emb\.inv_freq$|\.masked_bias$|\.attn\.bias$", name)]
    mismatched = sorted(found["mismatched_keys"])
    if missing:
        raise ModelLoadError(
            f"{folder}: {len(missing)} tensors that {config.architecture} needs are in none of its safetensors files, "
            f"among them {missing[0]}"
        )
    if mismatched:
        key, given, expected = mismatched[0]
        raise ModelLoadError(f"{folder}: {key} has the shape {list(given)}, config.json makes it {list(expected)}")
    if unknown and not is_part:
        raise ModelLoadError(
            f"{folder} holds {unknown[0]}, which {config.architecture} with this config.json has no place for"
        )
