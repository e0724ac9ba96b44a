"""config.json and generation_config.json of a checkpoint, validated: wrong types and absurd sizes get one message."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from llmservice_planner.model.config import ShapeError
from llmservice_planner.model.quantization import QuantizationError
from llmservice_planner.model.quantization_config import SIDECARS, with_sidecars
from llmservice_server.types.errors import ModelLoadError

_SHOWN = 80  # characters of a wrong value

Size = Annotated[int, Field(ge=1, le=1 << 20)]
Count = Annotated[int, Field(ge=1, le=4096)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Context = Annotated[float, Field(ge=1, le=1 << 31)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@contextmanager
def as_load_errors() -> Iterator[None]:
    """Raises `ModelLoadError` for the planner's errors of a checkpoint."""
    try:
        yield
    except (ShapeError, QuantizationError) as error:
        raise ModelLoadError(str(error)) from error


class _File(BaseModel):
    """JSON's own types, nothing converted; unknown keys are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    @classmethod
    def parse(cls, content: Any, name: str) -> Self:
        """Raises `ModelLoadError` with the first key that is wrong; `name` is the file's."""
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            first = max(error.errors(include_url=False), key=lambda each: len(each["loc"]))  # the deepest of a union's
            parts = map(str, first["loc"])
            key = ".".join(part for part in parts if part.isidentifier() or part.isdigit())  # without union branches
            if first["type"] == "missing":
                raise ModelLoadError(f"{name} has no {key}") from None
            shown = repr(first["input"])
            shown = shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "…"
            expected = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
            raise ModelLoadError(f"{name}: {key} is {shown}, expected {expected}") from None


class RopeParameters(_File):
    """`rope_parameters` (transformers 5) or `rope_scaling` (before)."""

    rope_type: str | None = None
    type: str | None = None  # the older name
    rope_theta: Positive | None = None
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_max_position_embeddings: Context | None = None
    attention_factor: Number | None = None
    attn_factor: Positive | None = None  # multiplies what takes the place of the former
    beta_fast: Number | None = None
    beta_slow: Number | None = None
    mscale: Number | None = None
    mscale_all_dim: Number | None = None
    partial_rotary_factor: Number | None = None
    truncate: bool = True

    @model_validator(mode="before")
    @classmethod
    def _refuse_by_layer_type(cls, content: Any) -> Any:
        if isinstance(content, dict) and any(isinstance(value, dict) for value in content.values()):
            raise ValueError("one set of numbers, or one for full_attention and one for sliding_attention")
        return content


class _EndTokens(_File):
    """The ids that end an answer, which either file may name."""

    eos_token_id: TokenId | list[TokenId] | None = None


class CheckpointConfig(_EndTokens):
    """config.json: what the decoders that we run need of it."""

    architectures: list[str] = Field(default_factory=list)
    vocab_size: Annotated[int, Field(ge=1, le=1 << 24)]
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    max_position_embeddings: Annotated[int, Field(ge=1, le=1 << 31)]
    rms_norm_eps: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] | None = None
    original_max_position_embeddings: Context | None = None
    rope_theta: Positive | None = None
    rope_parameters: RopeParameters | None = None
    rope_scaling: RopeParameters | None = None
    rope_local_base_freq: Positive | None = None
    local_rope_parameters: RopeParameters | None = None  # of layers with a window; in `rope_parameters` of the file
    partial_rotary_factor: Number | None = None
    sliding_window: Annotated[int, Field(ge=0, le=1 << 31)] | None = None  # 0: none, as Qwen2-MoE writes it
    use_sliding_window: bool | None = None
    max_window_layers: Annotated[int, Field(ge=0)] | None = None
    layer_types: list[str] | None = None
    attention_bias: bool | None = None
    qkv_bias: bool | None = None
    mlp_bias: bool | None = None
    tie_word_embeddings: bool | None = None
    hidden_act: str | None = None
    hidden_activation: str | None = None  # Gemma's name of it
    query_pre_attn_scalar: Positive | None = None
    attn_logit_softcapping: Positive | None = None
    final_logit_softcapping: Positive | None = None
    sliding_window_pattern: Count | None = None
    num_local_experts: Count | None = None
    num_experts: Count | None = None
    num_experts_per_tok: Count | None = None
    moe_intermediate_size: Size | None = None
    shared_expert_intermediate_size: Annotated[int, Field(ge=0, le=1 << 20)] | None = None
    norm_topk_prob: bool | None = None
    mlp_only_layers: list[Annotated[int, Field(ge=0)]] | None = None
    decoder_sparse_step: Count | None = None
    swiglu_limit: Number | None = None
    swiglu_alpha: Number | None = None
    quantization_config: Any = None
    dtype: str | None = None
    torch_dtype: str | None = None  # the older name of dtype

    @model_validator(mode="before")
    @classmethod
    def _split_rope_parameters(cls, content: Any) -> Any:
        rope = content.get("rope_parameters") if isinstance(content, dict) else None
        if not isinstance(rope, dict) or not rope.keys() >= {"full_attention", "sliding_attention"}:
            return content  # GPTQModel adds others beside these two, which transformers does not read
        full, local = rope["full_attention"], rope["sliding_attention"]
        return {**content, "rope_parameters": full, "local_rope_parameters": local}


_SAMPLING_DEFAULTS = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"}


class GenerationConfig(_EndTokens):
    """generation_config.json: when an answer ends, and the sampling parameters that the model's authors recommend."""

    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None

    @classmethod
    def of(cls, folder: Path) -> Self:
        """The one of a checkpoint, which may have none. Raises `ModelLoadError`."""
        path = folder / "generation_config.json"
        return cls.parse(read_json_object(path), path.name) if path.exists() else cls()

    @property
    def sampling_defaults(self) -> dict[str, float]:
        """By name, the sampling parameters of requests that do not set them."""
        return self.model_dump(include=_SAMPLING_DEFAULTS, exclude_none=True)


_EXPRESSION = re.compile(r"\^?(?:\w|-|\.[*+]?|\\\.|\\d\+?|\[[\w-]+\]\+?|\((?:\?:)?[\w.]+(?:\|[\w.]+)*\))+\$?")
_LONGEST_EXPRESSION = 256
_MOST_CHOICES = 4  # matching takes up to the length of a name to the power of their number
_MOST_KEYS = 4096


def _expressions(pattern: dict[str, Any] | None) -> dict[str, Any] | None:
    for key in pattern or ():
        if not _is_quick(key):
            raise ValueError(
                rf"names of modules, or expressions of up to {_MOST_CHOICES} times .*, \d+, [0-9]+ or (a|b), not "
                f"{key[:_SHOWN]}"
            )
    return pattern


def _is_quick(key: str) -> bool:
    """Whether it is a regular expression that is matched in a short time."""
    is_short = len(key) <= _LONGEST_EXPRESSION and sum(map(key.count, "*+(")) <= _MOST_CHOICES
    if not is_short or not _EXPRESSION.fullmatch(key):
        return False
    try:
        re.compile(key)
    except re.error:  # a range such as [9-0]
        return False
    return True


_Value = TypeVar("_Value", int, float)
_ByModule = Annotated[dict[str, _Value], Field(max_length=_MOST_KEYS), AfterValidator(_expressions)]
_INITS_OF_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")


class AdapterConfig(_File):
    """adapter_config.json of PEFT, as far as it decides what a LoRA adapter computes."""

    peft_type: str
    r: Annotated[int, Field(ge=1, le=4096)]
    lora_alpha: Number
    use_rslora: bool = False
    bias: str = "none"
    lora_bias: bool = False
    base_model_name_or_path: str | None = None
    use_dora: bool = False
    use_qalora: bool = False
    modules_to_save: list[str] | None = None
    rank_pattern: _ByModule[Annotated[int, Field(ge=1, le=4096)]] | None = None
    alpha_pattern: _ByModule[Number] | None = None
    target_parameters: list[str] | None = None
    layer_replication: list[Any] | None = None
    trainable_token_indices: Any = None
    alora_invocation_tokens: list[int] | None = None
    arrow_config: Any = None
    use_bdlora: Any = None
    kasa_config: Any = None
    monteclora_config: Any = None
    init_lora_weights: Any = True

    def pattern_name(self, module: str) -> str:
        """What PEFT compares with its patterns: the name of a module, or of its weight where that is the target."""
        weight = f"{module}.weight"
        targets = self.target_parameters or []
        return weight if any(f".{weight}".endswith(f".{target}") for target in targets) else module

    def rank(self, module: str) -> int:
        return _by_module(self.rank_pattern, module) or self.r

    def scale(self, module: str) -> float:
        """rsLoRA's (Kalajdzievski, 2023) is by the root of the rank."""
        rank, alpha = self.rank(module), _by_module(self.alpha_pattern, module)
        return (self.lora_alpha if alpha is None else alpha) / (math.sqrt(rank) if self.use_rslora else rank)

    @property
    def largest_rank(self) -> int:
        return max([self.r, *(self.rank_pattern or {}).values()])

    @property
    def changes_base(self) -> bool:
        """Whether training began by subtracting the factors from the base's weights, or by rounding these."""
        return str(self.init_lora_weights).lower().startswith(_INITS_OF_BASE)

    @property
    def changes_more(self) -> list[str]:
        """The keys that are set which make it more than two factors for each module."""
        names = ["use_dora", "use_qalora", "modules_to_save", "layer_replication", "trainable_token_indices"]
        names += ["alora_invocation_tokens", "arrow_config", "use_bdlora", "kasa_config", "monteclora_config"]
        return [name for name in names if getattr(self, name)]


def _by_module(pattern: dict[str, _Value] | None, module: str) -> _Value | None:
    """Of the first expression that matches the module's name or the end of it, as PEFT's `get_pattern_key`."""
    return next((value for key, value in (pattern or {}).items() if _compiled(key).match(module)), None)


@lru_cache(_MOST_KEYS)
def _compiled(key: str) -> re.Pattern[str]:
    return re.compile(rf"(.*\.)?({key})$")


def eos_token_ids(folder: Path) -> frozenset[int]:
    """The ids that end an answer: generation_config.json's, else config.json's, else those of its text_config.

    Raises `ModelLoadError`.

    Chat models end their turns with more than one token, and name them all in generation_config.json only.
    """
    ids, config = GenerationConfig.of(folder).eos_token_id, folder / "config.json"
    if ids is None and config.exists():
        raw = read_json_object(config)
        ids = _EndTokens.parse(raw, config.name).eos_token_id
        if ids is None and isinstance(text := raw.get("text_config"), dict):
            ids = _EndTokens.parse(text, f"{config.name}: text_config").eos_token_id
    return frozenset([ids] if isinstance(ids, int) else ids or [])


def architectures(config: Mapping[str, Any]) -> list[str]:
    """Those that a parsed config.json names. Raises `ModelLoadError`."""
    named = config.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise ModelLoadError(f"config.json: architectures is {repr(named)[:_SHOWN]}, expected a list of names")
    return named


def read_model_config(folder: Path) -> dict[str, Any]:
    """A checkpoint's config.json. Raises `ModelLoadError` as `read_json_object` does."""
    sidecars = {name: read_json_object(folder / name) for name in SIDECARS if (folder / name).is_file()}
    return with_sidecars(read_json_object(folder / "config.json"), sidecars)


def read_json_object(path: Path) -> dict[str, Any]:
    """Raises `ModelLoadError` where the file is missing, no JSON, or another kind of JSON."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path} is missing") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON ({error}): delete it and fetch it again") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} holds a JSON {type(content).__name__}, expected an object")
    return content
